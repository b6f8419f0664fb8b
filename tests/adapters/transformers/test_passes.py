"""Passes of a spread model go on: without a rank that is killed, and while experts move."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import pytest
import torch

import putget
from putget.balancer import PlanOptions
from tests.adapters.transformers.test_spreading import Model, batch, made, wait_on
from tests.harness import Rank, fresh_ranks, run_ranks

LAYERS, EXPERTS, GONE, AT_PASS = 2, 5, 1, 3
DEADLINE_S = 6.0


def run_passes(rank: Rank, model: Model, found: Any, count: int) -> None:
    """Passes with batches of this rank's own, each compared with the dense model."""
    dense = Model(LAYERS, EXPERTS)
    with found.together():
        for number in range(count):
            args = batch(100 * rank.rank + number, 1 + (number + rank.rank) % 5)
            torch.testing.assert_close(model(*args), dense(*args))


def die(model: Model, layer: int, where: str) -> None:
    """Has this process killed at a layer of pass AT_PASS: before its round, in its experts, or behind its round."""
    experts = model.layers[layer]
    rounds, exchange = experts.forward, experts.forward
    inner, calls = rounds.experts_forward, [0]

    def kill() -> None:
        if calls[0] == AT_PASS:
            os.kill(os.getpid(), signal.SIGKILL)

    def in_experts(*args: Any) -> Any:
        if where == "experts":
            kill()
        return inner(*args)

    def forward(*args: Any) -> Any:
        calls[0] += 1
        if where == "before":
            kill()
        output = exchange(*args)
        if where == "behind":
            kill()
        return output

    rounds.experts_forward, experts.forward = in_experts, forward


def lose_one(rank: Rank, layer: int, where: str, busy: int) -> list[Any]:
    """A body: rank GONE is killed; rank 0 has no pass of its own where ``busy`` is 0."""
    torch.manual_seed(0)
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # its imports take longer than a deadline
    model = Model(LAYERS, EXPERTS)
    found = made(rank, model, num_slots=9, check_layers=True, timeout_s=DEADLINE_S)
    if rank.rank == GONE:
        die(model, layer, where)
    heard: list[Any] = []
    found.on_members = heard.append
    run_passes(rank, model, found, busy if rank.rank == 0 else 6)
    rank.state["kept"] = found
    return [heard, found.members, found.lockstep.number]


def come_late(rank: Rank) -> list[Any]:
    """A body: rank GONE stands still for longer than the deadline of the others, who ask it before they go on."""
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    model = Model(LAYERS, EXPERTS)
    found = made(rank, model, num_slots=9, check_layers=True, timeout_s=DEADLINE_S)
    if rank.rank == GONE:
        inner, calls = model.layers[0].forward, [0]

        def forward(*args: Any) -> Any:
            calls[0] += 1
            time.sleep((DEADLINE_S + 1) * (calls[0] == AT_PASS))
            return inner(*args)

        model.layers[0].forward = forward  # type: ignore[method-assign]
    run_passes(rank, model, found, 6)
    found.end()
    return [found.recoveries > 0, found.members, found.lockstep.number]


@pytest.mark.soak
def test_a_rank_that_comes_late_stays_a_member() -> None:
    with fresh_ranks(3) as ranks:
        assert list(ranks.call(come_late).values()) == [[True, (0, 1, 2), 6]] * 3


@pytest.mark.parametrize(
    ("layer", "where", "busy"),
    [
        (1, "experts", 6),
        (1, "behind", 0),
        pytest.param(0, "before", 6, marks=pytest.mark.soak),
        pytest.param(0, "experts", 0, marks=pytest.mark.soak),
    ],
)
def test_the_others_go_on_without_a_rank_that_is_killed(layer: int, where: str, busy: int) -> None:
    """Their passes give what the dense model gives; its experts come back into spare slots."""
    with fresh_ranks(3) as ranks:
        for rank in range(3):
            ranks.submit(rank, lose_one, layer, where, busy)
        found = ranks.results((0, 2), timeout=120)
    assert found[0] == found[2] == [[(0, 2)], (0, 2), 6]


