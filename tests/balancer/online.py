"""Two small layers that a Balancer keeps even while they serve: bodies for ranks.

Everything is a small whole number, so that a sum is exact in any order: a token's output depends on its experts alone,
not on where they lie. A slot with another expert, or a table of another batch, shows in it. Experts' loads change often
enough for experts to be on their way in many iterations, and seldom enough for moves to pay.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

import putget
from putget.balancer import (
    BalancedLayer,
    Balancer,
    ExpertBlobs,
    HostStore,
    LoadHistory,
    MoveOptions,
    Placement,
    PlanOptions,
    ReplicaChoice,
)
from putget.balancer.recovery import said_by_all
from putget.experts import ExpertSlots
from tests.harness import Rank

LAYERS, EXPERTS, TOP_K, TOKENS, HIDDEN = 2, 12, 2, 5, 24
PHASES = ("dispatch", "dispatched", "combined", "taken", "moved", "polled")  # where a rank may die


def weights_of(layer: int, expert: int) -> tuple[Tensor, Tensor]:
    """The tensors of an expert: factors, and a bias whose size is no multiple of 16 bytes."""
    generator = torch.Generator().manual_seed(layer * 1000 + expert)
    return (
        torch.randint(-8, 9, (HIDDEN,), generator=generator).float(),
        torch.randint(-8, 9, (1,), generator=generator).float(),
    )


class Layer:
    """The slots of this rank in one layer, and what turns experts into slots."""

    def __init__(self, rank: Rank, number: int, placement: Placement) -> None:
        self.number = number
        self.each = placement.num_replicas // rank.size
        self.first = rank.rank * self.each
        held = placement.physical_to_logical[number, self.first :][: self.each].tolist()
        factors, bias = (torch.stack(parts) for parts in zip(*(weights_of(number, e) for e in held), strict=True))
        self.factors, self.bias = factors.to(rank.device), bias.to(rank.device)
        sizes: dict[str, Any] = {"ep_size": rank.size, "ep_rank": rank.rank, "device": rank.device}
        self.choose = ReplicaChoice(placement, number, how="round_robin", **sizes)
        self.load = torch.zeros(EXPERTS, dtype=torch.int32, device=rank.device)

    def balanced(self) -> BalancedLayer:
        blobs = ExpertBlobs({"factors": self.factors, "bias": self.bias})
        return BalancedLayer(blobs, self.load, self.choose.tables, self.choose.tables_of)

    def run(self, received: putget.Received, out: Tensor) -> None:
        """Each row: the weighted sum over this rank's slots."""
        slots = received.topk_ids - self.first
        is_here = (slots >= 0) & (slots < self.each)
        slots = slots.clamp(0, self.each - 1).long()
        rows = received.payloads[0][:, :, None, :] * self.factors[slots] + self.bias[slots]
        weights = torch.where(is_here, received.topk_weights, 0.0)[..., None]
        out.copy_(torch.where(is_here[..., None], weights * rows, 0.0).sum(2))

    def is_right(self, placement: Placement) -> bool:
        """Whether every slot of this rank has the expert that the placement says."""
        held = placement.physical_to_logical[self.number, self.first :][: self.each].tolist()
        factors, bias = (torch.stack(parts) for parts in zip(*(weights_of(self.number, e) for e in held), strict=True))
        return torch.equal(self.factors.cpu(), factors) and torch.equal(self.bias.cpu(), bias)


def options_of(**options: Any) -> dict[str, Any]:
    """Arguments of Balancer: fields of PlanOptions and MoveOptions come into `plan` and `moves`."""
    for name, kind in (("plan", PlanOptions), ("moves", MoveOptions)):
        options[name] = kind(**{f.name: options.pop(f.name) for f in fields(kind) if f.name in options})
    return options


