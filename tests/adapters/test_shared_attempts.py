"""Adapters whose rank leaves while memory is made: the retry of all ranks works at once, whatever moment it was."""

from __future__ import annotations

import random
import signal
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import putget
from putget.adapters import deep_ep, shared
from putget.adapters.flashinfer import MoeAlltoAll
from putget.group import communicator
from tests.harness import Rank, RankProcesses, fresh_ranks
from tests.test_attempts import ERRORS, PROMPT_S, Fault, inject, restore

DEADLINE_S = 120.0  # nothing here waits for it
DEADLINES = {"timeout_s": DEADLINE_S, "warmup_timeout_s": DEADLINE_S}
ROWS = 16  # bfloat16 of a row


def flashinfer(rank: Rank) -> MoeAlltoAll:
    mapping = types.SimpleNamespace(moe_ep_size=rank.size, moe_ep_rank=rank.rank)
    return MoeAlltoAll(mapping, 8, 1, rank.size, hidden_size=ROWS, comm=rank.comm, device="cpu", **DEADLINES)


def flashinfer_of_the_world(rank: Rank) -> MoeAlltoAll:
    mapping = types.SimpleNamespace(moe_ep_size=rank.size, moe_ep_rank=rank.rank)
    return MoeAlltoAll(mapping, 8, 1, rank.size, hidden_size=ROWS, device="cpu", **DEADLINES)


def flashinfer_with_rows(rank: Rank) -> MoeAlltoAll:
    """The layer, and what its first dispatch makes."""
    made = flashinfer(rank)
    ids, rows = batch(rank)
    made._rounds.prepare(ids, None, [rows], names=["rows"])
    return made


def deep_ep_memory(rank: Rank) -> Any:
    """A buffer outlives its calls: what its first dispatch makes."""
    if "buffer" not in rank.state:
        rank.state["buffer"] = deep_ep.Buffer(rank.comm, device="cpu", **DEADLINES)
    lane = rank.state["buffer"]._normal._lanes_of("rows", 8, ROWS).begin()
    ids, rows = batch(rank)
    lane.rounds.prepare(in_columns(ids), None, [rows], names=["x"])
    return lane.rounds


KINDS: dict[str, Callable[[Rank], Any]] = {
    "MoeAlltoAll": flashinfer,
    "MoeAlltoAll of the world": flashinfer_of_the_world,
    "MoeAlltoAll with rows": flashinfer_with_rows,
    "DeepEP": deep_ep_memory,
}


