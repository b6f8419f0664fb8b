"""A forked child of a rank: rounds of every kind are refused there, and the parent goes on unharmed."""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import putget
from putget.adapters import deep_ep, shared
from putget.adapters.flashinfer import MoeAlltoAll, functions
from putget.adapters.tensorrt_llm import FourPayloadAllToAll
from putget.balancer import Balancer, ExpertBlobs, ExpertExchange, HostStore, Landing, Placement
from putget.moe import ExpertParallelMoE, SlotOptions
from tests.harness import Rank, RankProcesses, fresh_ranks, run_ranks

CPU: dict[str, Any] = {"device": "cpu"}
ROW = putget.Payload((8,), torch.float32)
IDS, WEIGHTS = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
Calls = dict[str, Callable[[], Any]]


def fork(body: Callable[[], Any]) -> tuple[int, int]:
    """A child that runs the body and then ends at once; its number, and where it writes what the body gave."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # threads of other tests
        child = os.fork()
    if child:
        os.close(writes)
        return child, reads
    try:
        os.write(writes, pickle.dumps(body()))
        os._exit(0)
    except BaseException as error:
        os.write(writes, pickle.dumps(f"{type(error).__name__}: {error}"))
        os._exit(1)


def in_child(body: Callable[[], Any]) -> Any:
    """The body's result in a forked child."""
    child, reads = fork(body)
    with os.fdopen(reads, "rb") as pipe:
        found = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, pickle.loads(found) if found else None
    return pickle.loads(found)


def refusals(calls: Calls) -> dict[str, str]:
    """The exception of each call in a child: ForkedChild with both numbers, or something else by its name."""

    def call_all() -> dict[str, str]:
        found = {}
        for name, call in calls.items():
            try:
                found[name] = f"gave {call()!r}"
            except putget.ForkedChild as error:
                found[name] = "refused" if (error.pid, error.parent_pid) == (os.getpid(), os.getppid()) else str(error)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        return found

    return in_child(call_all)


def check_refused(calls: Calls, go_on: Callable[[], bool]) -> None:
    """All are refused in a child, and afterwards the parent's own calls are right."""
    assert go_on()
    assert refusals(calls) == dict.fromkeys(calls, "refused")
    assert go_on()


@pytest.fixture
def comm() -> Iterator[putget.Communicator]:
    (comm,) = putget.Communicator.local(1)
    with comm:
        yield comm


def all_to_all(comm: putget.Communicator, **options: Any) -> putget.AllToAll:
    sizes: dict[str, Any] = {"num_experts": 2, "top_k": 1, "max_tokens_per_rank": 4, "payloads": [ROW], "output": ROW}
    return putget.AllToAll(comm, **{**sizes, "timeout_s": 20.0, **CPU, **options})


def round_of(a2a: putget.AllToAll, value: float) -> bool:
    received = a2a.dispatch(IDS, WEIGHTS, torch.full((1, 8), value))
    a2a.combine_input.copy_(received.payloads[0])
    return torch.equal(a2a.combine(), torch.full((1, 8), value))


def test_rounds_are_refused(comm: putget.Communicator) -> None:
    with all_to_all(comm) as a2a:
        x = torch.ones(1, 8)
        received = a2a.dispatch(IDS, WEIGHTS, x)
        calls: Calls = {
            "dispatch": lambda: a2a.dispatch(IDS, WEIGHTS, x),
            "dispatch_start": lambda: a2a.dispatch_start(IDS, WEIGHTS, x),
            "dispatch_finish": a2a.dispatch_finish,
            "combine": a2a.combine,
            "combine_start": a2a.combine_start,
            "combine_finish": a2a.combine_finish,
            "release": a2a.release,
            "check": a2a.check,
            "combine_input": lambda: a2a.combine_input,
            "expert_major": received.expert_major,
            "set_active_ranks": lambda: a2a.set_active_ranks([True]),
            "of the workspace": lambda: a2a.workspace.set_active_ranks([True]),
            "fault": a2a.workspace.fault,
            "compare": lambda: comm.compare("fork", {}, 1.0),
            "an AllToAll": lambda: all_to_all(comm),
            "a Workspace": lambda: putget.Workspace(comm, 1 << 16, "cpu"),
        }
        check_refused(calls, lambda: round_of(a2a, 3.0))
        a2a.dispatch_start(IDS, WEIGHTS, x)
        halves: Calls = {name: calls[name] for name in ("dispatch", "dispatch_finish", "combine", "release")}
        assert refusals(halves) == dict.fromkeys(halves, "refused")
        assert torch.equal(a2a.dispatch_finish().payloads[0][0, 0], x[0])


