"""Cases of the backend with SGLang's own managers, pools and queues; test_sglang_kv.py names them.

python -m tests.engines.kv_sglang FOLDER runs them: FOLDER/cases.json says what each case came to.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.arg_groups import choices
from sglang.srt.disaggregation import decode, utils
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.server_args import ServerArgs

from putget_transfer.adapters import options
from putget_transfer.adapters.sglang import NAME
from putget_transfer.adapters.sglang.manager import refuse
from tests.engines.kv_sglang_sides import PAGE, Side, address, kind, reason_of, wait
from tests.engines.prompts import free_port
from tests.project.checkout import ROOT, tomllib

TIMEOUT_S = 1.5


def configure(model: Path) -> None:
    """The steps of SGLang's scheduler before it makes a manager."""
    os.environ[options.VARIABLE] = json.dumps({"address": "127.0.0.1", "timeout_s": TIMEOUT_S, "confirm_s": TIMEOUT_S})
    args = ServerArgs(
        model_path=str(model),
        device="cpu",
        dtype="float32",
        host="127.0.0.1",
        skip_tokenizer_init=True,
        disaggregation_mode="decode",
        disaggregation_transfer_backend=NAME,
        disaggregation_bootstrap_port=free_port(),
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
    )
    args.resolve_once()
    runtime_context.publish(args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))


@contextlib.contextmanager
def bootstrap() -> Iterator[None]:
    # SGLang's server keeps its port when it is closed.
    runtime_context.get_context().override("a case", disaggregation_bootstrap_port=free_port())
    server = kind("BOOTSTRAP_SERVER")(
        runtime_context.get_serving().host, runtime_context.get_disagg().disaggregation_bootstrap_port
    )
    try:
        yield
    finally:
        server.close()


@contextlib.contextmanager
def pair(**given: Any) -> Iterator[tuple[Side, Side]]:
    with bootstrap():
        prefill, decoding = Side("prefill", **given), Side("decode", **given)
        try:
            yield prefill, decoding
        finally:
            prefill.close()
            decoding.close()


def succeed(*both: Any) -> None:
    wait(lambda: all(one.poll() == KVPoll.Success for one in both))


def chunks_arrive(**given: Any) -> None:
    """Two requests at once, in chunks; also one that is asked for after its prefill server has it."""
    with pair(**given) as (prefill, decoding):
        sender, other = prefill.sender(7), prefill.sender(8)
        receiver, second = decoding.receiver(7), decoding.receiver(8)
        decoding.ask(receiver, [9, 3, 20], 1)
        assert prefill.begin(sender, 3, 5) == 0
        assert other.poll() == KVPoll.Bootstrapping
        prefill.compute(sender, [4, 5], 0)
        assert receiver.poll() == KVPoll.Transferring
        prefill.compute(sender, [1], 2)
        succeed(sender, receiver)
        decoding.check(7, 0, [9, 3, 20])
        assert decoding.token(1) == 8
        assert sender.get_transfer_metric().transfer_total_bytes == 3 * sum(prefill.manager.kv_args.kv_item_lens)
        sender.clear()
        receiver.clear()
        decoding.poison()
        decoding.ask(second, [3, 9], 0)
        prefill.begin(other, 2, 5)
        prefill.compute(other, [4, 30], 0)
        succeed(other, second)
        decoding.check(8, 0, [3, 9])
        assert not decoding.manager.receiving.held


def a_latent_cache() -> None:
    chunks_arrive(latent=True)


def a_prefix_that_is_there_is_not_moved() -> None:
    with pair() as (prefill, decoding):
        sender, receiver = prefill.sender(7), decoding.receiver(7)
        decoding.ask(receiver, [9, 3], 1, prefix=2 * PAGE)
        assert prefill.begin(sender, 4, 0) == 2 * PAGE
        prefill.compute(sender, [6, 2], 2)
        succeed(sender, receiver)
        decoding.check(7, 2, [9, 3])