class Server:
    """One rank of a model of two layers, which share an AllToAll."""

    def __init__(
        self, rank: Rank, seed: int, *, spare: int = 2, stored: bool = False, updated: bool = False, **options: Any
    ) -> None:
        self.rank, self.seed = rank, seed
        slots = rank.size * -(-(EXPERTS + spare * rank.size) // rank.size)
        start = Placement.of(np.tile(np.arange(slots) % EXPERTS, (LAYERS, 1)), EXPERTS)
        self.layers = [Layer(rank, number, start) for number in range(LAYERS)]
        deadlines = {"timeout_s": options.pop("timeout_s", 20.0), "warmup_timeout_s": 20.0}
        row = putget.Payload((HIDDEN,), torch.float32)
        sizes: dict[str, Any] = {"top_k": TOP_K, "max_tokens_per_rank": TOKENS, "payloads": [row], "output": row}
        num_stats = options.pop("num_stats", 9)
        self.a2a = rank.all_to_all(num_experts=slots, num_stats=num_stats, **sizes, **deadlines)
        described = [layer.balanced() for layer in self.layers]
        self.slots = None
        blobs = [one.blobs for one in described]
        if updated:
            held = start.physical_to_logical.reshape(LAYERS, rank.size, -1)[:, rank.rank].tolist()
            self.slots = ExpertSlots(blobs, held)
            blobs = list(self.slots.layers)
        self.store = None
        if stored:
            self.store = HostStore(rank.comm, [one.slot_bytes for one in blobs], EXPERTS, device=rank.device)
        settings: dict[str, Any] = {"interval": 4, "history": LoadHistory(decay=0.2), "most_bytes": 64, "num_sms": 2}
        settings["in_thread"] = seed % 2 == 0
        self.balancer = Balancer(
            rank.comm,
            described,
            start,
            num_stats=self.a2a.num_stats,
            device=rank.device,
            timeout_s=20.0,
            store=self.store,
            slots=self.slots,
            **options_of(**{**settings, **options}),
        )
        if stored:
            self.balancer.save()
            rank.comm.compare("saved", {}, 20.0)
        self.iteration = self.moving = 0
        self.seen = hashlib.sha256()  # of the placements of all iterations

    def serve(self, die: tuple[int, str] | None = None) -> None:
        """One iteration: one or two passes over the layers, and the step."""
        doomed = die[1] if die is not None and die[0] == self.iteration else ""
        placement = self.balancer.placement
        self.seen.update(placement.physical_to_logical.tobytes())
        for number_of_pass in range(1 + self.iteration % 2):
            for layer in self.layers:
                self.serve_layer(layer, number_of_pass, placement, doomed)
        self.die_at(doomed, "combined")
        self.step(doomed)
        self.iteration += 1
        self.moving += self.balancer.is_moving

    def serve_layer(self, layer: Layer, number_of_pass: int, placement: Placement, doomed: str) -> None:
        experts, weights, x, want = self.tokens(layer, number_of_pass)
        layer.load.add_(torch.bincount(experts.flatten(), minlength=EXPERTS).int())
        ids = layer.choose(experts.int())
        if self.rank.device.type == "cpu":  # a GPU's host knows the placement later
            held = torch.from_numpy(placement.physical_to_logical[layer.number])[ids.long()]
            assert torch.equal(held, experts.int()), (self.rank.rank, self.iteration, "tables of another placement")
        self.rank.meet()
        self.die_at(doomed, "dispatch")
        carries = layer.number == 0
        received = self.a2a.dispatch(ids, weights, x, stats=self.balancer.stats if carries else None)
        if carries:
            assert received.stats is not None
            self.balancer.hear(received.stats)
        self.die_at(doomed, "dispatched")
        layer.run(received, self.a2a.combine_input)
        self.rank.meet()
        out = self.a2a.combine()
        if not torch.equal(out, want):
            raise AssertionError(f"rank {self.rank.rank}, iteration {self.iteration}: a wrong token")

    def step(self, doomed: str) -> None:
        """`Balancer.step`, taken apart for a rank that dies in it."""
        if doomed:
            self.balancer._landing.step()
            self.die_at(doomed, "taken")
            self.balancer.move()
            self.die_at(doomed, "moved")
            self.balancer.poll()
            self.die_at(doomed, "polled")
        else:
            self.balancer.step()

    def die_at(self, doomed: str, phase: str) -> None:
        if doomed == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    def tokens(self, layer: Layer, number_of_pass: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Experts, weights and rows of 0 to TOKENS tokens of this rank, and what must come back."""
        place = (self.seed * 1009 + self.iteration) * 1024 + self.rank.rank * 8 + layer.number * 2 + number_of_pass
        generator = torch.Generator().manual_seed(place)
        count = int(torch.randint(-1, TOKENS + 1, (1,), generator=generator).clamp(min=0))
        hot = (torch.arange(EXPERTS) + 5 * (self.iteration // 30) + 5 * layer.number) % EXPERTS  # others, now and then
        likely = (1.0 / (1 + hot)).expand(max(count, 1), -1)
        experts = torch.multinomial(likely, TOP_K, generator=generator)[:count]
        weights = torch.randint(-3, 4, (count, TOP_K), generator=generator).float()
        x = torch.randint(-50, 50, (count, HIDDEN), generator=generator).float()
        want = torch.zeros(count, HIDDEN)
        for token in range(count):
            for k in range(TOP_K):
                factors, bias = weights_of(layer.number, int(experts[token, k]))
                want[token] += weights[token, k] * (x[token] * factors + bias)
        device = self.rank.device
        return experts.to(device), weights.to(device), x.to(device), want.to(device)

    def go_on_without(self, *lost: int) -> None:
        mask = [rank not in lost for rank in range(self.rank.size)]
        self.a2a.set_active_ranks(mask)
        self.balancer.set_active_ranks(mask)

    def outcome(self) -> dict[str, Any]:
        """The state that all ranks must agree on, and whether slots are right."""
        if self.rank.device.type == "cuda":  # hosts learn of what kernels did at different times
            torch.cuda.current_stream(self.rank.device).synchronize()
            self.balancer.poll()
            self.moving, self.seen = 1 << 30, hashlib.sha256()
        placement = self.balancer.placement
        return {
            "slots": placement.physical_to_logical.tolist(),
            "windows": self.balancer.windows,
            "moves": self.balancer.num_moves,
            "moving": self.moving,
            "seen": self.seen.hexdigest(),
            "right": all(layer.is_right(placement) for layer in self.layers),
        }

    def close(self) -> None:
        self.balancer.close()
        self.a2a.close()
        if self.store is not None:
            self.store.close()


def serve_many(rank: Rank, iterations: int, seed: int, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """A body: what has become of the placement."""
    server = Server(rank, seed, **(options or {}))
    for _ in range(iterations):
        server.serve()
    found = server.outcome()
    server.close()
    return found


def serve_until_moved(rank: Rank, moves: int, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """A body: the same, until as many experts have moved. Ranks look together, now and then."""
    server = Server(rank, seed, **options)
    members = list(range(rank.size))
    end = time.monotonic() + 60
    while True:
        for _ in range(20):
            server.serve()
        found = server.outcome()
        if min(said_by_all(rank.comm, "moves", found["moves"], members, 20.0).values()) >= moves:
            break
        assert time.monotonic() < end, found
    server.close()
    return found


def serve_beside_updates(rank: Rank, iterations: int, seed: int) -> dict[str, Any]:
    """A body: each rank is in an update in some iterations, at other times than the other ranks."""
    server = Server(rank, seed, updated=True)
    slots = server.slots
    assert slots is not None
    refused = updates = 0
    until, moves, taken = 0, 0, False
    for iteration in range(iterations):
        if not taken and iteration % (7 + rank.rank) == 0:
            taken = slots.take("an update") is None
            refused += not taken
            until, moves = iteration + 5, slots.moved
        server.serve()
        if taken:
            assert slots.moved == moves, "experts moved beside an update"
            if iteration >= until:
                slots.put_in_force("an update", iteration)
                slots.give_back("an update")
                updates, taken = updates + 1, False
    if taken:
        slots.give_back("an update")
    held = server.balancer.placement.physical_to_logical.reshape(LAYERS, rank.size, -1)[:, rank.rank].tolist()
    assert [slots.experts(layer) for layer in range(LAYERS)] == held
    found = {**server.outcome(), "refused": refused, "updates": updates, "seen": ""}
    server.close()
    return found


def go_on_after_an_update(rank: Rank, lost: int) -> dict[str, Any]:
    """A body: one rank is in an update when another is lost. Nothing happens until the update is given up."""
    server: Server = rank.state["server"]
    assert server.slots is not None
    mask = [one != lost for one in range(rank.size)]
    server.a2a.set_active_ranks(mask)
    server.balancer.poll()  # gives the slots back, where no batch is under way
    assert server.slots.take("an update") is None
    server.slots.put_in_force("an update", 1)
    if rank.rank > 0:
        server.slots.give_back("an update")
    before = server.balancer.placement
    try:
        server.balancer.set_active_ranks(mask)
        said = ""
    except putget.PutgetError as error:
        said = str(error)
    assert server.balancer.placement is before
    if rank.rank == 0:
        server.slots.give_back("an update")
    server.balancer.set_active_ranks(mask)
    server.iteration = 100
    right = server.outcome()["right"]
    for _ in range(10):
        server.serve()
    return {"said": said, "right": right and server.outcome()["right"], "versions": server.slots.versions()}


def begin(rank: Rank, seed: int, options: dict[str, Any]) -> None:
    """A body: the server is in the rank's state."""
    rank.state["server"] = Server(rank, seed, **options)


def go_on(rank: Rank, lost: int, iterations: int) -> dict[str, Any]:
    """A body: goes on without a rank; what was agreed on then, and what there is some iterations later."""
    server: Server = rank.state["server"]
    server.go_on_without(lost)
    server.seen = hashlib.sha256()
    server.iteration = 100  # ranks may have ended another number of iterations
    at_once = server.outcome()
    for _ in range(iterations):
        server.serve()
    return {"at once": at_once, "later": server.outcome()}