def one_leaves(rank: Rank) -> list[Any]:
    """A body: rank GONE leaves by an exception between two passes, and lives on."""
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    model = Model(LAYERS, EXPERTS)
    found = made(rank, model, num_slots=9, check_layers=True, timeout_s=DEADLINE_S)
    rank.state["kept"] = found
    if rank.rank == GONE:
        with contextlib.suppress(KeyError), found.together():
            model(*batch(1, 2))
            raise KeyError("a caller's own")
    else:
        run_passes(rank, model, found, 6)
    return [found.members, found.lockstep.number]


def test_the_others_go_on_without_a_rank_that_leaves_by_an_error() -> None:
    with fresh_ranks(3) as ranks:
        assert ranks.call(one_leaves, timeout=120) == {0: [(0, 2), 6], GONE: [(0, 1, 2), 1], 2: [(0, 2), 6]}


def one_goes(rank: Rank, is_killed: bool) -> list[Any]:
    """A body: rank GONE goes behind pass 1, rank 0 has no further one, and rank 2 hears of that before its next one."""
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    model = Model(LAYERS, EXPERTS)
    found = rank.state["kept"] = made(rank, model, num_slots=9, check_layers=True, timeout_s=DEADLINE_S)
    with contextlib.suppress(KeyError), found.together():
        model(*batch(1, 2))
        if rank.rank == GONE and is_killed:
            found.lockstep.finish()
            os.kill(os.getpid(), signal.SIGKILL)
        if rank.rank == GONE:
            raise KeyError("a caller's own")
        if rank.rank == 2:
            with pytest.raises(putget.PeerTimeout):
                wait_on(found.lockstep)
            torch.testing.assert_close(model(*batch(2, 2)), Model(LAYERS, EXPERTS)(*batch(2, 2)))
    return [found.members, found.lockstep.number]


@pytest.mark.parametrize("is_killed", [False, True], ids=["error", "killed"])
def test_a_rank_that_has_finished_goes_on_with_the_one_that_has_passes(is_killed: bool) -> None:
    with fresh_ranks(3) as ranks:
        for rank in range(3):
            ranks.submit(rank, one_goes, is_killed)
        assert ranks.results((0, 2), timeout=120) == {0: [(0, 2), 2], 2: [(0, 2), 2]}


def lose_too_much(rank: Rank) -> str:
    """A body: the others have four slots for five experts."""
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    model = Model(LAYERS, EXPERTS)
    found = made(rank, model, num_slots=6, timeout_s=DEADLINE_S)
    if rank.rank == GONE:
        die(model, 0, "experts")
    rank.state["kept"] = found
    try:
        run_passes(rank, model, found, 6)
    except putget.PutgetError as error:
        return str(error)
    raise AssertionError("it went on")


def test_experts_without_room_are_an_error_of_all_others() -> None:
    with fresh_ranks(3) as ranks:
        for rank in range(3):
            ranks.submit(rank, lose_too_much)
        found = ranks.results((0, 2), timeout=120)
    assert set(found.values()) == {
        "rank(s) [1] are lost; the others have 4 slots for 5 experts: give more num_slots, and start again"
    }


def move_at_every_pass(rank: Rank) -> list[int]:
    """A body: a plan is made in every pass; ranks have batches of their own, and one ends early."""
    model = Model(LAYERS, EXPERTS)
    plan = PlanOptions(interval=1, in_thread=False, min_gain=0.0)
    found = made(rank, model, num_slots=6, balance="online", plan=plan, check_layers=True)
    run_passes(rank, model, found, 60 - 30 * rank.rank)
    moves = [found.balancer.num_moves, found.lockstep.number]
    found.end()
    return moves


def test_experts_move_while_ranks_serve() -> None:
    zero, one = run_ranks(2, move_at_every_pass)
    assert zero == one
    assert zero[0] > 0
    assert zero[1] == 60


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_slots": 4}, "num_slots is 4, expected a multiple of the 1 ranks from the 5 experts on"),
        ({"num_slots": True}, "num_slots is True"),
        ({"balance": "often"}, "balance is 'often', allowed are off, static, online"),
    ],
)
def test_slots_that_do_not_fit_are_refused(options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from putget.adapters.transformers import spread, spreading

    monkeypatch.setattr(spreading, "require_transformers", lambda: "5.24.0")
    (comm,) = putget.Communicator.local(1)
    with comm, pytest.raises(ValueError, match=text):
        spread(Model(), comm, **options)
