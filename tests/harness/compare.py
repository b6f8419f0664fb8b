"""Plays a case on one rank, and holds what came out against the oracle."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import putget
from putget import reference
from tests.harness.cases import COMBINE, DISPATCH, Case
from tests.harness.rank import Rank


@dataclass(frozen=True)
class Outcome:
    """One rank's view of one round, copied to the CPU.

    Attributes:
        invalid: the count that check() raised, 0 if it did not.
        combined: the result of combine, None if the round ended without it.
        expert_load: what dispatch has counted; None where it was not asked.
        stats: every rank's numbers, None without.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    payloads: tuple[Tensor, ...]
    num_tokens: Tensor
    target_ranks: Tensor
    target_slots: Tensor
    invalid: int
    combined: Tensor | None
    expert_load: Tensor | None = None
    stats: Tensor | None = None


def play(rank: Rank, case: Case, check: bool = True) -> list[Outcome]:
    """A body: constructs the AllToAll of a case and plays its rounds."""
    with rank.all_to_all(**case.options()) as a2a:
        outcomes = play_on(a2a, rank, case, check)
        rank.wait()
        rank.meet()  # memory that goes may wait for all kernels of the GPU, and others' for what this rank still does
    return outcomes


def play_on(a2a: putget.AllToAll, rank: Rank, case: Case, check: bool = True) -> list[Outcome]:
    """Plays the rounds of a case on an object that is already there."""
    return [play_round(a2a, rank, case, index, check) for index in range(len(case.rounds))]


def play_round(a2a: putget.AllToAll, rank: Rank, case: Case, index: int, check: bool = True) -> Outcome:
    """One round: dispatch, snapshot, expert rows, and the ending that the round asks for."""
    played = case.rounds[index]
    sent = case.sent(index, rank.rank)
    if played.table is not None:
        a2a.expert_to_rank.copy_(torch.tensor(played.table, dtype=torch.int32))
    num_valid = None
    if sent.num_valid_tokens is not None:
        num_valid = torch.tensor([sent.num_valid_tokens], dtype=torch.int32, device=rank.device)
    arguments = [tensor.to(rank.device) for tensor in (sent.topk_ids, sent.topk_weights, *sent.payloads)]
    end = _prepare_end(a2a, rank, case, index)
    rank.meet()
    max_rows = None if played.max_rows is None else played.max_rows[rank.rank]
    before = torch.arange(case.num_experts, dtype=torch.int32)
    load = before.to(rank.device, copy=True)
    beside = {"max_rows": max_rows, "num_valid_tokens": num_valid, "expert_load": load}
    numbers = case.stats(index, rank.rank)
    if numbers is not None:
        beside["stats"] = numbers.to(rank.device)
    if played.in_halves(rank.rank, DISPATCH):
        a2a.dispatch_start(*arguments, **beside)
        received = a2a.dispatch_finish()
    else:
        received = a2a.dispatch(*arguments, **beside)
    _check_views(received, a2a, case, case.max_rows_of(index, rank.rank))
    rank.wait()
    seen = {
        "topk_ids": received.topk_ids.cpu().clone(),
        "topk_weights": received.topk_weights.cpu().clone(),
        "payloads": tuple(rows.cpu().clone() for rows in received.payloads),
        "num_tokens": received.num_tokens.cpu().clone(),
        "target_ranks": a2a.target_ranks.cpu().clone(),
        "target_slots": a2a.target_slots.cpu().clone(),
        "expert_load": load.cpu() - before,
        "stats": None if received.stats is None else received.stats.cpu().clone(),
    }
    rank.meet()
    combined = end()
    invalid = 0
    if check:
        try:
            a2a.check()
        except putget.InvalidExpertIds as error:
            invalid = error.count
            a2a.check()
    return Outcome(**seen, invalid=invalid, combined=combined)  # type: ignore[arg-type]


def _prepare_end(a2a: putget.AllToAll, rank: Rank, case: Case, index: int) -> Callable[[], Tensor | None]:
    """Makes what the end of the round needs, and returns how to end it."""
    played = case.rounds[index]
    if played.ending == "open":
        return lambda: None
    if played.ending == "release":
        return a2a.release
    rows = case.expert_rows(index, rank.rank).to(rank.device)
    slot_major = rows.transpose(0, 1).flatten(0, 1)
    x = None
    if played.ending == "flat":
        x = slot_major
    elif played.ending == "transposed":
        x = rows.transpose(0, 1).contiguous().transpose(0, 1)
    elif played.ending == "strided":
        x = torch.full((rows.shape[0] + 1, rows.shape[1] + 3, *rows.shape[2:]), 99, device=rank.device).to(rows.dtype)
        x = x[1:, 2 : 2 + rows.shape[1]]
        x.copy_(rows)
    out = None
    if played.out:
        shape, dtype = case.output
        out = torch.full((played.num_tokens[rank.rank], *shape), 77, device=rank.device).to(dtype)
    addend = case.addend(index, rank.rank)
    if addend is not None:
        addend = addend.to(rank.device)

    def end() -> Tensor:
        if played.ending == "zero_copy":
            a2a.combine_input.copy_(rows)
        elif played.ending == "zero_copy_flat":
            a2a.combine_input.flat.copy_(slot_major)
        if played.in_halves(rank.rank, COMBINE):
            a2a.combine_start(x)
            combined = a2a.combine_finish(out=out, addend=addend)
        else:
            combined = a2a.combine(x, out=out, addend=addend)
        if out is not None and combined.data_ptr() != out.data_ptr():
            raise AssertionError("combine(out=) returned another tensor")
        rank.wait()
        return combined.cpu().clone()

    return end


