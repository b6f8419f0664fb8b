"""Passes of draft layers: ranks run different numbers of them, and their experts are spread, move and come back."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import pytest
import torch

from putget.adapters.transformers import passes, spreading
from putget.balancer import PlanOptions
from tests.adapters.transformers.test_spreading import Model, batch, made
from tests.harness import Rank, fresh_ranks, run_ranks

LAYERS, EXPERTS, DRAFTS = 2, 5, 1
GONE, AT_TURN = 1, 3


def made_with_drafts(rank: Rank, **options: Any) -> tuple[Model, Model, Any]:
    """A body's model and draft layers, spread; transformers is not here."""
    drafts = Model(DRAFTS, EXPERTS)
    spreading.load_drafts = lambda _: drafts
    passes.kept_drafts = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
    model = Model(LAYERS, EXPERTS)
    return model, drafts, made(rank, model, use_mtp=True, check_layers=True, **options)


def run_turns(rank: Rank, model: Model, drafts: Model, found: Any, count: int) -> None:
    """Model passes, with a draft pass behind some; each compared with the dense layers."""
    dense, dense_drafts = Model(LAYERS, EXPERTS), Model(DRAFTS, EXPERTS)
    with found.together():
        for number in range(count):
            args = batch(100 * rank.rank + number, 1 + (number + rank.rank) % 5)
            torch.testing.assert_close(model(*args), dense(*args))
            if (number + rank.rank) % 3:
                torch.testing.assert_close(drafts(*args), dense_drafts(*args))


def take_turns(rank: Rank) -> list[Any]:
    """A body: rank r has 4 * r turns."""
    model, drafts, found = made_with_drafts(rank)
    held = [model.layers[0].num_experts, drafts.layers[0].num_experts]
    run_turns(rank, model, drafts, found, 4 * rank.rank)
    counts = [found.lockstep.number, found.lockstep.idle_passes]
    found.end()
    return [held, counts]


def test_ranks_with_and_without_drafts_take_turns() -> None:
    """Seven draft passes lie between eight model passes; nobody drafts behind the last one."""
    first, second, third = run_ranks(3, take_turns)
    assert [found[0] for found in (first, second, third)] == [[2, 2], [2, 2], [1, 1]]
    assert first[1] == [15, 15]
    assert [second[1][0], third[1][0]] == [15, 15]
    assert 0 < third[1][1] < second[1][1] < 15


def move_at_every_turn(rank: Rank) -> list[int]:
    """A body: a plan is made in every turn, and moves experts of drafts, too."""
    plan = PlanOptions(interval=1, in_thread=False, min_gain=0.0)
    model, drafts, found = made_with_drafts(rank, num_slots=6, balance="online", plan=plan)
    steps, step = [0], found.balancer.step

    def counted() -> None:
        steps[0] += 1
        step()

    found.balancer.step = counted
    run_turns(rank, model, drafts, found, 40 - 20 * rank.rank)
    result = [found.balancer.num_moves, steps[0], found.lockstep.number]
    found.end()
    return result


def test_the_balancer_has_one_handshake_a_turn_and_moves_experts_of_drafts() -> None:
    first, second = run_ranks(2, move_at_every_turn)
    assert first == second
    moves, steps, number = first
    assert moves > 0
    assert (steps, (number + 1) // 2) == (40, 40)


def lose_one(rank: Rank, part: str) -> list[Any]:
    """A body: rank GONE is killed in the experts of a part of turn AT_TURN."""
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # its imports take longer than a deadline
    model, drafts, found = made_with_drafts(rank, num_slots=9, timeout_s=4.0)
    if rank.rank == GONE:
        rounds = {"model": model, "draft": drafts}[part].layers[-1].forward
        inner, calls = rounds.experts_forward, [0]

        def die(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] == AT_TURN:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*args)

        rounds.experts_forward = die
    run_turns(rank, model, drafts, found, 6 if rank.rank else 0)
    rank.state["kept"] = found
    return [found.members, (found.lockstep.number + 1) // 2]


@pytest.mark.parametrize("part", ["draft", pytest.param("model", marks=pytest.mark.soak)])
def test_drafts_go_on_without_a_rank_that_is_killed(part: str) -> None:
    with fresh_ranks(3) as ranks:
        for rank in range(3):
            ranks.submit(rank, lose_one, part)
        found = ranks.results((0, 2), timeout=60)
    assert found[0] == found[2] == [(0, 2), 6]