def heads_of_two_ranks_meet_in_one() -> None:
    with bootstrap():
        prefills, decoding = [Side("prefill", tp=(rank, 2)) for rank in range(2)], Side("decode")
        senders, receiver = [one.sender(7) for one in prefills], decoding.receiver(7)
        decoding.ask(receiver, [9, 3], 1)
        for prefill, sender in zip(prefills, senders, strict=True):
            assert receiver.poll() == KVPoll.Transferring
            prefill.begin(sender, 2, 0)
            prefill.compute(sender, [6, 2], 0)
        succeed(*senders, receiver)
        decoding.check(7, 0, [9, 3])
        for side in (*prefills, decoding):
            side.close()


def heads_of_one_rank_go_to_two() -> None:
    with bootstrap():
        prefill, decodings = Side("prefill"), [Side("decode", tp=(rank, 2)) for rank in range(2)]
        sender, receivers = prefill.sender(7), [one.receiver(7) for one in decodings]
        decodings[0].ask(receivers[0], [9, 3], 1)
        decodings[1].ask(receivers[1], [9, 3], 1)
        prefill.begin(sender, 2, 0)
        prefill.compute(sender, [6, 2], 0)
        succeed(sender, *receivers)
        for decoding in decodings:
            decoding.check(7, 0, [9, 3])
        for side in (prefill, *decodings):
            side.close()


def states_move_once() -> None:
    with pair(states=True) as (prefill, decoding):
        sender, receiver = prefill.sender(7), decoding.receiver(7)
        decoding.ask(receiver, [9, 3], 1, states=[6])
        prefill.begin(sender, 2, 0)
        prefill.compute(sender, [6], 0)
        for at, state in enumerate(prefill.states):
            state[2] = at + 1.0
        prefill.compute(sender, [2], 1, states=[2])
        succeed(sender, receiver)
        for at, state in enumerate(decoding.states):
            expected = torch.full_like(state, -7.0)
            expected[6] = at + 1.0
            assert torch.equal(state, expected)


def an_abort_of_the_decode_server_gives_pages_back() -> None:
    with pair() as (prefill, decoding):
        sender, receiver = prefill.sender(7), decoding.receiver(7)
        decoding.ask(receiver, [9, 3], 1)
        prefill.begin(sender, 2, 0)
        prefill.compute(sender, [6], 0)
        receiver.abort()
        assert receiver.poll() == KVPoll.Failed
        wait(lambda: bool(decoding.manager.is_abort_release_safe(7, 1)))
        assert receiver.receive.state == "released"
        decoding.poison()
        wait(lambda: sender.poll() == KVPoll.Failed)
        prefill.compute(sender, [2], 1)
        assert "given it up" in reason_of(sender)
        assert "Aborted" in reason_of(receiver)
        # The pages are another request's.
        again, later = prefill.sender(8), decoding.receiver(8)
        decoding.ask(later, [9, 3], 1)
        prefill.begin(again, 2, 0)
        prefill.compute(again, [6, 2], 0)
        succeed(again, later)
        decoding.check(8, 0, [9, 3])


def an_abort_of_the_prefill_server_is_told() -> None:
    with pair() as (prefill, decoding):
        sender, receiver = prefill.sender(7), decoding.receiver(7)
        decoding.ask(receiver, [9, 3], 1)
        prefill.begin(sender, 2, 0)
        prefill.compute(sender, [6], 0)
        sender.abort()
        wait(lambda: sender.poll() == KVPoll.Failed and receiver.poll() == KVPoll.Failed)
        assert "Aborted by AbortReq" in reason_of(receiver)
        wait(lambda: bool(decoding.manager.is_abort_release_safe(7, 1)))
        reason_of(sender)
        # One that asks when the request is gone is told at once.
        late = decoding.receiver(7)
        decoding.ask(late, [5], 2)
        wait(lambda: late.poll() == KVPoll.Failed)
        assert "Aborted by AbortReq" in reason_of(late)


def an_abort_may_come_before_its_request() -> None:
    with pair() as (prefill, decoding):
        receiver = decoding.receiver(7)
        decoding.ask(receiver, [9, 3], 1)
        receiver.abort()
        wait(lambda: 7 in prefill.manager.sending.gone)
        sender = prefill.sender(7)
        assert sender.poll() == KVPoll.Failed
        assert "given it up" in reason_of(sender)