def _check_views(received: putget.Received, a2a: putget.AllToAll, case: Case, max_rows: int) -> None:
    """Shapes, dtypes, and that the flat and the source-major views are the same memory."""
    pairs = [(received.topk_ids, received.flat.topk_ids, ((case.top_k,), torch.int32))]
    pairs += [(received.topk_weights, received.flat.topk_weights, ((case.top_k,), torch.float32))]
    pairs += list(zip(received.payloads, received.flat.payloads, case.payloads, strict=True))
    pairs += [(a2a.combine_input, a2a.combine_input.flat, case.output)]
    for view, flat, (shape, dtype) in pairs:
        problems = [
            view.shape != (case.ep_size, max_rows, *shape),
            flat.shape != (max_rows * case.ep_size, *shape),
            view.dtype != dtype or flat.dtype != dtype,
            not flat.is_contiguous(),
            view.data_ptr() != flat.data_ptr(),
            max_rows > 1 and case.ep_size > 1 and view.stride()[:2] != (flat.stride(0), flat.stride(0) * case.ep_size),
        ]
        if any(problems):
            raise AssertionError(
                f"views: {problems} {view.shape} {view.stride()} {view.dtype} {flat.shape} {flat.dtype}"
            )
    if received.num_tokens.shape != (case.ep_size,) or received.num_tokens.dtype != torch.int32:
        raise AssertionError(f"num_tokens: {received.num_tokens.shape} {received.num_tokens.dtype}")


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Equal shape, dtype and bytes."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    return bool(torch.equal(_bytes(got), _bytes(want)))


def _bytes(tensor: Tensor) -> Tensor:
    # A new tensor has unit stride also where it holds one element, which contiguous() leaves alone.
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def check_case(case: Case, outcomes: list[list[Outcome]], check: bool = True) -> None:
    """Compares the outcomes, indexed by rank and round, with the oracle; raises with the first difference."""
    for index in range(len(case.rounds)):
        check_round(case, index, {rank: rounds[index] for rank, rounds in enumerate(outcomes)}, check)


@functools.lru_cache(maxsize=16)
def _expected(case: Case, index: int) -> tuple[list[reference.Routing], list[reference.Arrived], list[Tensor]]:
    """Routings, what every rank must hold, and the experts' rows; tests that repeat a round ask again and again."""
    ranks = range(case.ep_size)
    sent = [case.sent(index, rank) for rank in ranks]
    max_rows = [case.max_rows_of(index, rank) for rank in ranks]
    routings, arrived = reference.dispatch(sent, case.table_of(index), max_rows=max_rows, active=case.active)
    return routings, arrived, [case.expert_rows(index, rank) for rank in ranks]


def check_round(case: Case, index: int, outcomes: dict[int, Outcome], check: bool = True) -> None:
    """Compares one round of the ranks that took part in it."""
    routings, arrived, rows = _expected(case, index)
    for rank, got in outcomes.items():
        want = arrived[rank]
        where = f"round {index} rank {rank}: "
        require_same(where + "target_ranks", got.target_ranks, routings[rank].target_ranks)
        require_same(where + "target_slots", got.target_slots, routings[rank].target_slots)
        if got.expert_load is not None:
            require_same(where + "expert_load", got.expert_load, routings[rank].expert_load)
        if (got.stats is None) != (case.num_stats == 0):
            raise AssertionError(f"{where}stats: {got.stats}")
        if got.stats is not None:
            require_same(where + "stats", got.stats, case.told(index))
        require_same(where + "num_tokens", got.num_tokens, want.num_tokens)
        require_same(where + "topk_ids", got.topk_ids, want.topk_ids)
        for src, count in enumerate(want.num_tokens.tolist()):
            here = f"{where}source {src} "
            require_same(here + "topk_weights", got.topk_weights[src, :count], want.topk_weights[src, :count])
            for i, (held, wanted) in enumerate(zip(got.payloads, want.payloads, strict=True)):
                require_same(f"{here}payload {i}", held[src, :count], wanted[src, :count])
        if check and got.invalid != routings[rank].num_invalid:
            raise AssertionError(f"{where}check() counted {got.invalid} ids, not {routings[rank].num_invalid}")
        if got.combined is not None:
            wanted = reference.combine(
                routings[rank],
                rows,
                rank,
                case.addend(index, rank),
                combine_dtype=case.wire,
                domain_of=case.domain_of,
            )
            require_same(where + "combined", got.combined, wanted)


def require_same(name: str, got: Tensor, want: Tensor) -> None:
    """Raises with the first difference unless the bits are equal."""
    if same_bits(got, want):
        return
    message = f"{name}: got {tuple(got.shape)} {got.dtype}, want {tuple(want.shape)} {want.dtype}"
    if got.shape == want.shape and got.dtype == want.dtype:
        itemsize = got.dtype.itemsize
        differ = (_bytes(got) != _bytes(want)).nonzero()[:, 0] // itemsize
        first = int(differ[0])
        with contextlib.suppress(RuntimeError):
            message += (
                f", at flat index {first} of {got.numel()}: {got.reshape(-1)[first]} != {want.reshape(-1)[first]}"
            )
        message += f", {len(differ.unique())} elements differ"
    raise AssertionError(message)