def batch(rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
    """A row for every rank, which is told by its values."""
    ids = torch.arange(rank.size, dtype=torch.int32)[:, None]
    return ids, torch.full((rank.size, ROWS), 1.0 + rank.rank, dtype=torch.bfloat16)


def in_columns(ids: torch.Tensor) -> torch.Tensor:
    """The same ids with a column for each rank, as DeepEP's rounds of whole tokens have them."""
    return torch.where(ids == ids.T, ids, -1)


def make(rank: Rank, kind: str, fault: Fault | None = None, delay: float = 0.0) -> tuple[str, str, float]:
    """A body: makes it; what that raised, and how long it took."""
    time.sleep(delay)
    began = time.monotonic()
    raised, text = "", ""
    rank.state.pop("made", None)
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


def steps_of(rank: Rank) -> int:
    """A body: steps of the last call."""
    return int(rank.state["steps"])


def play(rank: Rank) -> list[float]:
    """A body: a round, in which each rank sends a row to every rank; what came, by source."""
    made, (ids, rows) = rank.state["made"], batch(rank)
    if isinstance(made, MoeAlltoAll):
        (got,) = made.dispatch(ids, [rows], rank.size)
        told = got[:, 0, 0].tolist()
        made.combine(torch.zeros_like(got), rank.size)
        return told
    received = made.dispatch(in_columns(ids), None, [rows], names=["x"])
    told = received.payloads[0][:, 0, 0].tolist()
    made.release()
    return told


def give_back(rank: Rank) -> None:
    """A body: the next construction starts afresh."""
    if "buffer" in rank.state:
        rank.state.pop("buffer").destroy()
    shared.close_shared(rank.comm)


def try_again(ranks: RankProcesses, kind: str) -> int:
    """All ranks make it, which works the first time, and serve a round; how many steps that took."""
    for raised, text, seconds in ranks.call(make, kind).values():
        assert not raised, text
        assert seconds < PROMPT_S
    (steps,) = set(ranks.call(steps_of).values())
    for told in ranks.call(play).values():
        assert told == [1.0 + source for source in range(ranks.size)]
    ranks.call(give_back)
    return int(steps)


def leave(ranks: RankProcesses, kind: str, leaver: int, fault: Fault, delays: list[float]) -> None:
    """One rank leaves: no other waits for a deadline, and one that ends by an error names it."""
    for rank in range(ranks.size):
        ranks.submit(rank, make, kind, fault if rank == leaver else None, delays[rank])
    outcomes = ranks.results(range(ranks.size))
    raised, _, _ = outcomes.pop(leaver)
    assert raised == fault.error or (fault.kind == "signal" and not raised), (raised, outcomes)
    for error, text, seconds in outcomes.values():
        assert seconds < PROMPT_S, outcomes
        assert not error or f"rank {leaver}" in text, outcomes
        assert error in ("", "PeerLeft", "ValueError" if fault.error == "ValueError" else "PeerLeft"), outcomes


@pytest.mark.parametrize("kind", ["MoeAlltoAll", "MoeAlltoAll with rows", "DeepEP"])
def test_the_retry_works_at_whatever_step_a_rank_leaves(kind: str) -> None:
    """Behind its last words, too: memory that others keep by then is made again."""
    chosen = random.Random(kind)
    with fresh_ranks(3) as ranks:
        steps = try_again(ranks, kind)
        for step in range(steps):
            for stage in ("before", "behind", "behind"):
                fault = Fault(stage, chosen.choice([*ERRORS, "PeerTimeout"]), step)
                leave(ranks, kind, chosen.randrange(3), fault, [chosen.choice([0.0, 0.0, 0.05]) for _ in range(3)])
                assert try_again(ranks, kind) > 0


@pytest.mark.parametrize("kind", ["MoeAlltoAll", "MoeAlltoAll with rows", "DeepEP"])
def test_the_retry_works_behind_ctrl_c_at_any_moment(kind: str) -> None:
    chosen = random.Random(kind)
    with fresh_ranks(3) as ranks:
        try_again(ranks, kind)
        for _ in range(15):
            fault = Fault("signal", seconds=chosen.choice([0.0005, 0.005, 0.03]) * chosen.random() + 1e-6)
            leave(ranks, kind, chosen.randrange(3), fault, [0.0] * 3)
            try_again(ranks, kind)


def leave_late(rank: Rank) -> str:
    """A body: leaves the layer's constructor behind its last words, once the others are in their next call."""
    mesh = rank.comm._mesh
    wait = mesh.wait

    def wait_and_leave(look: Any, missing: Any, deadline: Any, phase: str, where: str = "") -> None:
        if "'end'" not in where:
            wait(look, missing, deadline, phase, where=where)
            return
        end = time.monotonic() + PROMPT_S
        while not all(any(one.fields["attempt"] > mesh.number for one in peer.inbox) for peer in mesh.peers.values()):
            assert time.monotonic() < end, "the others do not go on"
            time.sleep(0.001)
            for peer in mesh.peers.values():
                peer.receive_all()
        raise KeyboardInterrupt

    mesh.wait = wait_and_leave  # type: ignore[method-assign, assignment]
    try:
        flashinfer(rank)
    except KeyboardInterrupt as error:
        return type(error).__name__
    finally:
        mesh.__dict__.pop("wait", None)
    return ""


@pytest.mark.parametrize("is_prompt", [False, True], ids=["together", "the leaver at once"])
def test_ranks_that_have_gone_on_end_at_once(is_prompt: bool) -> None:
    """They are in the next attempt when they hear of it, which the retry of those that knew leaves out."""
    with fresh_ranks(3) as ranks:
        try_again(ranks, "MoeAlltoAll")
        for leaver in (0, 1, 2):
            others = [rank for rank in range(3) if rank != leaver]
            ranks.submit(leaver, leave_late_and_retry if is_prompt else leave_late)
            for rank in others:
                ranks.submit(rank, make, "MoeAlltoAll with rows")
            for raised, text, seconds in ranks.results(others).values():
                assert raised == "PeerLeft", text
                assert f"rank {leaver} has left layer's memory: KeyboardInterrupt, behind its last step" in text
                assert seconds < PROMPT_S
            if not is_prompt:
                assert ranks.result(leaver) == "KeyboardInterrupt"
                ranks.submit(leaver, make, "MoeAlltoAll")
            for rank in others:
                ranks.submit(rank, make, "MoeAlltoAll")
            for raised, text, seconds in ranks.results(range(3)).values():
                assert not raised, text
                assert seconds < PROMPT_S
            assert set(map(tuple, ranks.call(play).values())) == {(1.0, 2.0, 3.0)}
            ranks.call(make, "MoeAlltoAll")
            assert ranks.call(steps_of) == {0: 0, 1: 0, 2: 0}  # no rank takes what they have for void
            ranks.call(give_back)


def make_told_behind_the_look(rank: Rank, there: Path) -> tuple[str, str, float]:
    """A body: hears that the memory is void right behind the look for it in the layer's first dispatch.

    The other rank leaves once the file is there. Before, this rank might still be in the step that the other leaves.
    """
    look = shared.SharedWorkspace._raise_untold

    def look_too_early(self: shared.SharedWorkspace) -> None:
        shared.SharedWorkspace._raise_untold = look  # type: ignore[method-assign]
        there.touch()
        end = time.monotonic() + PROMPT_S
        while not rank.comm.is_void(rank.comm.attempts):
            assert time.monotonic() < end, "nobody has left"
            time.sleep(0.001)

    shared.SharedWorkspace._raise_untold = look_too_early  # type: ignore[method-assign]
    try:
        return make(rank, "MoeAlltoAll with rows")
    finally:
        shared.SharedWorkspace._raise_untold = look  # type: ignore[method-assign]


def test_a_dispatch_never_makes_memory_again_before_its_caller_knows(tmp_path: Path) -> None:
    """The others are not about to make it: they go on when their callers have heard."""
    there = tmp_path / "there"
    with fresh_ranks(2) as ranks:
        steps = try_again(ranks, "MoeAlltoAll")
        ranks.submit(0, make_told_behind_the_look, there)
        ranks.submit(1, make, "MoeAlltoAll", Fault("behind", step=steps - 1, until=str(there)))
        outcomes = ranks.results(range(2), timeout=PROMPT_S)
        assert outcomes[1][0] == "KeyboardInterrupt"
        raised, text, _ = outcomes[0]
        assert raised == "PeerLeft", text
        assert "rank 1 has left layer's memory: KeyboardInterrupt: injected, behind its last step" in text
        try_again(ranks, "MoeAlltoAll with rows")


def leave_late_and_retry(rank: Rank) -> tuple[str, str, float]:
    """A body: does not wait for what the others say."""
    assert leave_late(rank) == "KeyboardInterrupt"
    return make(rank, "MoeAlltoAll")


def leave_the_communicator(rank: Rank) -> str:
    """A body: leaves when all connections are there."""
    real = communicator.Communicator._set

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    communicator.Communicator._set = interrupted  # type: ignore[method-assign, assignment]
    try:
        shared.communicator_of(None)
    except KeyboardInterrupt as error:
        return type(error).__name__
    finally:
        communicator.Communicator._set = real  # type: ignore[method-assign]
    return ""


def meet(rank: Rank, goes_on: bool) -> str:
    """A body: makes the communicator that adapters keep, and perhaps uses it."""
    comm = shared.communicator_of(None)
    if goes_on:
        with pytest.raises(putget.PeerTimeout) as caught:
            comm.compare("a first step", {}, DEADLINE_S)
        return str(caught.value)
    return ""


@pytest.mark.parametrize("leaver", [0, 2])
@pytest.mark.parametrize("goes_on", [False, True], ids=["not used", "used in vain"])
def test_a_communicator_that_a_rank_lacks_is_made_again(leaver: int, goes_on: bool) -> None:
    kind = "MoeAlltoAll of the world"
    with fresh_ranks(3) as ranks:
        for rank in range(3):
            ranks.submit(rank, *((leave_the_communicator,) if rank == leaver else (meet, goes_on)))
        outcomes = ranks.results(range(3))
        assert outcomes.pop(leaver) == "KeyboardInterrupt"
        for text in outcomes.values():
            assert not goes_on or f"lost the connection to rank(s) {leaver}" in text
        for raised, text, seconds in ranks.call(make_plainly, kind).values():
            assert not raised, text
            assert seconds < PROMPT_S
        assert set(map(tuple, ranks.call(play).values())) == {(1.0, 2.0, 3.0)}


def make_plainly(rank: Rank, kind: str) -> tuple[str, str, float]:
    """A body: as ``make``, on no communicator of the test's own."""
    began = time.monotonic()
    try:
        rank.state["made"] = KINDS[kind](rank)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def test_a_rank_that_is_interrupted_behind_the_attempt_has_what_the_others_have() -> None:
    """Ctrl-C between the end of the attempt and the return of the constructor: nobody makes anything again."""
    with fresh_ranks(2) as ranks:
        ranks.submit(0, interrupted_behind, "MoeAlltoAll")
        ranks.submit(1, make, "MoeAlltoAll")
        outcomes = ranks.results(range(2))
        assert outcomes[0][0] == "KeyboardInterrupt"
        assert outcomes[1][0] == ""
        assert try_again(ranks, "MoeAlltoAll") == 0


def interrupted_behind(rank: Rank, kind: str) -> tuple[str, str, float]:
    """A body: a signal as the attempt is over."""
    mesh = rank.comm._mesh
    end = mesh.end

    def end_and_leave() -> None:
        end()
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    mesh.end = end_and_leave  # type: ignore[method-assign]
    try:
        return make(rank, kind)
    finally:
        mesh.__dict__.pop("end", None)


def test_memory_is_made_again_only_where_a_rank_lacks_it() -> None:
    with fresh_ranks(2) as ranks:
        ranks.call(make, "MoeAlltoAll")
        assert min(ranks.call(steps_of).values()) > 0
        ranks.call(make, "MoeAlltoAll")
        assert ranks.call(steps_of) == {0: 0, 1: 0}


def resume(rank: Rank, fault: Fault | None) -> tuple[str, float]:
    """A body: the memory comes back behind a checkpoint; what that raised, and how long it took."""
    began = time.monotonic()
    inject(rank, fault)
    raised = ""
    try:
        rank.state["made"].checkpoint_restore()
    except (KeyboardInterrupt, putget.PeerLeft) as error:
        raised = type(error).__name__
    restore(rank)
    return raised, time.monotonic() - began


def suspend(rank: Rank) -> None:
    """A body."""
    rank.state["made"].checkpoint_prepare()


def test_a_checkpoint_comes_back_behind_a_rank_that_left_late() -> None:
    leaver = 1
    with fresh_ranks(3) as ranks:
        ranks.call(make, "MoeAlltoAll")
        ranks.call(suspend)
        ranks.call(resume, None)
        steps = ranks.call(steps_of)[leaver]
        ranks.call(suspend)
        for rank in range(3):
            ranks.submit(rank, resume, Fault("behind", step=steps - 1) if rank == leaver else None)
        found = ranks.results(range(3))
        assert found[leaver][0] == "KeyboardInterrupt"
        assert {raised for raised, _ in found.values()} <= {"", "PeerLeft", "KeyboardInterrupt"}
        for raised, seconds in ranks.call(resume, None).values():
            assert not raised
            assert seconds < PROMPT_S
        assert set(map(tuple, ranks.call(play).values())) == {(1.0, 2.0, 3.0)}