def test_a_message_names_both_processes_and_what_to_do(comm: putget.Communicator) -> None:
    def said() -> str:
        with pytest.raises(ValueError, match="fork") as caught:
            round_of(a2a, 1.0)
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), putget.ForkedChild)
        return str(caught.value).replace(f"(pid {os.getpid()})", "(the child)")

    with all_to_all(comm) as a2a:
        assert in_child(said) == (
            f"this process (the child) is a fork of rank 0 (pid {os.getpid()}), and is no rank itself: the AllToAll is "
            "refused here and goes on there. Make a Communicator in this process, or start it by spawn"
        )


def test_layers_balancers_and_moves_are_refused(comm: putget.Communicator) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_experts": 2, "top_k": 1}
    layer = ExpertParallelMoE(
        comm,
        max_tokens_per_rank=4,
        slots=SlotOptions(num_slots=4),
        count_experts=True,
        num_stats=5,
        timeout_s=20.0,
        **sizes,
        **CPU,
    )
    blobs = ExpertBlobs(dict(layer.experts.named_parameters()), module=layer.experts)
    store = HostStore(comm, [blobs.slot_bytes], 2, num_threads=1)
    balancer = Balancer(comm, [layer], Placement.of([0, 1, 0, 1], 2), store=store, **CPU)
    landing = Landing(comm, [blobs], mover="thread", **CPU)
    exchange = ExpertExchange(comm, 64, **CPU)
    exchange.bind([[torch.zeros(2, 4)]])
    balancer.save()
    x = torch.ones(1, 16, dtype=torch.bfloat16)
    first = layer(x)
    calls: Calls = {
        "layer": lambda: layer(x),
        "layer.check": layer.check,
        "step": balancer.step,
        "poll": balancer.poll,
        "move": balancer.move,
        "save": balancer.save,
        "set_active_ranks": lambda: balancer.set_active_ranks([True]),
        "landing.post": lambda: landing.post([]),
        "landing.take": lambda: landing.take(landing.landed),
        "landing.set_active_ranks": lambda: landing.set_active_ranks([True]),
        "exchange": exchange.execute,
        "store.start_save": lambda: store.start_save(0, 0, blobs, 0),
        "store.load": lambda: store.load(0, 0, blobs, 0),
        "a HostStore": lambda: HostStore(comm, [64], 2),
        "a Landing": lambda: Landing(comm, [blobs], **CPU),
    }

    def go_on() -> bool:
        balancer.step()
        exchange.execute()
        store.start_load(0, 1, blobs, 1).result(20)
        return torch.equal(layer(x), first)

    check_refused(calls, go_on)
    for thing in (exchange, landing, balancer, store, layer):
        thing.close()


