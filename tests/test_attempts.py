"""Constructors that a rank leaves alone: the others end at once and say why, and the next attempt works."""

from __future__ import annotations

import itertools
import os
import random
import re
import resource
import signal
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import putget
from putget.adapters.flashinfer import MoeAlltoAll
from putget.adapters.shared import close_shared
from putget.adapters.vllm.mover import ExchangeRounds
from putget.balancer import Balancer, ExpertBlobs, ExpertExchange, HostStore, Landing, Placement
from putget.group import files
from tests.harness import Rank, RankProcesses, fresh_ranks
from tests.moe.dense import Dense
from tests.moe.layers import make_layer

DEADLINE_S = 120.0  # nothing here waits for it
PROMPT_S = 30.0  # on a busy machine, too
DENSE = Dense()


def all_to_all(rank: Rank, **options: Any) -> putget.AllToAll:
    return rank.all_to_all(timeout_s=DEADLINE_S, warmup_timeout_s=DEADLINE_S, **options)


def workspace(rank: Rank) -> putget.Workspace:
    return putget.Workspace(rank.comm, 1 << 16, "cpu", timeout_s=DEADLINE_S, warmup_timeout_s=DEADLINE_S)


def second_layout(rank: Rank) -> putget.AllToAll:
    return all_to_all(rank, workspace=rank.state["workspace"], max_tokens_per_rank=4)


def layer_of(rank: Rank) -> Any:
    start = Placement.of(np.arange(12) % DENSE.num_experts, DENSE.num_experts)
    return make_layer(rank, DENSE, placement=start, count_experts=True, num_stats=16, warmup_timeout_s=DEADLINE_S)


def balancer(rank: Rank) -> Balancer:
    layer = rank.state["layer"]
    start = Placement.of(np.arange(12) % DENSE.num_experts, DENSE.num_experts)
    return Balancer(rank.comm, [layer], start, device="cpu", timeout_s=DEADLINE_S)


def landing(rank: Rank) -> Landing:
    blobs = ExpertBlobs({"w": torch.zeros(4, 8)})
    return Landing(rank.comm, [blobs], device="cpu", timeout_s=DEADLINE_S)


def store(rank: Rank) -> HostStore:
    return HostStore(rank.comm, [64], 4, timeout_s=DEADLINE_S)


def exchange(rank: Rank) -> ExpertExchange:
    return ExpertExchange(rank.comm, 64, device="cpu", timeout_s=DEADLINE_S)


def vllm_mover(rank: Rank) -> Any:
    made = ExchangeRounds(rank.comm, [[torch.zeros(2, 8)]], [torch.zeros(2, 8)])
    held, made._exchange = made._exchange, None  # type: ignore[assignment]  # it would close the communicator too
    return held


def flashinfer(rank: Rank) -> Any:
    mapping = types.SimpleNamespace(moe_ep_size=rank.size, moe_ep_rank=rank.rank)
    made = MoeAlltoAll(mapping, 8, 2, 2 * rank.size, hidden_size=16, comm=rank.comm, device="cpu")

    def close() -> None:
        assert made is not None
        close_shared(rank.comm)

    return types.SimpleNamespace(close=close)


KINDS: dict[str, Callable[[Rank], Any]] = {
    "AllToAll": all_to_all,
    "Workspace": workspace,
    "second layout": second_layout,
    "ExpertParallelMoE": layer_of,
    "Balancer": balancer,
    "Landing": landing,
    "HostStore": store,
    "ExpertExchange": exchange,
    "vLLM's mover": vllm_mover,
    "MoeAlltoAll": flashinfer,
}


@dataclass(frozen=True)
class Fault:
    """How a rank leaves a constructor: before or behind its message of a step, or whenever a signal comes."""

    kind: str  # "before", "behind", "signal"
    error: str = "KeyboardInterrupt"
    step: int = 0
    seconds: float = 0.0
    until: str = ""  # a path: it leaves when another rank has made this file


