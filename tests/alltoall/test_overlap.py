"""Tensors that share bytes with the workspace or with each other: refused by name, or the result is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import putget
from tests.alltoall.test_arguments import attempt
from tests.harness import Rank, run_ranks
from tests.harness.cases import APART, SENTINEL, Case, Round
from tests.harness.compare import Outcome, check_round, play_round

CASE = Case(
    2,
    (Round(1, (4, 4), ending="flat"), Round(2, (8, 8), out=True, addend=True)),
    num_experts=4,
    top_k=2,
    payloads=(((8,), torch.float32), ((8,), torch.bfloat16)),
    output=((8,), torch.float32),
)


def arguments(rank: Rank, index: int = 0) -> list[torch.Tensor]:
    sent = CASE.sent(index, rank.rank)
    return [tensor.to(rank.device) for tensor in (sent.topk_ids, sent.topk_weights, *sent.payloads)]


def over(memory: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """A tensor of this kind over other bytes."""
    flat = memory.view(torch.uint8).flatten()[offset : offset + like.nbytes]
    return flat.view(like.dtype).view(like.shape)


def workspace_bytes(a2a: putget.AllToAll) -> torch.Tensor:
    return a2a.workspace.memory.tensor()


def dispatch_from_the_workspace(rank: Rank) -> tuple[dict[str, str], list[Outcome]]:
    """A body: rank 0 dispatches tensors that lie in its workspace, one at a time; then all play a right round."""
    said, outcomes = {}, []
    names = ["topk_ids", "topk_weights", "payloads[0]", "payloads[1]"]
    needed = putget.workspace_bytes(ep_size=2, **CASE.options())  # type: ignore[arg-type]
    with (
        putget.Workspace(rank.comm, needed, rank.device) as workspace,
        rank.all_to_all(**CASE.options(), workspace=workspace) as other,
        rank.all_to_all(**CASE.options(), workspace=workspace) as a2a,
    ):
        places = {
            "the first byte": lambda like: over(workspace_bytes(a2a), like, 0),
            "the last byte": lambda like: over(workspace_bytes(a2a), like, needed - like.nbytes),
            "another object's combine_input": lambda like: over(other.combine_input.flat, like, 0),  # type: ignore[attr-defined]
        }
        for which, name in enumerate(names):
            for where, place in places.items():
                if rank.rank == 0:
                    given = arguments(rank)
                    given[which] = place(given[which])
                    said[f"{name}: {where}"] = attempt(lambda given=given: a2a.dispatch(*given))  # type: ignore[misc]
        if rank.rank == 0:
            number = over(workspace_bytes(a2a), torch.ones(1, dtype=torch.int32), 64)
            said["num_valid_tokens: "] = attempt(lambda: a2a.dispatch(*arguments(rank), num_valid_tokens=number))
        outcomes.append(play_round(a2a, rank, CASE, 0))
    return said, outcomes


def test_dispatch_refuses_what_lies_in_the_workspace(device: str) -> None:
    results = run_ranks(2, dispatch_from_the_workspace, mode="thread", device=device)
    assert len(results[0][0]) == 13
    for what, said in results[0][0].items():
        assert said.startswith("ValueError: " + what.split(":")[0]), (what, said)
        assert "workspace" in said, (what, said)
    check_round(CASE, 0, {rank: outcomes[0] for rank, (_, outcomes) in enumerate(results)})


def overlapping(a2a: putget.AllToAll, received: putget.Received, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Wrong combines of a round of four tokens, each begins with the name of the argument that is wrong."""
    rows = a2a.combine_input
    flat = rows.flat  # type: ignore[attr-defined]
    x = torch.zeros(2, 8, 8, device=device)
    out = torch.zeros(4, 8, device=device)
    both = torch.zeros(5, 8, device=device)
    wide = torch.zeros(2, 16, 8, device=device)
    return {
        "out: part of combine_input": lambda: a2a.combine(out=flat[:4]),
        "out: its last rows": lambda: a2a.combine(x, out=flat[-4:]),
        "out: received rows": lambda: a2a.combine(out=received.flat.payloads[0][:4]),
        "out: the first rows of x": lambda: a2a.combine(x, out=x[0, :4]),
        "out: the last rows of x": lambda: a2a.combine(x, out=x[1, 4:]),
        "out: between the rows of a strided x": lambda: a2a.combine(wide[:, ::2], out=wide[1, 8:12]),
        "out: one row behind addend": lambda: a2a.combine(x, out=both[1:], addend=both[:-1]),
        "out: one row before addend": lambda: a2a.combine(x, out=both[:-1], addend=both[1:]),
        "addend: part of combine_input": lambda: a2a.combine(x, out=out, addend=flat[:4]),
        "addend: received rows": lambda: a2a.combine(addend=received.flat.payloads[0][:4]),
        "x: combine_input in another order": lambda: a2a.combine(flat.view(2, 8, 8)),
        "x: combine_input one row on": lambda: a2a.combine(over(workspace_bytes(a2a), x, offset(a2a, flat) + 32)),
        "x: combine_input of one source for both": lambda: a2a.combine(rows[:1].expand(2, 8, 8)),
        "x: received rows in another order": lambda: a2a.combine(received.flat.payloads[0].view(2, 8, 8)),
        "x: received rows of one source for both": lambda: a2a.combine(received.payloads[0][:1].expand(2, 8, 8)),
        "x: control lines": lambda: a2a.combine(over(workspace_bytes(a2a), x, 0)),
    }