def test_adapters_are_refused(comm: putget.Communicator) -> None:
    x, ids = torch.ones(1, 128, dtype=torch.bfloat16), IDS.long()
    flashinfer = MoeAlltoAll(SimpleNamespace(moe_ep_size=1, moe_ep_rank=0), 4, 1, 2, hidden_size=128, comm=comm, **CPU)
    tensorrt_llm = FourPayloadAllToAll(comm, 2, 1, 4, hidden_size=128, **CPU)
    buffer, elastic = deep_ep.Buffer(comm, **CPU), deep_ep.ElasticBuffer(comm, **CPU)
    low = buffer.low_latency_dispatch(x, ids, 4, 2, use_fp8=False)
    hook = buffer.low_latency_dispatch(x, ids, 4, 2, use_fp8=False, return_recv_hook=True)[-1]
    size = functions.moe_a2a_get_workspace_size_per_rank(1, 4, 512, 512)
    workspace = torch.zeros(1, size, dtype=torch.uint8)
    metainfo = functions.moe_a2a_initialize(workspace, 0, 1, 4)
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 2)

    def of_functions() -> Any:
        return functions.moe_a2a_dispatch(IDS, [x], workspace, metainfo, 4, 0, 1, 1, 2)

    def combine_functions(found: Any) -> Any:
        return functions.moe_a2a_combine(found[0][0].clone(), 1, workspace, metainfo, 4, 0, 1, 1, found[1])

    def normal() -> Any:
        return buffer.dispatch(
            x, topk_idx=ids, topk_weights=WEIGHTS, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert
        )

    opened = flashinfer.dispatch(IDS, [x], 4)
    calls: Calls = {
        "MoeAlltoAll.dispatch": lambda: flashinfer.dispatch(IDS, [x], 4),
        "MoeAlltoAll.combine": lambda: flashinfer.combine(opened[0], 4),
        "MoeAlltoAll.release": flashinfer.release,
        "TensorRT-LLM": lambda: tensorrt_llm.dispatch(x, None, IDS, WEIGHTS),
        "DeepEP": normal,
        "low_latency_dispatch": lambda: buffer.low_latency_dispatch(x, ids, 4, 2, use_fp8=False),
        "low_latency_combine": lambda: buffer.low_latency_combine(low[0], ids, WEIGHTS, low[2]),
        "hook": hook,
        "ElasticBuffer": elastic.barrier,
        "moe_a2a_dispatch": of_functions,
        "shared_workspace": lambda: shared.shared_workspace(comm, 1 << 20, "cpu"),
    }
    assert refusals(calls) == dict.fromkeys(calls, "refused")
    hook()
    assert torch.equal(flashinfer.combine(opened[0], 4), x)
    tensorrt_llm.combine(tensorrt_llm.dispatch(x, None, IDS, WEIGHTS)[0])
    assert torch.equal(buffer.low_latency_combine(low[0], ids, WEIGHTS, low[2])[0], x)
    assert torch.equal(combine_functions(of_functions()), x)
    elastic.barrier()
    elastic.destroy()
    buffer.destroy()


def across_domains(rank: Rank) -> bool:
    """A body of threads: rank 0 forks while the network's threads run."""
    with all_to_all(rank.comm, num_experts=2) as a2a:
        first = round_of(a2a, 1.0)
        if rank.rank == 0:
            calls: Calls = {
                "dispatch": lambda: round_of(a2a, 2.0),
                "set_active_ranks": lambda: a2a.set_active_ranks([True, True]),
            }
            assert refusals(calls) == dict.fromkeys(calls, "refused")

            def give_up() -> None:
                a2a.close()
                rank.comm.close()
                gc.collect()

            in_child(give_up)
        return first and round_of(a2a, 3.0)


def test_rounds_across_domains_are_refused() -> None:
    network = putget.Network("sim", domain_size=1)
    assert run_ranks(2, across_domains, mode="thread", network=network) == [True, True]