ERRORS: dict[str, type[BaseException]] = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "RuntimeError": RuntimeError,
    "ValueError": ValueError,
}


def inject(rank: Rank, fault: Fault | None) -> None:
    """Has this rank leave the next constructor; counts the constructor's steps in ``rank.state``."""
    mesh = rank.comm._mesh
    exchange, wait = type(mesh)._exchange, type(mesh).wait
    rank.state["steps"] = 0

    def fail(*_: Any, **__: Any) -> Any:
        assert fault is not None
        while fault.until and not os.path.exists(fault.until):
            time.sleep(0.001)
        if fault.error == "PeerTimeout":
            raise putget.PeerTimeout("setup", rank.rank, 0, set(range(rank.size)) - {rank.rank}, 0.1)
        raise ERRORS[fault.error]("injected")

    def one_step(*args: Any, **options: Any) -> Any:
        number = rank.state["steps"]
        rank.state["steps"] += 1
        at = fault is not None and number == fault.step
        if at and fault is not None and fault.kind == "before":
            fail()
        mesh.wait = fail if at and fault is not None and fault.kind == "behind" else wait.__get__(mesh)  # type: ignore[method-assign]
        return exchange(mesh, *args, **options)

    mesh._exchange = one_step  # type: ignore[method-assign]
    if fault is not None and fault.kind == "signal":
        signal.signal(signal.SIGALRM, fail)
        begin = mesh.begin

        def begin_and_wait_for_it(*args: Any, **options: Any) -> Any:
            attempt = begin(*args, **options)
            signal.setitimer(signal.ITIMER_REAL, fault.seconds)
            return attempt

        end = mesh.end

        def end_and_forget_it() -> None:  # between two calls a rank is late, as others are: they wait for it
            end()
            signal.setitimer(signal.ITIMER_REAL, 0.0)

        mesh.begin = begin_and_wait_for_it  # type: ignore[method-assign]
        mesh.end = end_and_forget_it  # type: ignore[method-assign]


def restore(rank: Rank) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    for name in ("_exchange", "wait", "begin", "end"):
        rank.comm._mesh.__dict__.pop(name, None)


def construct(rank: Rank, kind: str, fault: Fault | None = None, delay: float = 0.0) -> tuple[str, str, float]:
    """A body: makes an object; what it raised, and how long it took from the moment on when all had been told."""
    time.sleep(delay)
    began = time.monotonic()
    raised, text = "", ""
    try:
        inject(rank, fault)
        rank.state["made"] = KINDS[kind](rank)
    except BaseException as error:
        raised, text = type(error).__name__, str(error)
    try:
        restore(rank)
    except KeyboardInterrupt:
        restore(rank)
    return raised, text, time.monotonic() - began


def close_made(rank: Rank) -> int:
    """A body: closes what the last constructor has made here; how many steps it took."""
    made = rank.state.pop("made", None)
    if made is not None:
        made.close()
    return int(rank.state["steps"])


def play(rank: Rank) -> list[float]:
    """A body: a round of the AllToAll that was made, in which every rank sends each rank a row."""
    a2a = rank.state["made"]
    ids = 2 * torch.arange(2, dtype=torch.int32).expand(2, 2).contiguous()
    received = a2a.dispatch(ids, torch.ones(2, 2), torch.full((2, 4), 1.0 + rank.rank))
    a2a.combine_input.copy_(received.payloads[0])
    return [float(value) for value in a2a.combine()[:, 0]]


def prepare(rank: Rank, kind: str) -> None:
    """A body: what a constructor of this kind stands on."""
    if kind == "Balancer" and "layer" not in rank.state:
        rank.state["layer"] = layer_of(rank)
    if kind == "second layout":
        for name in ("first", "workspace"):
            if name in rank.state:
                rank.state.pop(name).close()
        rank.state["workspace"] = workspace(rank)
        rank.state["first"] = all_to_all(rank, workspace=rank.state["workspace"])