def offset(a2a: putget.AllToAll, tensor: torch.Tensor) -> int:
    return tensor.data_ptr() - workspace_bytes(a2a).data_ptr()


def combine_overlapping(rank: Rank) -> tuple[dict[str, str], Outcome]:
    """A body: rank 0 makes every wrong combine inside one round, which all ranks then end well."""
    said: dict[str, str] = {}
    with rank.all_to_all(**CASE.options()) as a2a:
        outcome = play_round(Interposed(a2a, rank, said), rank, CASE, 0)  # type: ignore[arg-type]
    return said, outcome


class Interposed:
    """An AllToAll whose combine makes the wrong calls first, on rank 0."""

    def __init__(self, a2a: putget.AllToAll, rank: Rank, said: dict[str, str]) -> None:
        self._a2a = a2a
        self._rank = rank
        self._said = said

    def __getattr__(self, name: str) -> Any:
        return getattr(self._a2a, name)

    def dispatch(self, *given: Any, **options: Any) -> putget.Received:
        self._received = self._a2a.dispatch(*given, **options)
        return self._received

    def combine(self, *given: Any, **options: Any) -> Any:
        if self._rank.rank == 0:
            for what, call in overlapping(self._a2a, self._received, self._rank.device).items():
                self._said[what] = attempt(call)
        return self._a2a.combine(*given, **options)


def test_combine_refuses_what_overlaps(device: str) -> None:
    results = run_ranks(2, combine_overlapping, mode="thread", device=device)
    assert len(results[0][0]) == 16
    for what, said in results[0][0].items():
        assert said.startswith("ValueError: " + what.split(":")[0] + " "), (what, said)
    check_round(CASE, 0, {rank: outcome for rank, (_, outcome) in enumerate(results)})


def combine_in_place(rank: Rank, options: dict[str, Any]) -> list[Outcome]:
    """A body: experts' rows stand where rows were received, and the result where the addend was."""
    outcomes = []
    with rank.all_to_all(**{**CASE.options(), **options}) as a2a:
        for turn in range(20):
            outcomes.append(play_round(InPlace(a2a, turn % 2 == 1), rank, CASE, turn % 2))  # type: ignore[arg-type]
    return outcomes


class InPlace:
    """An AllToAll whose rows for combine are written over the received ones of the same size."""

    def __init__(self, a2a: putget.AllToAll, in_halves: bool) -> None:
        self._a2a = a2a
        self._in_halves = in_halves

    def __getattr__(self, name: str) -> Any:
        return getattr(self._a2a, name)

    def dispatch(self, *given: Any, **options: Any) -> putget.Received:
        self._received = self._a2a.dispatch(*given, **options)
        return self._received

    def combine(self, x: Any = None, *, out: Any = None, addend: Any = None) -> Any:
        rows = self._a2a.combine_input.clone() if x is None else x.view(8, 2, 8).transpose(0, 1)
        self._received.payloads[0].copy_(rows)
        self._a2a.combine_input.fill_(77)
        if addend is not None:
            out.copy_(addend)
            addend = out
        if self._in_halves:
            self._a2a.combine_start(self._received.payloads[0])
            return self._a2a.combine_finish(out=out, addend=addend)
        return self._a2a.combine(self._received.flat.payloads[0], out=out, addend=addend)


