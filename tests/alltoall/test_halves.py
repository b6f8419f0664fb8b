"""dispatch and combine in two halves: what may stand between them, and what is refused.

That halves give the same bits as whole calls is in test_wire.py and test_properties.py, next to everything else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import putget
from putget import _abi
from putget.tuning import ChosenLaunch, Launch, Tuning
from tests.harness import Rank, run_ranks
from tests.harness.cases import Case, Round
from tests.harness.compare import Outcome, check_round, play_round

CASE = Case(
    3,
    (Round(1, (3, 8, 0)), Round(2, (5, 1, 2), ending="flat")),
    num_experts=7,
    top_k=3,
    output=((32,), torch.bfloat16),
)
WIRES: dict[str, dict[str, Any]] = {
    "sent": {},
    "got": {"sentinel_rows": False},
    "quantised": {"wire": torch.float8_e4m3fn},
}
EVERY_WIRE = pytest.mark.parametrize("wire", WIRES)


def case_of(wire: str) -> Case:
    return replace(CASE, **WIRES[wire])


def arguments_of(rank: Rank, case: Case, index: int = 0) -> list[torch.Tensor]:
    sent = case.sent(index, rank.rank)
    return [tensor.to(rank.device) for tensor in (sent.topk_ids, sent.topk_weights, *sent.payloads)]


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except putget.ProtocolMisuse as error:
        return str(error)
    return "accepted"


def out_of_turn(rank: Rank, case: Case) -> tuple[dict[str, str], Outcome]:
    """A body: every wrong call at every point of two rounds, which must come out right all the same."""
    said: dict[str, str] = {}
    arguments, rows = arguments_of(rank, case), case.expert_rows(0, rank.rank).to(rank.device)
    with rank.all_to_all(**case.options()) as a2a:
        calls: dict[str, Callable[[], Any]] = {
            "dispatch": lambda: a2a.dispatch(*arguments),
            "dispatch_start": lambda: a2a.dispatch_start(*arguments),
            "dispatch_finish": a2a.dispatch_finish,
            "combine": a2a.combine,
            "combine_start": a2a.combine_start,
            "combine_finish": a2a.combine_finish,
            "release": a2a.release,
        }

        def refuse(when: str, *allowed: str) -> None:
            said.update({f"{name} {when}": refusal(call) for name, call in calls.items() if name not in allowed})

        refuse("at first", "dispatch", "dispatch_start", "release")
        rank.meet()
        a2a.dispatch_start(*arguments)
        refuse("after dispatch_start", "dispatch_finish")
        received = a2a.dispatch_finish()
        seen: dict[str, Any] = {
            "topk_ids": received.topk_ids.cpu().clone(),
            "topk_weights": received.topk_weights.cpu().clone(),
            "payloads": tuple(one.cpu().clone() for one in received.payloads),
            "num_tokens": received.num_tokens.cpu().clone(),
            "target_ranks": a2a.target_ranks.cpu().clone(),
            "target_slots": a2a.target_slots.cpu().clone(),
        }
        a2a.combine_input.copy_(rows)
        refuse("after dispatch_finish", "dispatch", "dispatch_start", "combine", "combine_start", "release")
        rank.meet()
        a2a.combine_start()
        refuse("after combine_start", "combine_finish")
        combined = a2a.combine_finish().cpu()
        refuse("after combine_finish", "dispatch", "dispatch_start", "release")
        a2a.check()
        return said, Outcome(**seen, invalid=0, combined=combined)


@EVERY_WIRE
def test_calls_out_of_turn_are_refused_and_harmless(wire: str, device: str) -> None:
    case = case_of(wire)
    results = run_ranks(3, out_of_turn, case, mode="thread", device=device)
    check_round(case, 0, {rank: outcome for rank, (_, outcome) in enumerate(results)})
    for said, _ in results:
        assert len(said) == 4 + 6 + 2 + 6 + 4
        assert {name: text for name, text in said.items() if not text.startswith(name.split()[0] + ": ")} == {}
        for name, text in said.items():
            call, _, when = name.partition(" after ")
            if when.endswith("_start") and not call.endswith("_finish"):
                assert when in text, (name, text)


def share(rank: Rank) -> tuple[dict[str, str], list[Outcome]]:
    """A body: two objects on one workspace, one of them between its halves."""
    first_case, second_case = CASE, replace(CASE, output=((48,), torch.float32))
    sizes = [putget.workspace_bytes(ep_size=3, **case.options()) for case in (first_case, second_case)]  # type: ignore[arg-type]
    workspace = putget.Workspace(rank.comm, max(sizes), device=rank.device, timeout_s=20, warmup_timeout_s=20)
    first, second = (rank.all_to_all(**case.options(), workspace=workspace) for case in (first_case, second_case))
    arguments = arguments_of(rank, CASE)
    said = {}
    rank.meet()
    first.dispatch_start(*arguments)
    for name, call in {
        "dispatch": lambda: second.dispatch(*arguments),
        "dispatch_start": lambda: second.dispatch_start(*arguments),
        "dispatch_finish": second.dispatch_finish,
        "combine": second.combine,
        "release": second.release,
        "AllToAll": lambda: rank.all_to_all(**CASE.options(), workspace=workspace),
    }.items():
        said[name] = refusal(call)
    first.dispatch_finish()
    said["combine of the other"] = refusal(second.combine)
    first.combine_start(CASE.expert_rows(0, rank.rank).to(rank.device))
    said["AllToAll in combine"] = refusal(lambda: rank.all_to_all(**CASE.options(), workspace=workspace))
    said["combine_finish of the other"] = refusal(second.combine_finish)
    second.set_active_ranks([True] * 3)
    # All is forgotten, for both objects.
    outcomes = [play_round(first, rank, first_case, 1), play_round(second, rank, second_case, 1)]
    for owner in (first, second, workspace):
        owner.close()
    return said, outcomes


def test_a_half_of_one_object_is_seen_by_the_others(device: str) -> None:
    results = run_ranks(3, share, mode="thread", device=device)
    for said, _ in results:
        assert "accepted" not in said.values()
        assert all("dispatch_start" in said[name] for name in ("dispatch", "combine", "release", "AllToAll"))
        assert "combine_start" in said["AllToAll in combine"]
    for which, case in enumerate((CASE, replace(CASE, output=((48,), torch.float32)))):
        check_round(case, 1, {rank: outcomes[which] for rank, (_, outcomes) in enumerate(results)})


def construct(rank: Rank, case: Case, made: list[Any]) -> None:
    """A body: keeps the object for the thread of the test."""
    made[rank.rank] = rank, rank.all_to_all(**case.options())


@EVERY_WIRE
def test_a_start_half_waits_for_nobody_and_a_finish_half_for_all_starts(wire: str) -> None:
    """One thread runs all ranks, half by half, in any order: any other wait would be for ever."""
    case = case_of(wire)
    made: list[Any] = [None] * 3
    comms = putget.Communicator.local(3)
    ranks = [Rank(index, 3, torch.device("cpu"), _comm=comm) for index, comm in enumerate(comms)]
    threads = [threading.Thread(target=construct, args=(rank, case, made)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for index in (0, 1):
        for rank, a2a in made:
            a2a.dispatch_start(*arguments_of(rank, case, index))
        for _, a2a in reversed(made):
            a2a.dispatch_finish()
        for rank, a2a in reversed(made):
            a2a.combine_start(case.expert_rows(index, rank.rank))
        combined = [a2a.combine_finish() for _, a2a in made]
        outcomes = run_ranks(3, play_one, case, index, mode="thread")
        for one, other in zip(combined, outcomes, strict=True):
            assert torch.equal(one, other.combined)
    for _, a2a in made:
        a2a.close()
    for comm in comms:
        comm.close()


def play_one(rank: Rank, case: Case, index: int) -> Outcome:
    """A body: one round, not in halves."""
    with rank.all_to_all(**case.options()) as a2a:
        return play_round(a2a, rank, case, index)


def tensors_are_free_after_a_half(rank: Rank, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """A body: what a half has read may change once it is over, and what it shows stays."""
    arguments, rows = arguments_of(rank, case), case.expert_rows(0, rank.rank).to(rank.device)
    with rank.all_to_all(**case.options()) as a2a:
        rank.meet()
        a2a.dispatch_start(*arguments)
        received = a2a.dispatch_finish()
        for tensor in arguments:
            tensor.zero_()
        payload = received.payloads[0].cpu().clone()
        a2a.combine_start(rows)
        out = torch.full((case.rounds[0].num_tokens[rank.rank], 32), 7, dtype=torch.bfloat16, device=rank.device)
        result = a2a.combine_finish(out=out, addend=torch.ones_like(out))
        assert result.data_ptr() == out.data_ptr()
        rows.zero_()
        a2a.check()
        return payload, out.cpu()


@EVERY_WIRE
def test_tensors_are_free_after_the_finish(wire: str, device: str) -> None:
    case = case_of(wire)
    plain = run_ranks(3, play_one, case, 0, mode="thread", device=device)
    for (payload, out), outcome in zip(
        run_ranks(3, tensors_are_free_after_a_half, case, mode="thread", device=device), plain, strict=True
    ):
        for src, count in enumerate(outcome.num_tokens.tolist()):
            assert torch.equal(payload[src, :count], outcome.payloads[0][src, :count])
        assert out.shape == outcome.combined.shape


# Native calls out of turn, as a replayed graph can make them without the host seeing it.


def replayed(rank: Rank, case: Case, what: str) -> tuple[str, Outcome]:
    """A body: rank 0 does something out of turn behind the host's back; then the ranks agree again."""
    arguments, rows = arguments_of(rank, case), case.expert_rows(0, rank.rank).to(rank.device)
    num_tokens = case.rounds[0].num_tokens[rank.rank]
    with rank.all_to_all(**case.options()) as a2a:
        native = a2a._native

        def start_dispatch() -> None:
            native.describe_dispatch(num_tokens, 8, ids_are_64bit=arguments[0].dtype == torch.int64)
            native.dispatch(_abi.START, tuple(arguments), None)

        def dispatch() -> None:
            start_dispatch()
            native.finish_dispatch()

        def combine(half: int) -> None:
            native.take_rows(None, (0, 0))
            native.take_out(torch.empty(num_tokens, 32, dtype=torch.bfloat16), None)
            native.combine(half)

        before, wrong = {
            "dispatch_start twice": (start_dispatch, start_dispatch),
            "dispatch_finish at first": (lambda: None, native.finish_dispatch),
            "dispatch_finish twice": (dispatch, native.finish_dispatch),
            "combine after dispatch_start": (
                lambda: (dispatch(), native.release(), start_dispatch()),
                lambda: combine(0),
            ),
            "combine_finish after dispatch": (dispatch, lambda: combine(_abi.FINISH)),
            "combine_start twice": (lambda: (dispatch(), combine(_abi.START)), lambda: combine(_abi.START)),
            "combine after combine_start": (lambda: (dispatch(), combine(_abi.START)), lambda: combine(_abi.BOTH)),
            "dispatch after combine_start": (lambda: (dispatch(), combine(_abi.START)), start_dispatch),
            "release after combine_start": (lambda: (dispatch(), combine(_abi.START)), native.release),
        }[what]
        before()
        a2a.combine_input.copy_(rows)
        said = refusal(wrong) if rank.rank == 0 else ""
        if rank.rank == 0:
            said = refusal(a2a.check) and said  # it stands until the ranks agree again
            assert refusal(lambda: a2a.dispatch(*arguments)) == said
        a2a.set_active_ranks([True] * 3)
        return said, play_round(a2a, rank, case, 1)