def make_all(ranks: RankProcesses, kind: str) -> int:
    """Every rank's next attempt works; how many steps it had."""
    for raised, text, _ in ranks.call(construct, kind).values():
        assert not raised, text
    if kind in ("AllToAll", "second layout"):
        assert ranks.call(play) == {rank: [2.0 + 2 * rank] * 2 for rank in range(ranks.size)}
    (steps,) = set(ranks.call(close_made).values())
    return int(steps)


def leave_and_try_again(ranks: RankProcesses, kind: str, leaver: int, fault: Fault, delays: list[float]) -> set[int]:
    """One rank leaves: the others end at once and name it; then all try again. Ranks that ended with an object."""
    ranks.call(prepare, kind)
    for rank in range(ranks.size):
        ranks.submit(rank, construct, kind, fault if rank == leaver else None, delays[rank])
    outcomes = ranks.results(range(ranks.size))
    raised, _, _ = outcomes[leaver]
    assert raised in ("", fault.error), outcomes
    made = {rank for rank, (raised, _, _) in outcomes.items() if not raised}
    if not raised:
        assert fault.kind == "signal", outcomes
        assert made == set(range(ranks.size)), outcomes
    for rank in set(outcomes) - made - {leaver}:
        error, text, seconds = outcomes[rank]
        assert seconds < PROMPT_S, outcomes
        assert error == ("ValueError" if fault.error == "ValueError" else "PeerLeft"), outcomes
        assert f"rank {leaver}" in text, outcomes
        assert "it has gone on" not in text, outcomes
    ranks.call(close_made)
    make_all(ranks, kind)
    return made


SIZES = [(kind, 3) for kind in KINDS] + [(kind, 4) for kind in ("AllToAll", "Balancer", "MoeAlltoAll")]


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_a_rank_that_leaves_at_any_step_costs_one_attempt(kind: str, size: int) -> None:
    chosen = random.Random(f"{kind} {size}")
    with fresh_ranks(size) as ranks:
        ranks.call(prepare, kind)
        steps = make_all(ranks, kind)
        for step in range(steps):
            for stage in ("before", "behind"):
                fault = Fault(stage, chosen.choice([*ERRORS, "PeerTimeout"]), step)
                delays = [chosen.choice([0.0, 0.0, 0.05]) for _ in range(size)]
                made = leave_and_try_again(ranks, kind, chosen.randrange(size), fault, delays)
                assert not made or (step, stage) == (steps - 1, "behind")


@pytest.mark.parametrize("kind", ["AllToAll", "second layout", "Balancer", "MoeAlltoAll"])
def test_ctrl_c_at_any_moment(kind: str) -> None:
    """A signal's handler raises between any two steps of Python, also while bytes are moved."""
    chosen = random.Random(kind)
    with fresh_ranks(3) as ranks:
        ranks.call(prepare, kind)
        make_all(ranks, kind)
        for _ in range(20):
            fault = Fault("signal", seconds=chosen.choice([0.0005, 0.005, 0.03]) * chosen.random() + 1e-6)
            leave_and_try_again(ranks, kind, chosen.randrange(3), fault, [0.0] * 3)