@pytest.mark.parametrize("flags", [APART, SENTINEL])
def test_experts_may_work_in_place(flags: int, device: str) -> None:
    """Each source overwrites its own rows only when it has them all back."""
    options = {"tuning": putget.tuning.Tuning(combine=putget.tuning.Launch(sentinel_rows=flags))}
    results = run_ranks(2, combine_in_place, options, device=device)
    for turn in range(20):
        check_round(CASE, turn % 2, {rank: outcomes[turn] for rank, outcomes in enumerate(results)})


def combine_own_input(rank: Rank) -> list[str]:
    """A body: views of combine_input in its own order, whatever strides they have where there is one row."""
    said = []
    for max_rows in (None, 1):
        with rank.all_to_all(num_experts=2) as a2a:
            for how in (lambda rows: rows, lambda rows: rows.flat, lambda rows: rows.flat.view(rows.shape)):
                if rank.size > 1 and max_rows is None:
                    continue
                ids = torch.zeros(1, 2, dtype=torch.int32, device=rank.device)
                ones = torch.ones(1, 4, device=rank.device)
                ids[:, 1] = -1
                if rank.rank != 0:
                    ids, ones = ids[:0], ones[:0]
                a2a.dispatch(ids, ones[:, :2].contiguous(), ones, max_rows=max_rows)
                a2a.combine_input.fill_(3)
                said.append(str(a2a.combine(how(a2a.combine_input)).tolist()))
    return said


def test_views_of_combine_input_in_its_order_are_combine_input(device: str) -> None:
    (said,) = run_ranks(1, combine_own_input, mode="thread", device=device)
    assert said == [str([[3.0] * 4])] * 6
    results = run_ranks(2, combine_own_input, mode="thread", device=device)
    assert results == [[str([[3.0] * 4])] * 3, ["[]"] * 3]


def combine_with_grad(rank: Rank) -> dict[str, str]:
    (x, out) = (torch.zeros(8, 4, device=rank.device), torch.zeros(1, 4, device=rank.device))
    ids = torch.zeros(1, 2, dtype=torch.int32, device=rank.device)
    said = {}
    with rank.all_to_all() as a2a:
        received = a2a.dispatch(ids, torch.ones(1, 2, device=rank.device), out)
        grouped = received.expert_major()
        parameter = out.clone().requires_grad_()
        rows = x.clone().requires_grad_() * 2
        capacity = torch.zeros(grouped.capacity, 4, device=rank.device).requires_grad_()
        said["out"] = attempt(lambda: a2a.combine(out=parameter))
        said["x"] = attempt(lambda: a2a.combine(rows))
        said["x in a layout"] = attempt(lambda: a2a.combine(capacity, layout=grouped))
        said["x of a start half"] = attempt(lambda: a2a.combine_start(rows))
        with torch.no_grad():
            said["nothing"] = str(a2a.combine(rows, out=parameter).tolist())
    return said


def test_what_requires_grad_is_refused(device: str) -> None:
    (said,) = run_ranks(1, combine_with_grad, mode="thread", device=device)
    assert said.pop("nothing") == str([[0.0] * 4])
    assert len(said) == 4
    for what, words in said.items():
        assert words.startswith(f"ValueError: {what.split()[0]} requires grad"), (what, words)


class OverStarted(InPlace):
    """An AllToAll whose result lies where the rows of its start half lay."""

    def combine(self, x: Any = None, *, out: Any = None, addend: Any = None) -> Any:
        rows = (self._a2a.combine_input if x is None else x).clone()
        self._a2a.combine_start(rows)
        rows.fill_(77)
        memory = over(rows, torch.empty(self._a2a.target_ranks.shape[0], 8, device=rows.device), 0)
        if addend is not None:
            addend = memory.copy_(addend)
        result = self._a2a.combine_finish(out=memory, addend=addend)
        return result if out is None else out.copy_(result)


def combine_over_started(rank: Rank, options: dict[str, Any]) -> list[Outcome]:
    with rank.all_to_all(**{**CASE.options(), **options}) as a2a:
        player: Any = OverStarted(a2a, True)
        return [play_round(player, rank, CASE, turn % 2) for turn in range(20)]


@pytest.mark.parametrize("flags", [APART, SENTINEL])
def test_rows_of_a_start_half_have_been_taken_when_it_returns(flags: int, device: str) -> None:
    """An allocator may hand out their memory for the result. (It did, by chance, and the result was refused.)"""
    options = {"tuning": putget.tuning.Tuning(combine=putget.tuning.Launch(sentinel_rows=flags))}
    results = run_ranks(2, combine_over_started, options, device=device)
    for turn in range(20):
        check_round(CASE, turn % 2, {rank: outcomes[turn] for rank, outcomes in enumerate(results)})
