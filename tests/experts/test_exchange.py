"""Sends and receives of experts, in any order on any rank, as engines' movers ask for them."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch

import putget
from putget.balancer import ExpertExchange
from tests.harness import Rank, fresh_ranks, run_ranks

ROWS = 40


def tensors(rank: int, first: float, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Two tensors [ROWS, ...], one whose rows are not multiples of 16 bytes; every row of every rank differs."""
    numbers = first + 1000 * rank + torch.arange(ROWS, dtype=torch.float32, device=device)
    return [numbers[:, None].repeat(1, 9), (numbers + 0.5)[:, None].repeat(1, 4)]


def traffic(size: int, seed: int, count: int) -> list[tuple[int, int, int, int, int]]:
    """key, src, its row, dst, its row: no row gets two experts."""
    rng = random.Random(seed)
    free = [(dst, row) for dst in range(size) for row in range(ROWS)]
    rng.shuffle(free)
    found = []
    for key, (dst, row) in enumerate(free[:count]):
        src = rng.choice([rank for rank in range(size) if rank != dst])
        found.append((key, src, rng.randrange(ROWS), dst, row))
    return found


def exchange_all(rank: Rank, rounds: int) -> bool:
    """A body: several executes, of which some rebind; whether every row is what it must be."""
    home, room = tensors(rank.rank, 0, rank.device), tensors(rank.rank, 0.25, rank.device)
    rng = random.Random(rank.rank)
    right, base = True, 0
    with ExpertExchange(rank.comm, 48 + 16, device=rank.device, timeout_s=20.0) as exchange:
        exchange.bind([home, room])
        for number in range(rounds):
            if number % 3 == 2:
                base = 100 * number
                home = tensors(rank.rank, base, rank.device)
                exchange.bind([home, room])
            moves = traffic(rank.size, number, (0, 1, 30, rank.size * ROWS)[number % 4])
            rng.shuffle(moves)
            want = [tensor.clone() for tensor in room]
            for key, src, src_row, dst, dst_row in moves:
                if src == rank.rank:
                    exchange.send(0, src_row, dst, key)
                if dst == rank.rank:
                    exchange.receive(1, dst_row, src, key)
                    for tensor, theirs in zip(want, tensors(src, base, rank.device), strict=True):
                        tensor[dst_row] = theirs[src_row]
            exchange.execute()
            right = right and all(torch.equal(a, b) for a, b in zip(room, want, strict=True))
    return right


@pytest.mark.parametrize("size", [2, 5])
def test_every_expert_arrives(size: int, device: str) -> None:
    assert run_ranks(size, exchange_all, 10, device=device) == [True] * size


def lose(rank: Rank) -> tuple[str, float]:
    """A body: rank 1 dies in front of its execute."""
    exchange = ExpertExchange(rank.comm, 64, device=rank.device, timeout_s=4.0)
    exchange.bind([tensors(rank.rank, 0)])
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange.receive(0, 0, 1, 0)
    since = time.monotonic()
    with pytest.raises(putget.PeerTimeout) as caught:
        exchange.execute()
    took = time.monotonic() - since
    with pytest.raises(ValueError, match="is closed, or has no tensors"):
        exchange.execute()
    exchange.close()
    return str(caught.value), took


def test_a_rank_that_is_missing_is_named() -> None:
    with fresh_ranks(3) as ranks:
        ranks.submit(1, lose)
        for said, took in ranks.call(lose, ranks=[0, 2], timeout=30).values():
            assert "heard nothing from rank(s) 1 within 4 s" in said
            assert took < 25


def refuse(rank: Rank) -> None:
    """A body: what a caller may not do."""
    for options, named in (
        ({"expert_bytes": 64.0}, "expert_bytes is 64.0"),
        ({"num_sms": 0}, "num_sms is 0"),
        ({"timeout_s": -1.0}, "timeout_s is -1.0"),
    ):
        with pytest.raises(ValueError, match=f"^{named}"):
            ExpertExchange(rank.comm, device=rank.device, **{"expert_bytes": 64, **options})
    with ExpertExchange(rank.comm, 64, device=rank.device) as exchange:
        with pytest.raises(ValueError, match="has no tensors: call bind"):
            exchange.execute()
        with pytest.raises(ValueError, match="has no tensors: call bind"):
            exchange.send(0, 0, 1 - rank.rank, 0)
        with pytest.raises(ValueError, match="has experts of 96 bytes, there is room for 64"):
            exchange.bind([[torch.zeros(2, 24)]])
        with pytest.raises(ValueError, match="not contiguous"):
            exchange.bind([[torch.zeros(4, 4).t()]])
        exchange.bind([[torch.zeros(3, 4)], [torch.zeros(2, 4)]])
        for call in (exchange.send, exchange.receive):
            for group, row, named in (
                (2, 0, "group is 2"),
                (-1, 0, "group is -1"),
                (1, 2, "row is 2"),
                (0, -1, "row is -1"),
            ):
                with pytest.raises(ValueError, match=f"^{named}, allowed are ints from 0 to"):
                    call(group, row, 1 - rank.rank, 0)
        for groups, named in (
            ([[torch.zeros(0, 4)]], r"groups\[0\] has a tensor of no rows"),
            ([[torch.zeros(2, 4)], []], r"groups\[1\] has no tensor"),
            ([], "groups is empty"),
            ([[[1.0]]], r"groups\[0\] has a list"),
        ):
            with pytest.raises(ValueError, match=named):
                exchange.bind(groups)  # type: ignore[arg-type]
        exchange.send(0, 0, 1 - rank.rank, 5)
        exchange.receive(0, 1, 1 - rank.rank, 5)
        for name, call in (("send", exchange.send), ("receive", exchange.receive)):
            with pytest.raises(ValueError, match=f"^{name}: key is 5, as that of another expert"):
                call(1, 0, 1 - rank.rank, 5)
            with pytest.raises(ValueError, match=r"^key is"):
                call(1, 0, 1 - rank.rank, "5")  # type: ignore[arg-type]
        exchange.execute()
        for wrong in (rank.rank, rank.size, -1):
            with pytest.raises(ValueError, match=f"dst is {wrong}"):
                exchange.send(0, 0, wrong, 0)


def test_wrong_arguments_are_refused() -> None:
    run_ranks(2, refuse)
