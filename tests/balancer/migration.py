"""A small layer whose experts move while it serves: bodies for ranks, also of scripts/migration_soak.py.

Everything is a small whole number, so that a sum is exact in any order: a token's output depends on its experts alone,
not on where they lie. A slot with another expert, a table of another batch or bytes on their way show in it.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import putget
from putget.balancer import ExpertBlobs, Landing, Move
from tests.harness import Rank

EXPERTS, TOP_K, TOKENS, HIDDEN = 6, 2, 5, 24
SLOTS = 3  # of each rank
PHASES = ("dispatch", "dispatched", "combined", "moved", "taken")  # where a rank may die


@dataclass
class Placed:
    """Which expert each slot has: a list of SLOTS * ep_size, the same on all ranks."""

    slots: list[int]
    moves: list[Move] = field(default_factory=list)  # to the next one
    following: list[int] = field(default_factory=list)

    def plan(self, rng: random.Random, live: list[int]) -> None:
        """Moves of the next batch: one or two experts get a slot more, for one that has several."""
        self.moves, self.following = [], list(self.slots)
        targets: set[int] = set()
        for _ in range(rng.randint(0, 2)):
            free = [
                slot
                for rank in live
                for slot in range(rank * SLOTS, (rank + 1) * SLOTS)
                if len(self.of(self.following[slot], live)) > 1 and slot not in targets
            ]
            if not free:
                return
            to = rng.choice(free)
            held = [s for rank in live if rank != to // SLOTS for s in range(rank * SLOTS, (rank + 1) * SLOTS)]
            source = rng.choice(held)
            self.following[to] = self.slots[source]
            if len(self.of(self.slots[to], live)) == 0:
                self.following[to] = self.slots[to]
                continue
            targets.add(to)
            self.moves.append(Move(0, source // SLOTS, source % SLOTS, to // SLOTS, to % SLOTS))

    def of(self, expert: int, live: list[int]) -> list[int]:
        """The slots of an expert in the next placement, on live ranks."""
        return [slot for slot, held in enumerate(self.following) if held == expert and slot // SLOTS in live]


def weights_of(expert: int) -> tuple[Tensor, Tensor]:
    """The tensors of an expert: factors, and a bias whose size is no multiple of 16 bytes."""
    generator = torch.Generator().manual_seed(expert)
    return (
        torch.randint(-8, 9, (HIDDEN,), generator=generator).float(),
        torch.randint(-8, 9, (1,), generator=generator).float(),
    )


class Server:
    """One rank: its slots, the rounds, and the batches that move experts."""

    def __init__(
        self, rank: Rank, seed: int, cells: int = 2, timeout_s: float = 20.0, movers: tuple[str, ...] = ("kernel",)
    ) -> None:
        self.rank, self.seed = rank, seed
        self.live = list(range(rank.size))
        self.placed = Placed([slot % EXPERTS for slot in range(SLOTS * rank.size)])
        mine = self.placed.slots[rank.rank * SLOTS : (rank.rank + 1) * SLOTS]
        factors, bias = (torch.stack(parts) for parts in zip(*map(weights_of, mine), strict=True))
        self.factors, self.bias = factors.to(rank.device), bias.to(rank.device)
        self.a2a = rank.all_to_all(
            num_experts=SLOTS * rank.size,
            top_k=TOP_K,
            max_tokens_per_rank=TOKENS,
            payloads=[putget.Payload((HIDDEN,), torch.float32)],
            output=putget.Payload((HIDDEN,), torch.float32),
            num_stats=1,
            timeout_s=timeout_s,
            warmup_timeout_s=20.0,
        )
        self.landing = Landing(
            rank.comm,
            [ExpertBlobs({"factors": self.factors, "bias": self.bias})],
            cells=cells,
            num_sms=2,
            mover=movers[rank.rank % len(movers)],
            device=rank.device,
            timeout_s=20.0,
        )
        self.least = torch.zeros(1, dtype=torch.int32, device=rank.device)
        self.iteration = self.flips = 0
        self.base = 0  # batches before the last set_active_ranks
        self.next_batch()

    def next_batch(self) -> None:
        """Plans and posts what comes after the placement in force."""
        self.placed.plan(random.Random(self.seed * 7919 + self.base + self.landing.batch), self.live)
        assert self.landing.post(self.placed.moves)

    def serve(self, die: tuple[int, str] | None = None) -> None:
        """One iteration: a round, what moves, and where all ranks have it, the next placement."""
        doomed = die[1] if die is not None and die[0] == self.iteration else ""
        ids, weights, x, want = self.tokens()
        self.rank.meet()
        self.die_at(doomed, "dispatch")
        received = self.a2a.dispatch(ids, weights, x, stats=self.landing.landed)
        assert received.stats is not None
        told = received.stats[self.live].amin(0)
        self.die_at(doomed, "dispatched")
        self.run_experts(received)
        self.rank.meet()
        out = self.a2a.combine()
        if not torch.equal(out, want):
            raise AssertionError(f"rank {self.rank.rank}, iteration {self.iteration}: a wrong token")
        self.die_at(doomed, "combined")
        self.landing.move(64)  # a part of an expert: several iterations a move
        self.die_at(doomed, "moved")
        self.least.copy_(told)
        self.landing.take(self.least)
        self.die_at(doomed, "taken")
        self.iteration += 1
        if int(self.least) == self.landing.batch:
            self.flips += bool(self.placed.moves)
            self.placed = Placed(self.placed.following)
            self.next_batch()

    def die_at(self, doomed: str, phase: str) -> None:
        if doomed == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """This rank's input in this iteration, 0 to TOKENS tokens, and the expected result."""
        generator = torch.Generator().manual_seed((self.seed * 1009 + self.iteration) * 64 + self.rank.rank)
        count = int(torch.randint(-1, TOKENS + 1, (1,), generator=generator).clamp(min=0))
        here = sorted({self.placed.slots[s] for r in self.live for s in range(r * SLOTS, (r + 1) * SLOTS)})
        experts = torch.tensor(here)[torch.randint(len(here), (count, TOP_K), generator=generator)]
        weights = torch.randint(-3, 4, (count, TOP_K), generator=generator).float()
        x = torch.randint(-50, 50, (count, HIDDEN), generator=generator).float()
        ids = torch.empty(count, TOP_K, dtype=torch.int32)
        want = torch.zeros(count, HIDDEN)
        for token in range(count):
            for k in range(TOP_K):
                expert = int(experts[token, k])
                slots = [s for s, held in enumerate(self.placed.slots) if held == expert and s // SLOTS in self.live]
                ids[token, k] = slots[(token + self.iteration + k) % len(slots)]
                factors, bias = weights_of(expert)
                want[token] += weights[token, k] * (x[token] * factors + bias)
        place = self.rank.device
        return ids.to(place), weights.to(place), x.to(place), want.to(place)

    def run_experts(self, received: putget.Received) -> None:
        """Each row: the weighted sum over this rank's slots."""
        slots = received.topk_ids - self.rank.rank * SLOTS
        is_here = (slots >= 0) & (slots < SLOTS)
        slots = slots.clamp(0, SLOTS - 1).long()
        x = received.payloads[0][:, :, None, :]
        rows = torch.where(is_here[..., None], x * self.factors[slots] + self.bias[slots], 0.0)
        weights = torch.where(is_here, received.topk_weights, 0.0)[..., None]
        self.a2a.combine_input.copy_(torch.where(is_here[..., None], weights * rows, 0.0).sum(2))

    def go_on_without(self, *lost: int) -> int:
        """The survivors agree on the last batch; returns it."""
        mask = [rank not in lost for rank in range(self.rank.size)]
        self.a2a.set_active_ranks(mask)
        posted = self.landing.batch
        agreed = self.landing.set_active_ranks(mask)
        assert agreed in (posted - 1, posted)
        self.live = [rank for rank in self.live if mask[rank]]
        if agreed == posted:
            self.placed = Placed(self.placed.following)
        self.base += agreed
        self.next_batch()
        return self.base

    def slots_are_right(self) -> bool:
        """Whether every slot of this rank has the expert that the placement says."""
        mine = self.placed.slots[self.rank.rank * SLOTS : (self.rank.rank + 1) * SLOTS]
        factors, bias = (torch.stack(parts) for parts in zip(*map(weights_of, mine), strict=True))
        return torch.equal(self.factors.cpu(), factors) and torch.equal(self.bias.cpu(), bias)

    def close(self) -> None:
        self.landing.close()
        self.a2a.close()


def serve_many(rank: Rank, iterations: int, seed: int) -> tuple[int, bool]:
    """A body: how often experts have moved, and whether the slots are right at the end."""
    server = Server(rank, seed)
    for _ in range(iterations):
        server.serve()
    right = server.slots_are_right()
    server.close()
    return server.flips, right


def serve_until_moved(rank: Rank, flips: int, seed: int, movers: tuple[str, ...]) -> tuple[int, bool]:
    """A body: the same, until experts have moved so often. All ranks see it behind the same iteration."""
    server = Server(rank, seed, movers=movers)
    end = time.monotonic() + 60
    while server.flips < flips:
        assert time.monotonic() < end, f"experts have moved {server.flips} times in {server.iteration} iterations"
        server.serve()
    right = server.slots_are_right()
    server.close()
    return server.flips, right


def begin(rank: Rank, seed: int, timeout_s: float, movers: tuple[str, ...] = ("kernel",)) -> None:
    """A body: the server is in the rank's state."""
    rank.state["server"] = Server(rank, seed, timeout_s=timeout_s, movers=movers)


def serve_until_lost(rank: Rank, die: tuple[int, str] | None, iterations: int) -> str:
    """A body: the server that is in the rank's state serves until a rank is missed."""
    server = rank.state["server"]
    try:
        for _ in range(iterations):
            server.serve(die)
    except putget.PeerTimeout as error:
        return f"missed {error.missing}"
    return "nobody was missed"


def go_on(rank: Rank, lost: int, iterations: int) -> dict[str, Any]:
    """A body: goes on without a rank."""
    server: Server = rank.state["server"]
    agreed = server.go_on_without(lost)
    slots = list(server.placed.slots)
    right = server.slots_are_right()
    for _ in range(iterations):
        server.serve()
    return {"agreed": agreed, "slots": slots, "right": right, "still": server.slots_are_right()}