def test_a_child_has_rounds_of_its_own(comm: putget.Communicator) -> None:
    """Also where its parent's locks were held, and with the same workspace of FlashInfer."""
    size = functions.moe_a2a_get_workspace_size_per_rank(1, 4, 64, 32)
    workspace, x = torch.zeros(1, size, dtype=torch.uint8), torch.ones(1, 16, dtype=torch.bfloat16)
    mapping = SimpleNamespace(moe_ep_size=1, moe_ep_rank=0)

    def of_flashinfer() -> bool:
        layer = MoeAlltoAll(mapping, 4, 1, 2, hidden_size=16, **CPU)
        return torch.equal(layer.combine(layer.dispatch(IDS, [x], 4)[0], 4), x)

    def of_functions() -> bool:
        metainfo = functions.moe_a2a_initialize(workspace, 0, 1, 4)
        (rows,), offset, _ = functions.moe_a2a_dispatch(IDS, [x], workspace, metainfo, 4, 0, 1, 1, 2)
        return torch.equal(functions.moe_a2a_combine(rows.clone(), 1, workspace, metainfo, 4, 0, 1, 1, offset), x)

    def own_rounds() -> list[bool]:
        (own,) = putget.Communicator.local(1)
        with own, all_to_all(own, num_threads=2) as a2a:
            return [round_of(a2a, 5.0), of_flashinfer(), of_functions()]

    with all_to_all(comm, num_threads=2) as a2a:
        assert [round_of(a2a, 1.0), of_flashinfer(), of_functions()] == [True] * 3
        with functions._lock, shared._lock:
            child, reads = fork(own_rounds)
        with os.fdopen(reads, "rb") as pipe:
            assert pickle.loads(pipe.read()) == [True] * 3
        os.waitpid(child, 0)
        assert round_of(a2a, 2.0)
    shared.close_shared()


def begin(rank: Rank) -> None:
    rank.state["a2a"] = all_to_all(rank.comm, num_experts=rank.size)


def play(rank: Rank, value: float) -> bool:
    """A body: each rank's token goes to the next rank and comes back."""
    a2a: putget.AllToAll = rank.state["a2a"]
    ids = torch.tensor([[(rank.rank + 1) % rank.size]], dtype=torch.int32)
    received = a2a.dispatch(ids, WEIGHTS, torch.full((1, 8), value + rank.rank))
    a2a.combine_input.copy_(received.payloads[0])
    return torch.equal(a2a.combine(), torch.full((1, 8), value + rank.rank))


def refused_and_stays(rank: Rank) -> int:
    """A body: forks a child that tries a round, tells so, and then lives on."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            play(rank, 100.0)
        except putget.ForkedChild:
            os.write(writes, b"refused")
        while True:
            signal.pause()
    os.close(writes)
    said = os.read(reads, 7)
    os.close(reads)
    assert said == b"refused"
    return child


def leaves_by_the_door(rank: Rank) -> int:
    """A body: forks a child that closes and collects everything and ends as the interpreter does."""
    child = os.fork()
    if child == 0:
        a2a = rank.state.pop("a2a")
        a2a.close()
        rank.comm.close()
        rank._comm = None
        del a2a
        gc.collect()
        atexit._run_exitfuncs()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def ranks() -> Iterator[RankProcesses]:
    with fresh_ranks(3) as processes:
        yield processes


def test_ranks_go_on_while_a_child_runs_ends_and_is_killed(ranks: RankProcesses) -> None:
    def all_right(value: float) -> bool:
        return ranks.call(play, value) == dict.fromkeys(range(3), True)

    ranks.call(begin)
    assert all_right(1.0)
    child = ranks.call(refused_and_stays, ranks=[1])[1]
    try:
        assert all_right(2.0)
    finally:
        os.kill(child, signal.SIGKILL)
    assert all_right(3.0)
    ranks.call(leaves_by_the_door, ranks=[1])
    assert all_right(4.0)
    assert all_right(5.0)


def test_an_engine_of_the_parent_joins_no_domains() -> None:
    engines = pytest.importorskip("putget_transfer", reason="putget_transfer is not built: see `make transfer`")
    with engines.Engine.builder().group(engines.DeviceGroup.host()).build() as engine:
        putget.Network(engine=engine)

        def joins() -> str:
            with pytest.raises(ValueError) as raised:
                putget.Network(engine=engine)
            return str(raised.value)

        assert "this process is a fork of the one that has its threads" in in_child(joins)
        putget.Network(engine=engine)