def leave_files(rank: Rank, count: int) -> None:
    """A body: this process may open so many files more."""
    soft, hard = rank.state.setdefault("limits", resource.getrlimit(resource.RLIMIT_NOFILE))
    names = os.listdir("/proc/self/fd")  # one of them was this folder's
    opened = {int(name) for name in names if os.path.lexists(f"/proc/self/fd/{name}")}
    free = (number for number in range(soft) if number not in opened)
    limit = next(itertools.islice(free, count, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def get_files_back(rank: Rank) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, rank.state["limits"])


def run_out_and_try_again(ranks: RankProcesses, count: int, call: Callable[..., Any], *args: Any) -> None:
    """Rank 1 has too few files: every rank says so at once."""
    ranks.call(leave_files, count, ranks=[1])
    try:
        outcomes = ranks.call(call, *args)
    finally:
        ranks.call(get_files_back, ranks=[1])
    for raised, text, seconds in outcomes.values():
        assert raised in ("PutgetError", "PeerLeft"), outcomes
        assert re.search(rf"rank 1 has {count} file descriptors left, needs (\d+)", text), outcomes
        assert seconds < PROMPT_S, outcomes


@pytest.mark.parametrize("kind", ["AllToAll", "Workspace", "Landing", "HostStore", "MoeAlltoAll"])
def test_a_rank_without_files_is_named_on_all_ranks(kind: str) -> None:
    with fresh_ranks(3) as ranks:
        make_all(ranks, kind)
        for count in range(5):
            run_out_and_try_again(ranks, count, construct, kind)
            ranks.call(close_made)
            make_all(ranks, kind)


def set_active_ranks(rank: Rank, mask: list[bool]) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        rank.state["made"].set_active_ranks(mask)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def test_a_rank_without_files_is_named_by_set_active_ranks() -> None:
    everyone = [True] * 3
    with fresh_ranks(3) as ranks:
        ranks.call(construct, "AllToAll")
        for count in range(5):
            run_out_and_try_again(ranks, count, set_active_ranks, everyone)
            assert {raised for raised, _, _ in ranks.call(set_active_ranks, everyone).values()} == {""}
            ranks.call(play)


def test_files_that_run_out_on_the_way_are_missed_by_name() -> None:
    """Another thread may open them behind the question: then whatever finds no room says so."""
    with fresh_ranks(3) as ranks:
        make_all(ranks, "AllToAll")
        ranks.call(ask_nothing)
        for count in range(8):
            ranks.call(leave_files, count, ranks=[1])
            outcomes = ranks.call(construct, "AllToAll")
            ranks.call(get_files_back, ranks=[1])
            assert len({bool(raised) for raised, _, _ in outcomes.values()}) == 1, outcomes
            for raised, text, seconds in outcomes.values():
                assert raised in ("", "PutgetError", "PeerLeft"), outcomes
                assert not raised or re.search(r"rank 1 has \d+ file descriptors left, needs", text), outcomes
                assert seconds < PROMPT_S, outcomes
            assert count > 2 or outcomes[0][0], outcomes
            ranks.call(close_made)
            make_all(ranks, "AllToAll")


def ask_nothing(_: Rank) -> None:
    files.require_left = lambda *_: None


def test_a_rank_that_waits_logs_where_it_is_and_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    comms = putget.Communicator.local(3)
    with caplog.at_level("WARNING", logger="putget"), pytest.raises(putget.PeerTimeout):
        Rank(0, 3, torch.device("cpu"), _comm=comms[0]).all_to_all(warmup_timeout_s=4.0)
    (line,) = caplog.messages
    assert "rank 0 is at AllToAll (attempt 1), step 'AllToAll'" in line
    assert "for rank(s) 1 (last heard at: nothing yet), 2 (last heard at: nothing yet); it gives up in" in line
    for comm in comms:
        comm.close()


def test_the_log_says_where_the_others_were_last(caplog: pytest.LogCaptureFixture) -> None:
    comms = putget.Communicator.local(2)
    for comm in comms:
        with pytest.raises(ValueError, match="num_experts"):
            Rank(comm.rank, 2, torch.device("cpu"), _comm=comm).all_to_all(num_experts=0)
    with caplog.at_level("WARNING", logger="putget"), pytest.raises(putget.PeerTimeout):
        Rank(0, 2, torch.device("cpu"), _comm=comms[0]).all_to_all(warmup_timeout_s=4.0)
    assert "for rank(s) 1 (last heard at: leaving AllToAll)" in caplog.messages[0]
    for comm in comms:
        comm.close()
