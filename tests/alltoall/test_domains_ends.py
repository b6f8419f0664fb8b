"""Rounds across virtual domains that do not end: who is named, what is misuse, and what is refused."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch

import putget
from tests.harness import Rank, run_ranks
from tests.harness.domains import World, network, outlast


@pytest.mark.timed
@pytest.mark.parametrize(
    ("ep_size", "domain_size", "step"), [(4, 2, "dispatch"), (4, 2, "combine"), (5, 3, "dispatch")]
)
def test_a_silent_rank_is_named(ep_size: int, domain_size: int, step: str, world: World) -> None:
    gone = ep_size - 1
    raised = world.run(ep_size, domain_size, outlast, gone, step, 5, timeout=60)
    assert raised == [f"{step} ({gone},)"] * gone + [None]


def leave(rank: Rank, gone: int, seen: threading.Barrier) -> str | None:
    """A body: rank `gone` closes its object in the middle; whom the others miss. They leave together: who has left
    may be missed.
    """
    timeout_s = 3.0
    a2a = rank.all_to_all(timeout_s=timeout_s, num_experts=rank.size, top_k=rank.size)
    ids = torch.arange(rank.size, dtype=torch.int32).expand(2, rank.size).contiguous().to(rank.device)
    rows, weights = torch.ones(2, 4, device=rank.device), torch.ones(2, rank.size, device=rank.device)
    rank.meet()
    for number in range(20):
        began = time.monotonic()
        if rank.rank == gone and number == 3:
            a2a.close()
            return None
        try:
            a2a.dispatch(ids, weights, rows)
            a2a.combine()
            a2a.check()
        except putget.PeerTimeout as error:
            waited = time.monotonic() - began > timeout_s * 0.9
            is_right = set(error.lost) <= set(error.missing) and (error.lost or waited)
            seen.wait(30)
            a2a.close()
            return str(error.missing) if is_right else f"{error}: waited is {waited}"
    raise AssertionError("nobody missed a rank that is gone")


@pytest.mark.timed
@pytest.mark.parametrize("domain_size", [1, 2])
def test_a_rank_that_has_gone_is_named(domain_size: int, world: World) -> None:
    """At once where a write to it fails; else when the deadline has passed."""
    seen = threading.Barrier(3)
    raised = world.run(4, domain_size, leave, 3, seen, timeout=60)
    assert raised == ["(3,)"] * 3 + [None]


def test_more_rows_than_a_rank_looks_at(world: World) -> None:
    """As in one domain: of a source in another one too."""
    seen = threading.Barrier(2)

    def body(rank: Rank) -> str:
        a2a = rank.all_to_all(timeout_s=10.0)
        tokens = 3 * rank.rank
        ids = torch.zeros(tokens, 2, dtype=torch.int32, device=rank.device)  # all on rank 0
        weights, rows = torch.ones(tokens, 2, device=rank.device), torch.ones(tokens, 4, device=rank.device)
        raised = ""
        rank.meet()
        try:
            a2a.dispatch(ids, weights, rows, max_rows=None if rank.rank else 2)
            a2a.check()
        except putget.CapacityExceeded as error:
            raised = f"{error.source}: {error.rows} of {error.max_rows}"
        seen.wait(30)  # the leaver may not have sent the other's rows
        with contextlib.suppress(putget.PutgetError):
            a2a.close()
        return raised

    assert world.run(2, 1, body) == ["1: 3 of 2", ""]


def test_ends_that_differ_are_misuse(world: World) -> None:
    def body(rank: Rank) -> str:
        a2a = rank.all_to_all(timeout_s=2.0)
        ids = torch.tensor([[0, 2]], dtype=torch.int32, device=rank.device)
        weights, rows = torch.ones(1, 2, device=rank.device), torch.ones(1, 4, device=rank.device)
        rank.meet()
        try:
            for number in range(3):
                a2a.dispatch(ids, weights, rows)
                if number == 1 and rank.rank == 1:
                    a2a.release()
                else:
                    a2a.combine()
                a2a.check()
        except putget.PutgetError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            with contextlib.suppress(putget.PutgetError):
                a2a.close()
        return ""

    raised = world.run(2, 1, body, timeout=60)
    assert any("ProtocolMisuse" in text and "without combine" in text for text in raised), raised


def test_ranks_that_quantise_differently_are_told() -> None:
    def body(rank: Rank) -> str:
        low = torch.float8_e4m3fn if rank.rank else None
        with pytest.raises(ValueError, match="combine differs between ranks") as caught:
            rank.all_to_all(output=putget.Payload((16,), torch.bfloat16), combine_dtype=low)
        return str(caught.value)

    for text in run_ranks(2, body, mode="thread", network=network(1)):
        assert text.count("as written") == text.count("a scale for 128") == 1, text


def test_rows_that_cannot_be_quantised_are_refused() -> None:
    def body(rank: Rank) -> None:
        with pytest.raises(ValueError, match="output has 20 elements, expected a multiple of 16"):
            rank.all_to_all(output=putget.Payload((20,), torch.bfloat16), combine_dtype=torch.float8_e4m3fn)

    run_ranks(2, body, mode="thread", network=network(1))
