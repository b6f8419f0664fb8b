"""Plays the rounds of a case in the expert-major layout, and holds what came out against the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import putget
from putget import reference, reference_moe
from tests.harness.cases import COMBINE, Case, random_values
from tests.harness.compare import require_same
from tests.harness.rank import Rank

FIELDS = ("offsets", "num_rows", "weights", "source_rows", "positions")


@dataclass(frozen=True)
class GroupedOutcome:
    """One rank's view of one round, copied to the CPU."""

    fields: dict[str, Tensor]
    payloads: tuple[Tensor, ...]
    capacity: int
    combined: Tensor


def grouped_rows(case: Case, index: int, rank: int, capacity: int) -> Tensor:
    """The output of the experts of `rank` for the layout's rows: [capacity, *shape], also of unasked rows."""
    shape, dtype = case.output
    generator = torch.Generator().manual_seed(case.rounds[index].seed * 1009 + 300 + rank)
    return random_values((capacity, *shape), dtype, generator)


def play_grouped(rank: Rank, case: Case, alignments: tuple[int, ...]) -> list[GroupedOutcome]:
    """A body: every round of the case with its alignment. Rounds of equal sizes use the same memory."""
    with rank.all_to_all(**case.options()) as a2a:
        memory = {}
        for index, alignment in enumerate(alignments):
            key = (alignment, case.max_rows_of(index, rank.rank))
            if key not in memory:
                memory[key] = a2a.expert_major_memory(*key)
        return [
            play_round(a2a, rank, case, index, memory[alignment, case.max_rows_of(index, rank.rank)])
            for index, alignment in enumerate(alignments)
        ]


def play_round(
    a2a: putget.AllToAll, rank: Rank, case: Case, index: int, memory: putget.ExpertMajorMemory
) -> GroupedOutcome:
    played = case.rounds[index]
    sent = case.sent(index, rank.rank)
    place = rank.device
    if played.table is not None:
        a2a.expert_to_rank.copy_(torch.tensor(played.table, dtype=torch.int32))
    num_valid = None
    if sent.num_valid_tokens is not None:
        num_valid = torch.tensor([sent.num_valid_tokens], dtype=torch.int32, device=place)
    arguments = [tensor.to(place) for tensor in (sent.topk_ids, sent.topk_weights, *sent.payloads)]
    addend = case.addend(index, rank.rank)
    addend = None if addend is None else addend.to(place)
    rows = grouped_rows(case, index, rank.rank, memory.capacity).to(place)
    rank.meet()
    received = a2a.dispatch(*arguments, max_rows=case.max_rows_of(index, rank.rank), num_valid_tokens=num_valid)
    grouped = received.expert_major(memory.alignment, memory=memory)
    fields = {name: getattr(grouped, name).cpu().clone() for name in FIELDS}
    payloads = tuple(payload.cpu().clone() for payload in grouped.payloads)
    rank.meet()
    if played.in_halves(rank.rank, COMBINE):
        a2a.combine_start(rows, layout=grouped)
        combined = a2a.combine_finish(addend=addend)
    else:
        combined = a2a.combine(rows, layout=grouped, addend=addend)
    combined = combined.cpu().clone()
    rank.meet()
    return GroupedOutcome(fields, payloads, grouped.capacity, combined)


def flat(values: Tensor) -> Tensor:
    """[ep_size, max_rows, ...] as received to [max_rows * ep_size, ...]."""
    return values.transpose(0, 1).flatten(0, 1)


def check_grouped(case: Case, alignments: tuple[int, ...], outcomes: list[list[GroupedOutcome]]) -> None:
    """Compares the outcomes, indexed by rank and round, with the oracle; raises with the first difference."""
    ranks = range(case.ep_size)
    before: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
    for index, alignment in enumerate(alignments):
        sent = [case.sent(index, rank) for rank in ranks]
        max_rows = [case.max_rows_of(index, rank) for rank in ranks]
        table = case.table_of(index)
        routings, arrived = reference.dispatch(sent, table, max_rows=max_rows, active=case.active)
        summed = []
        for rank in ranks:
            got, came = outcomes[rank][index], arrived[rank]
            where = f"round {index} rank {rank}: "
            want = reference_moe.expert_major(came.topk_ids, came.topk_weights, came.num_tokens, table, rank, alignment)
            for name in FIELDS:
                require_same(where + name, got.fields[name], getattr(want, name))
            held = before.get((rank, alignment, max_rows[rank]))
            for i, payload in enumerate(came.payloads):
                old = torch.zeros_like(got.payloads[i]) if held is None else held[i]
                wanted = reference_moe.expand(flat(payload), want.source_rows, old)
                require_same(f"{where}payload {i}", got.payloads[i], wanted)
            before[rank, alignment, max_rows[rank]] = got.payloads
            rows = grouped_rows(case, index, rank, got.capacity)
            done = reference_moe.finalize(rows, want.positions, flat(came.topk_weights))
            summed.append(done.unflatten(0, (max_rows[rank], case.ep_size)).transpose(0, 1))
        for rank in ranks:
            wanted = reference.combine(
                routings[rank],
                summed,
                rank,
                case.addend(index, rank),
                combine_dtype=case.wire,
            )
            require_same(f"round {index} rank {rank}: combined", outcomes[rank][index].combined, wanted)