@EVERY_WIRE
@pytest.mark.parametrize(
    ("what", "word"),
    [
        ("dispatch_start twice", "not finished"),
        ("dispatch_finish at first", "no start half"),
        ("dispatch_finish twice", "no start half"),
        ("combine after dispatch_start", "no dispatch"),
        ("combine_finish after dispatch", "no start half"),
        ("combine_start twice", "not finished"),
        ("combine after combine_start", "not finished"),
        ("dispatch after combine_start", "not finished"),
        ("release after combine_start", "not finished"),
    ],
)
def test_what_the_host_does_not_see_is_a_fault(what: str, word: str, wire: str) -> None:
    case = case_of(wire)
    results = run_ranks(3, replayed, case, what, mode="thread")
    said = results[0][0]
    assert word in said, said
    assert said.startswith(what.split("_")[0].split()[0]), said
    check_round(case, 1, {rank: outcome for rank, (_, outcome) in enumerate(results)})


def launches(rank: Rank, options: dict[str, Any]) -> list[tuple[Launch, Launch]]:
    """A body: launches of several batches."""
    output = putget.Payload((7168,), torch.bfloat16)
    with rank.all_to_all(max_tokens_per_rank=512, output=output, **options) as a2a:
        return [a2a.launches(tokens) for tokens in (0, 1, 64, 512)]


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({}, [(1, 1)] * 4),
        ({"num_threads": 3}, [(1, 1), (1, 1), (1, 3), (1, 3)]),  # a row is 14 KiB; that of dispatch is 16 bytes
        (
            {"tuning": Tuning(dispatch=Launch(blocks=3), combine=Launch(threads=64))},
            [(3, 1)] * 4,
        ),
    ],
    ids=["one", "three", "tuned"],
)
def test_a_small_batch_wakes_fewer_threads(options: dict[str, Any], blocks: list[tuple[int, int]]) -> None:
    """Blocks are all of a launch that a CPU has, beside the kernel and how rows of combine come."""
    (found,) = run_ranks(1, launches, {"tuning": None, **options}, mode="thread")
    assert found == [
        (
            ChosenLaunch(blocks=dispatch, path="many chunks"),
            ChosenLaunch(blocks=combine, sentinel_rows=False, path="got rows, 2 a token"),
        )
        for dispatch, combine in blocks
    ]