def another_model_is_refused() -> None:
    with bootstrap():
        prefill, decoding = Side("prefill"), Side("decode", states=True)
        receiver = decoding.receiver(7)
        decoding.ask(receiver, [9, 3], 1, states=[1])
        assert receiver.poll() == KVPoll.Failed
        said = reason_of(receiver)
        assert "mamba.5.0" in said, said
        assert decoding.manager.is_abort_release_safe(7, 1)
        prefill.close()
        decoding.close()


def a_role_may_change() -> None:
    with pair() as (first, second):
        for prefill, decoding in ((first, second), (second, first)):
            if prefill is second:
                first.close()
                second.close()
                second.start("prefill")
                first.start("decode")
            decoding.poison()
            sender, receiver = prefill.sender(7), decoding.receiver(7)
            decoding.ask(receiver, [9, 3], 1)
            prefill.begin(sender, 2, 0)
            prefill.compute(sender, [6, 2], 0)
            succeed(sender, receiver)
            decoding.check(7, 0, [9, 3])
            sender.clear()
            receiver.clear()


def memory_may_be_released_and_come_back() -> None:
    with pair() as (prefill, decoding):
        prefill.manager.deregister_buffer_to_engine()
        prefill.manager.register_buffer_to_engine()
        sender, receiver = prefill.sender(7), decoding.receiver(7)
        decoding.ask(receiver, [9, 3], 1)
        prefill.begin(sender, 2, 0)
        prefill.compute(sender, [6, 2], 0)
        succeed(sender, receiver)


def queue_of(decoding: Side, receiver: Any, freed: list[int]) -> Any:
    """SGLang's own queue of transfers with one request in it."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with runtime_context.get_parallel().override(
        attn_tp_group=SimpleNamespace(cpu_group=torch.distributed.group.WORLD), tp_rank=0
    ):
        metrics = SimpleNamespace(enable_metrics=False)
        scheduler = SimpleNamespace(
            spec_algorithm=None,
            enable_decode_hicache=False,
            enable_hisparse=False,
            metrics_reporter=metrics,
            output_streamer=SimpleNamespace(stream_output=lambda *_: None),
        )
        queue = decode.DecodeTransferQueue(utils.ReqToMetadataIdxAllocator(4), decoding.metadata, scheduler, None)
    queue._release_request = lambda one: freed.append(one.req.bootstrap_room)
    queue._clean_hicache_prefetch_resources = lambda one: None
    req = SimpleNamespace(rid="a", bootstrap_room=7, return_logprob=False, finished_reason=None)
    req.bootstrap_host = "127.0.0.1"
    one = SimpleNamespace(req=req, kv_receiver=receiver, metadata_buffer_index=1, hicache_restore_status=None)
    one.host_staged = False
    queue.queue.append(one)
    return queue


def prefill_process(port: int, told: Any) -> None:
    """A prefill server that may be stopped."""
    runtime_context.get_context().override("a case", disaggregation_bootstrap_port=port)
    prefill = Side("prefill")
    sender = prefill.sender(7)
    told.send("there")
    prefill.begin(sender, 2, 0)
    prefill.compute(sender, [6], 0)
    told.send("first chunk")
    told.recv()
    prefill.compute(sender, [2], 1)
    wait(lambda: sender.poll() == KVPoll.Failed)
    told.send(reason_of(sender))
    told.recv()


def a_late_write_never_meets_another_owner() -> None:
    """A stopped prefill server goes on when its pages are another request's: SGLang 38961."""
    with bootstrap():
        ours, theirs = multiprocessing.Pipe()
        port = runtime_context.get_disagg().disaggregation_bootstrap_port
        prefill = multiprocessing.get_context("fork").Process(target=prefill_process, args=(port, theirs))
        prefill.start()
        assert prefill.pid is not None
        assert ours.poll(60)
        assert ours.recv() == "there"
        decoding: Side = Side("decode")
        freed: list[int] = []
        receiver = decoding.receiver(7)
        decoding.ask(receiver, [9, 3], 1)
        assert ours.poll(60)
        assert ours.recv() == "first chunk"
        queue = queue_of(decoding, receiver, freed)
        assert queue.deferred_kv_release_timeout == math.inf
        os.kill(prefill.pid, signal.SIGSTOP)
        receiver.abort()
        queue.pop_transferred()
        assert not queue.queue
        assert queue.num_pending_deferred_releases() == 1
        # Nothing has said yet that nothing is under way.
        queue.resolve_deferred_releases()
        assert freed == []
        assert receiver.receive.state == "failed"
        wait(lambda: freed == [7], queue.resolve_deferred_releases)
        decoding.poison()
        os.kill(prefill.pid, signal.SIGCONT)
        ours.send("go on")
        assert ours.poll(60)
        assert "given it up" in ours.recv()
        decoding.check(7, 0, [])
        ours.send("end")
        prefill.join(60)
        decoding.close()


