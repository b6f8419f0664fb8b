"""How long does an update of a large model take on many ranks? The real planner's bytes over a model of NICs.

Each rank has one NIC, and copies parts from its host's memory before it sends them. Stages overlap, so an update takes
as long as its longest stage on the slowest rank: at least that, because nothing else is counted. For comparison, the
same weights by way of one rank: it receives them all (BF16), and sends them all on (FP8).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from putget_transfer.weights._model import Layout, Param, Shard, Slot, Slots
from putget_transfer.weights._native import Schedule
from putget_transfer.weights._plan import plan
from putget_transfer.weights._quantise import BLOCK

GIGABIT = 1e9 / 8
BF16 = 2
PUBLISHED_S = 1.3
"""Kimi-K2 from 256 trainers (BF16) to 128 GPUs (FP8), section 5 of the paper; it does not say how many replicas."""


@dataclass(frozen=True)
class Model:
    """A model of DeepSeek-V3's kind, by its shapes."""

    layers: int = 61
    dense_layers: int = 1
    experts: int = 384
    hidden: int = 7168
    expert: int = 2048
    dense: int = 18432
    heads: int = 64
    head_nope: int = 128
    head_rope: int = 64
    head_value: int = 128
    rank_q: int = 1536
    rank_kv: int = 512
    vocab: int = 163840

    def tensors(self) -> Iterator[tuple[str, tuple[int, int], int | None]]:
        """Yield name and shape of each matrix, and the number of its expert."""
        yield "embed", (self.vocab, self.hidden), None
        yield "head", (self.vocab, self.hidden), None
        for layer in range(self.layers):
            at = f"layers.{layer}."
            yield at + "q_a", (self.rank_q, self.hidden), None
            yield at + "q_b", (self.heads * (self.head_nope + self.head_rope), self.rank_q), None
            yield at + "kv_a", (self.rank_kv + self.head_rope, self.hidden), None
            yield at + "kv_b", (self.heads * (self.head_nope + self.head_value), self.rank_kv), None
            yield at + "o", (self.hidden, self.heads * self.head_value), None
            sizes = {"dense": self.dense} if layer < self.dense_layers else {"shared": self.expert}
            for name, size in sizes.items():
                yield from self._mlp(f"{at}{name}.", size, None)
            if layer >= self.dense_layers:
                yield at + "router", (self.experts, self.hidden), None
                for expert in range(self.experts):
                    yield from self._mlp(f"{at}experts.{expert}.", self.expert, expert)

    def _mlp(self, at: str, size: int, expert: int | None) -> Iterator[tuple[str, tuple[int, int], int | None]]:
        for name, shape in (("gate", (size, self.hidden)), ("up", (size, self.hidden)), ("down", (self.hidden, size))):
            yield at + name, shape, expert

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(rows * columns for _, (rows, columns), _ in self.tensors())


def _cut(rows: int, parts: int, step: int) -> list[tuple[int, int]]:
    """Cut rows into ranges of whole steps, as even as can be."""
    steps = -(-rows // step)
    ends = [min(steps * part // parts * step, rows) for part in range(parts + 1)]
    return list(itertools.pairwise(ends))


def trainers(model: Model, ranks: int) -> list[Param]:
    """Return the parameters of BF16 trainers: experts whole, one rank each, and all else divided by rows."""
    layouts: dict[object, Layout] = {}
    params, number = [], 0
    for name, shape, expert in model.tensors():
        key: object = shape
        if expert is not None:
            key, number = (shape, number // 3 % ranks), number + 1
        if key not in layouts:
            if isinstance(key[1], int) and expert is None:  # type: ignore[index]
                cuts = [(rank, first, end) for rank, (first, end) in enumerate(_cut(shape[0], ranks, 1)) if end > first]
                shards = tuple(Shard((first, 0), (end - first, shape[1]), (rank,)) for rank, first, end in cuts)
                layouts[key] = Layout(shards, "divided", gathers=True)
            else:
                layouts[key] = Layout((Shard((0, 0), shape, (key[1],)),), "experts")  # type: ignore[index]
        params.append(Param(name, shape, "bfloat16", layouts[key]))
    return params


def rollout(model: Model, ranks: int) -> list[Slots]:
    """Return the slots of one replica in FP8: its ranks divide experts, and the blocks of all other matrices."""
    slots: list[list[Slot]] = [[] for _ in range(ranks)]
    memory: list[list[tuple[str, int]]] = [[] for _ in range(ranks)]
    for number, (name, (rows, columns), expert) in enumerate(model.tensors()):
        cuts = _cut(rows, 1 if expert is not None else ranks, BLOCK)
        for part, (first, end) in enumerate(cuts):
            # Matrices of few blocks begin at different ranks.
            rank = (part + number) % ranks if expert is None else expert * ranks // model.experts
            if end == first:
                continue
            wide, high, low = -(-columns // BLOCK), -(-end // BLOCK), first // BLOCK
            at = len(memory[rank])
            memory[rank] += [(name, (end - first) * columns), (name + "_scale_inv", (high - low) * wide * 4)]
            values = Slot(name, (first, 0), (end - first, columns), at, 0, (columns, 1), "float8_e4m3fn", "fp8_float32")
            scales = (low, 0), (high - low, wide), at + 1, 0, (wide * 4, 4), "float32", "fp8_float32_scale"
            slots[rank] += [values, Slot(name, *scales)]
    return [Slots(own, places) for own, places in zip(slots, memory, strict=True)]


@dataclass(frozen=True)
class Row:
    """The result of a simulated update.

    Attributes:
        replicas: Replicas.
        replica_size: Ranks of each.
        num_bytes: Bytes that cross the network.
        gathered_bytes: Those of them that are brought together first.
        send_s: The busiest sending NIC.
        receive_s: The busiest receiving NIC.
        host_s: The longest copy from a host's memory, of BF16.
        point_to_point_s: The longest of these.
        one_rank_bf16_s: One rank's NIC receives all weights in BF16.
        one_rank_fp8_s: One rank's NIC sends all weights in FP8.
    """

    replicas: int
    replica_size: int
    num_bytes: int
    gathered_bytes: int
    send_s: float
    receive_s: float
    host_s: float
    point_to_point_s: float
    one_rank_bf16_s: float
    one_rank_fp8_s: float


def simulate(
    model: Model, *, trainer_ranks: int, replicas: int, replica_size: int, gbit: float, host_gbyte_s: float
) -> tuple[Row, Schedule]:
    """Plan an update, and put its bytes over the NICs.

    Args:
        model: Its shapes.
        trainer_ranks: Trainer ranks.
        replicas: Replicas.
        replica_size: Ranks of a replica.
        gbit: Gigabits per second of a NIC, each way.
        host_gbyte_s: Gigabytes per second from a host's memory to a device.
    """
    schedule = plan(trainers(model, trainer_ranks), rollout(model, replica_size), replicas=replicas)
    rate = gbit * GIGABIT
    send = max(schedule.sent(rank) for rank in range(trainer_ranks)) / rate
    receive = max(schedule.received(rank) for rank in range(replicas * replica_size)) / rate
    host = BF16 * model.parameters / trainer_ranks / (host_gbyte_s * 1e9)
    row = Row(
        replicas,
        replica_size,
        schedule.num_bytes,
        schedule.gathered_bytes,
        send,
        receive,
        host,
        max(send, receive, host),
        BF16 * model.parameters / rate,
        model.parameters / rate,
    )
    return row, schedule
