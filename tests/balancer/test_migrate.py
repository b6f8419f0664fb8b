"""Experts move while rounds go on: no wrong token, one placement on all ranks, also when a rank dies at any phase."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext as nothing
from typing import Any

import pytest
import torch

import putget
from putget import _abi
from putget.balancer import ExpertBlobs, Landing, Move
from tests.balancer.migration import PHASES, begin, go_on, serve_many, serve_until_lost
from tests.harness import Rank, RankProcesses, fresh_ranks, run_ranks

SIZE = 4
MISSED_S = 5.0  # a rank that lives may get no core for seconds


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_no_token_is_wrong_while_experts_move(mode: str, device: str) -> None:
    outcomes = run_ranks(SIZE, serve_many, 60, 1, mode=mode, device=device)
    assert all(right for _, right in outcomes)
    assert len({flips for flips, _ in outcomes}) == 1
    assert outcomes[0][0] > 3


@pytest.fixture
def ranks() -> Iterator[RankProcesses]:
    with fresh_ranks(SIZE, "cpu") as processes:
        yield processes


@pytest.mark.parametrize(("phase", "iteration"), [(phase, 9 + 2 * i) for i, phase in enumerate(PHASES)])
def test_a_rank_that_dies_leaves_the_others_on_one_placement(ranks: RankProcesses, phase: str, iteration: int) -> None:
    victim = 2
    ranks.call(begin, iteration, MISSED_S)
    survivors = [rank for rank in range(SIZE) if rank != victim]
    ranks.submit(victim, serve_until_lost, (iteration, phase), 40)
    for said in ranks.call(serve_until_lost, None, 40, ranks=survivors, timeout=120).values():
        assert said == f"missed ({victim},)"
    outcomes = list(ranks.call(go_on, victim, 15, ranks=survivors, timeout=120).values())
    assert all(outcome["right"] and outcome["still"] for outcome in outcomes), outcomes
    assert len({outcome["agreed"] for outcome in outcomes}) == 1
    assert all(outcome["slots"] == outcomes[0]["slots"] for outcome in outcomes)


def blobs_of(num_slots: int = 2, device: str = "cpu", **changes: Any) -> ExpertBlobs:
    tensors = {"w": torch.zeros(num_slots, 8), "scale": torch.zeros(num_slots, 1), **changes}
    return ExpertBlobs({name: tensor.to(device) for name, tensor in tensors.items()})


def landing_of(layers: list[ExpertBlobs], **options: Any) -> Landing:
    (comm,) = putget.Communicator.local(1)
    return Landing(comm, layers, **{"device": "cpu", **options})


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("layers is [], expected one or more ExpertBlobs", {"layers": []}),
    ("layers[0]: scale has 2 bytes a slot", {"layers": [blobs_of(scale=torch.zeros(2, 1, dtype=torch.float16))]}),
    ("cells is 0, allowed are 1 to 128", {"cells": 0}),
    ("cells is 129, allowed are 1 to 128", {"cells": 129}),
    ("num_sms is 0, allowed are ints from 1 to 1024", {"num_sms": 0}),
]


@pytest.mark.parametrize(("message", "options"), REFUSED, ids=[message for message, _ in REFUSED])
def test_wrong_sizes_are_refused(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as caught:
        landing_of(**{"layers": [blobs_of()], **options})
    assert str(caught.value).startswith(message)


def refuse_moves(rank: Rank) -> list[str]:
    """A body: what is said of wrong batches, after which a right one is posted."""
    said = []
    wrong = [
        [Move(1, 0, 0, 1, 0)],
        [Move(0, 2, 0, 1, 0)],
        [Move(0, 0, 0, -1, 0)],
        [Move(0, 1, 0, 1, 1)],
        [Move(0, 0, 3, 1, 0)],
        [Move(0, 0, 0, 1, -1)],
        [Move(0, 0, 0, 1, 0), Move(0, 0, 1, 1, 0)],
        [Move(0, 0, 0, 1, 0), Move(0, 0, 1, 1, 1), Move(0, 0, 1, 1, 2)],
    ]
    with Landing(rank.comm, [blobs_of(3)], device="cpu") as landing:
        for moves in wrong:
            with pytest.raises(ValueError) as caught:
                landing.post(moves)
            said.append(str(caught.value))
        assert landing.batch == 0
        assert landing.post([Move(0, 0, 0, 1, 0)])
        for most in (0, 8, -16, 2.0, True):
            with pytest.raises(ValueError, match=r"^most_bytes is"):
                landing.move(most)  # type: ignore[arg-type]
        for batch in (1, torch.zeros(1), torch.zeros(2, dtype=torch.int32)):
            with pytest.raises(ValueError, match=r"^batch is"):
                landing.take(batch)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="this Landing is closed"):
        landing.move()
    return said


def test_wrong_moves_are_refused() -> None:
    want = [
        "moves[0].layer is 1, there are 1 layers",
        "moves[0].src is 2, which is no active rank",
        "moves[0].dst is -1, which is no active rank",
        "moves[0] goes from rank 1 to itself: copy it there",
        "moves[0].src_slot is 3, allowed are 0 to 2",
        "moves[0].dst_slot is -1, allowed are 0 to 2",
        "moves[1] goes to layer 0, rank 1, slot 0 too",
        "a batch brings 3 experts to one rank, cells has room for 2",
    ]
    assert run_ranks(2, refuse_moves, mode="thread") == [want, want]


def spoil(rank: Rank) -> str:
    """A body: the bytes in the landing area change before they are looked at."""
    moves = [Move(0, 0, 0, 1, 1)]
    blobs = blobs_of(w=torch.full((2, 8), 7.0 + rank.rank))
    with Landing(rank.comm, [blobs], device="cpu", cells=1) as landing:
        assert landing.post(moves)
        said = "nothing"
        cell = landing._workspace.memory.tensor()[-1024:]
        for step in range(20):
            try:
                landing.move()
            except putget.PutgetError as error:
                said = str(error)
            if rank.rank == 1 and step < 10:
                cell[4] += 1
            rank.comm.compare("step", {"step": step}, 20.0)
        landed = int(landing.landed)
        landing.take(torch.tensor([landed], dtype=torch.int32))
        return f"{said}; {landed}; {blobs._tensors['w'][1, 0]:g}"


def test_bytes_that_differ_from_their_sum_are_never_taken() -> None:
    sender, receiver = run_ranks(2, spoil, mode="process")
    assert receiver.startswith("rank 1: the bytes of arrival 0 differ from those that were sent")
    assert receiver.endswith("; 0; 8")  # nothing has landed there, and the slot is as it was
    assert sender == "nothing; 1; 7"


def test_a_step_that_cannot_be_is_refused() -> None:
    """By the C function too, whose caller may be no Python."""
    with landing_of([blobs_of()]) as landing:
        with pytest.raises(ValueError, match="most_bytes is 24, allowed are multiples of 16 from 16 on"):
            landing.step(24)
        with pytest.raises(ValueError, match="most_bytes is 24, allowed are multiples of 16"):
            _abi.call("putget_landing_step", landing._require_open(), 24, None)
        with pytest.raises(ValueError, match="the landing was made without gathering"):
            landing.step(16)


def stop_in(landing: Landing, step: str) -> None:
    """This rank takes part in a change of the active ranks up to a step, and no further."""

    def stops(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    setattr(landing._comm if step == "exchange_among" else landing._workspace, step, stops)


def leave_out_two(rank: Rank, step: str, gone: threading.Barrier) -> str:
    """A body: rank 3 is lost, and rank 2 while the others go on without rank 3. Experts move afterwards."""
    blobs = blobs_of(w=torch.full((2, 8), 7.0 + rank.rank))
    with Landing(rank.comm, [blobs], device="cpu", timeout_s=MISSED_S) as landing:
        assert landing.post([Move(0, 0, 0, 1, 1)])
        if rank.rank < 2:
            with pytest.raises(putget.PeerTimeout) as caught:
                landing.set_active_ranks([True, True, True, False])
            with pytest.raises(putget.PutgetError, match="call it again") if step == "set_active_ranks" else nothing():
                landing.move()
            assert landing.set_active_ranks([True, True, False, False]) == 0
            assert landing.post([Move(0, 0, 0, 1, 1)])
            while landing.progress().agreed != 1:
                landing.move()
                told = rank.comm.exchange_among("landed", int(landing.landed), 20.0, members=[0, 1])
                landing.take(torch.tensor([min(told.values())], dtype=torch.int32))
            gone.wait(30)
            return f"{caught.value.missing} {blobs._tensors['w'][1, 0]:g}"
        if rank.rank == 2:
            stop_in(landing, step)
            with pytest.raises(KeyboardInterrupt):
                landing.set_active_ranks([True, True, True, False])
        gone.wait(30)
    return ""


@pytest.mark.timed
@pytest.mark.parametrize("step", ["exchange_among", "set_active_ranks"])
def test_a_rank_that_stops_while_another_is_left_out_is_left_out_too(step: str) -> None:
    found = run_ranks(4, leave_out_two, step, threading.Barrier(4), mode="thread", timeout=60)
    assert found == ["(2,) 7", "(2,) 7", "", ""]


def test_a_mask_of_another_size_changes_nothing() -> None:
    with landing_of([blobs_of()]) as landing:
        for mask in ([True, True], [], [False], None):
            with pytest.raises(ValueError, match="mask"):
                landing.set_active_ranks(mask)  # type: ignore[arg-type]
        landing.move()
        assert landing.set_active_ranks([True]) == 0