def said(call: Callable[[], object]) -> str:
    """The words with which a call is refused."""
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("it was not refused")


def mistakes_are_named() -> None:
    kept = os.environ[options.VARIABLE]
    for text, part in (("[1]", "an object"), ('{"lease": 3}', "'lease' came"), ('{"lease_s": -1}', "lease_s -1 came")):
        os.environ[options.VARIABLE] = text
        words = said(lambda: Side("decode"))
        assert part in words, words
        assert words.startswith(options.VARIABLE), words
    os.environ[options.VARIABLE] = kept
    with runtime_context.get_parallel().override(tp_size=2, attn_cp_size=2, attn_cp_rank=0, moe_tp_size=2):
        assert "context parallelism" in said(lambda: refuse(utils.DisaggregationMode.DECODE))
    side = Side("decode", states=True)
    assert "2 rows came" in said(lambda: side.manager.states_of([[1, 2]]))
    side.close()


def windows_in_a_pool_of_their_own_are_refused() -> None:
    """A model with sliding windows, as SGLang describes its pools when a server starts."""
    pool = SWAKVPool(
        size=8 * PAGE,
        size_swa=4 * PAGE,
        page_size=PAGE,
        dtype=torch.float32,
        head_num=4,
        head_dim=8,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
        device="cpu",
    )
    side = Side("decode")
    side.close()
    for mode in (utils.DisaggregationMode.PREFILL, utils.DisaggregationMode.DECODE):
        args = side.args()
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = pool.get_contiguous_buf_infos()
        utils.setup_state_kv_args(args, pool)
        words = said(lambda args=args, mode=mode: kind("MANAGER")(args, mode, runtime_context.get_server_args(), False))
        assert "'swa' came" in words, words
        assert "--disable-hybrid-swa-memory" in words, words


def the_entry_point_tells_its_name() -> None:
    project = tomllib.loads((ROOT / "transfer" / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["sglang.srt.plugins"].items()
    register = importlib.metadata.EntryPoint(name, value, "sglang.srt.plugins").load()
    register()
    register()
    assert choices.DISAGG_TRANSFER_BACKEND_CHOICES.count(NAME) == 1


def other_backends_are_as_they_were() -> None:
    assert utils.TransferBackend("nixl") is utils.TransferBackend.NIXL
    fake = utils.get_kv_class(utils.TransferBackend.FAKE, utils.KVClassType.MANAGER)
    assert fake.__name__ == "FakeKVManager"
    with contextlib.suppress(ValueError):
        utils.TransferBackend("none of them")
        raise AssertionError("a backend of no name is there")


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        chunks_arrive,
        a_latent_cache,
        a_prefix_that_is_there_is_not_moved,
        heads_of_two_ranks_meet_in_one,
        heads_of_one_rank_go_to_two,
        states_move_once,
        an_abort_of_the_decode_server_gives_pages_back,
        an_abort_of_the_prefill_server_is_told,
        an_abort_may_come_before_its_request,
        another_model_is_refused,
        a_role_may_change,
        memory_may_be_released_and_come_back,
        a_late_write_never_meets_another_owner,
        mistakes_are_named,
        windows_in_a_pool_of_their_own_are_refused,
        the_entry_point_tells_its_name,
        other_backends_are_as_they_were,
    )
}


def main(folder: Path, names: list[str]) -> None:
    configure(folder / "8")
    found = {}
    for name in names or list(CASES):
        print(f"=== {name} at {address()}", flush=True)
        try:
            CASES[name]()
            found[name] = "ok"
        except BaseException:
            found[name] = traceback.format_exc()
            print(found[name], flush=True)
    (folder / "cases.json").write_text(json.dumps(found))
