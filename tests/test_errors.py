"""Mistakes that no single call can see: misuse, ranks that disagree, capacity, objects that are closed."""

from __future__ import annotations

import pickle
import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import putget
from tests.harness import Rank, run_ranks
from tests.harness.cases import APART, SENTINEL, Case, Round
from tests.harness.compare import Outcome, check_round, play_round

CASE = Case(3, (Round(1, (3, 8, 0)), Round(2, (5, 1, 2))), num_experts=7, top_k=3)


def dispatch(a2a: putget.AllToAll, rank: Rank, case: Case, index: int, **options: Any) -> putget.Received:
    sent = case.sent(index, rank.rank)
    place = rank.device
    arguments = [tensor.to(place) for tensor in (sent.topk_ids, sent.topk_weights, *sent.payloads)]
    rank.meet()
    return a2a.dispatch(*arguments, **options)


def test_exceptions_have_one_root() -> None:
    for error in (
        putget.PeerTimeout,
        putget.CapacityExceeded,
        putget.ProtocolMisuse,
        putget.InvalidExpertIds,
        putget.BackendUnavailable,
    ):
        assert issubclass(error, putget.PutgetError)
    assert issubclass(putget.PutgetError, RuntimeError)
    assert issubclass(putget.InvalidExpertIds, ValueError)


@pytest.mark.parametrize(
    "error",
    [
        putget.PeerTimeout("combine", 3, 17, (1, 2)),
        putget.PeerTimeout("dispatch", 0, 4, (2, 5), 30.0, (5,)),
        putget.PeerTimeout("setup", 0, 0, (2, 5), 30.0, (5,), 1),
        putget.PeerLeft("setup", 0, 2, "AllToAll", "KeyboardInterrupt"),
        putget.CapacityExceeded(1, 8, 5, 2),
        putget.InvalidExpertIds(3, 8),
        putget.ProtocolMisuse("combine without dispatch"),
        putget.ExpertsLost((3, 4), (5,), (2,), 1.5),
        putget.ForkedChild(0, "AllToAll", 7, 8),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_survive_the_way_to_another_process(error: putget.PutgetError) -> None:
    """Engines run ranks in worker processes and send what they raise to the one that asked."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize(
    ("missing", "lost", "said"),
    [
        ((2,), (), "heard nothing from rank(s) 2 within 30 s"),
        ((5, 2), (), "heard nothing from rank(s) 2, 5 within 30 s"),
        ((5, 2), (5, 2), "has lost the connection to rank(s) 2, 5"),
        ((5, 2), (5,), "heard nothing from rank(s) 2 within 30 s and has lost the connection to rank(s) 5"),
    ],
)
def test_who_is_slow_and_who_is_gone(missing: tuple[int, ...], lost: tuple[int, ...], said: str) -> None:
    """A wait for a lost rank ends at once, so it says no time."""
    error = putget.PeerTimeout("dispatch", 0, 4, missing, 30.0, lost)
    assert str(error).startswith(f"dispatch, round 4: rank 0 {said}; ")
    assert str(putget.PeerTimeout("check", 0, 4, missing, 30.0, lost)) == f"check, round 4: rank 0 {said}"
    assert set(error.lost) <= set(error.missing) == set(missing)


@pytest.mark.parametrize(
    ("phase", "said"),
    [("setup", "call the same constructor again on all ranks"), ("set_active_ranks", "call it again, without those")],
)
def test_a_timeout_outside_of_rounds_says_what_to_call(phase: str, said: str) -> None:
    assert said in str(putget.PeerTimeout(phase, 0, 0, (1,), 3.0))


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_round_says_that_the_missing_ranks_are_no_mask(phase: str) -> None:
    assert "no mask of ranks: call recover()" in str(putget.PeerTimeout(phase, 0, 4, (2,), 30.0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_named_when_it_is_used() -> None:
    (comm,) = putget.Communicator.local(1)
    with pytest.raises(putget.BackendUnavailable, match=r"(?i)cuda|gpu|driver"):
        Rank(0, 1, torch.device("cuda"), _comm=comm).all_to_all()
    with pytest.raises(putget.BackendUnavailable, match='device="cpu" runs the same rounds'):
        putget.Workspace(comm, 1 << 20)
    # The communicator is as good as before.
    with Rank(0, 1, torch.device("cpu"), _comm=comm).all_to_all() as a2a:
        assert repr(a2a).startswith("AllToAll(rank 0 of 1 on cpu, ")
        assert "\n" not in repr(a2a)
    assert repr(a2a).endswith(", closed)")
    comm.close()


def misuse(rank: Rank) -> tuple[dict[str, str], Outcome]:
    """A body: every rank makes the same mistakes, then a good round."""
    messages: dict[str, str] = {}
    with rank.all_to_all(**CASE.options()) as a2a:

        def refused(name: str, call: Any) -> None:
            try:
                call()
                a2a.check()
            except putget.ProtocolMisuse as error:
                messages[name] = str(error)

        refused("first", a2a.combine)
        play_round(a2a, rank, CASE, 0)
        refused("twice", a2a.combine)
        dispatch(a2a, rank, CASE, 0)
        a2a.release()
        refused("released", a2a.combine)
        # To release what is not open is no mistake: an engine may do so on every path out of a layer.
        a2a.release()
        a2a.check()
        return messages, play_round(a2a, rank, CASE, 1)


def test_combine_without_a_round_is_refused_and_harmless(device: str) -> None:
    results = run_ranks(3, misuse, mode="thread", device=device)
    for messages, _ in results:
        assert set(messages) == {"first", "twice", "released"}
        assert all("dispatch" in message for message in messages.values())
    check_round(CASE, 1, {rank: outcome for rank, (_, outcome) in enumerate(results)})


def combine_after_peer_released(rank: Rank, flags: int) -> tuple[list[str], Outcome]:
    """A body: rank 1 releases what the others combine; what is said then, and by the next dispatch."""
    with rank.all_to_all(
        **CASE.options(), tuning=putget.tuning.Tuning(combine=putget.tuning.Launch(sentinel_rows=flags)), timeout_s=60.0
    ) as a2a:
        dispatch(a2a, rank, CASE, 0)
        rows = CASE.expert_rows(0, rank.rank).to(rank.device)
        messages = []
        for step in (
            lambda: a2a.release() if rank.rank == 1 else a2a.combine(rows),
            lambda: dispatch(a2a, rank, CASE, 1),
        ):
            messages.append("")
            try:
                step()
                a2a.check()
            except putget.ProtocolMisuse as error:
                messages[-1] = str(error)
        rank.meet()
        a2a.set_active_ranks([True] * 3)
        return messages, play_round(a2a, rank, CASE, 1)


@pytest.mark.parametrize("flags", [APART, SENTINEL])
def test_combine_of_a_round_that_a_peer_released(flags: int, device: str) -> None:
    """Found by whoever waits for that peer: in combine, or where none of its rows are needed, by the next dispatch.

    It comes before anything is put, since sentinel rows may lie where the next round's go.
    """
    began = time.monotonic()
    results = run_ranks(3, combine_after_peer_released, flags, mode="thread", device=device)
    assert time.monotonic() - began < 50  # nobody waits for the deadline
    needs = [flags == APART or CASE.needs(0, rank, 1) for rank in range(3)]
    assert (needs[0], needs[2]) == (True, flags == APART)
    for rank in (0, 2):
        in_combine, in_dispatch = results[rank][0]
        assert ("round 1: rank 1 ended this round without combine" in in_combine) == needs[rank]
        assert "round 1: rank 1 ended this round without combine" in in_dispatch
    assert results[1][0][0] == ""
    assert re.search("round 1: rank [02] combined this round, which ended here without", results[1][0][1])
    check_round(CASE, 1, {rank: outcome for rank, (_, outcome) in enumerate(results)})


def combine_a_round_of_another_object(rank: Rank) -> tuple[str, list[Outcome]]:
    """A body: the second object's dispatch ends the round of the first, whose combine then has nothing to combine."""
    needed = putget.workspace_bytes(ep_size=3, **CASE.options())  # type: ignore[arg-type]
    workspace = putget.Workspace(rank.comm, needed, device=rank.device)
    first, second = (rank.all_to_all(**CASE.options(), workspace=workspace) for _ in range(2))
    dispatch(first, rank, CASE, 0)
    dispatch(second, rank, CASE, 0)
    message = "accepted"
    try:
        first.combine(CASE.expert_rows(0, rank.rank).to(rank.device))
        first.check()
    except putget.ProtocolMisuse as error:
        message = str(error)
    first.set_active_ranks([True] * 3)
    outcomes = [play_round(a2a, rank, CASE, 1) for a2a in (first, second)]
    first.close()
    second.close()
    workspace.close()
    return message, outcomes


def test_combine_of_a_round_of_another_object(device: str) -> None:
    results = run_ranks(3, combine_a_round_of_another_object, mode="thread", device=device)
    assert all("dispatch" in message for message, _ in results)
    for which in range(2):
        check_round(CASE, 1, {rank: outcomes[which] for rank, (_, outcomes) in enumerate(results)})


def exceed(rank: Rank) -> tuple[list[Any], Outcome]:
    """A body: rank 0 allows five rows and rank 1 sends eight."""
    case = replace(CASE, table=(0,) * 7)
    with rank.all_to_all(**case.options()) as a2a:
        play_round(a2a, rank, case, 1)
        caught: list[Any] = []
        try:
            dispatch(a2a, rank, case, 0, max_rows=5 if rank.rank == 0 else None)
            a2a.check()
            a2a.release()
        except putget.CapacityExceeded as error:
            caught = [error.source, error.rows, error.max_rows, error.epoch, str(error)]
        a2a.set_active_ranks([True] * 3)
        return caught, play_round(a2a, rank, case, 1)


def test_more_rows_than_max_rows_is_reported(device: str) -> None:
    results = run_ranks(3, exceed, mode="thread", device=device)
    assert results[0][0][:4] == [1, 8, 5, 2]
    assert "8" in results[0][0][4]
    assert results[1][0] == results[2][0] == []
    check_round(replace(CASE, table=(0,) * 7), 1, {rank: outcome for rank, (_, outcome) in enumerate(results)})


def after_close(rank: Rank) -> dict[str, str]:
    a2a = rank.all_to_all(**CASE.options())
    play_round(a2a, rank, CASE, 0)
    a2a.close()
    a2a.close()
    messages = {}
    sent = CASE.sent(0, rank.rank)
    for name, call in {
        "dispatch": lambda: a2a.dispatch(sent.topk_ids, sent.topk_weights, *sent.payloads),
        "combine": a2a.combine,
        "release": a2a.release,
        "check": a2a.check,
        "set_active_ranks": lambda: a2a.set_active_ranks([True] * 3),
        "combine_input": lambda: a2a.combine_input,
    }.items():
        try:
            call()
        except (putget.PutgetError, ValueError) as error:
            messages[name] = str(error)
    return messages


def test_use_after_close_raises(device: str) -> None:
    for messages in run_ranks(3, after_close, mode="thread", device=device):
        for name in ("dispatch", "combine", "release", "check", "set_active_ranks", "combine_input"):
            assert "closed" in messages.get(name, "no error"), name


def close_in_an_open_round(rank: Rank) -> bool:
    with rank.all_to_all(**CASE.options()) as a2a:
        dispatch(a2a, rank, CASE, 0)
    with rank.all_to_all(**CASE.options()) as a2a:
        dispatch(a2a, rank, CASE, 0)
        if rank.rank == 0:
            a2a.release()
    return True


def test_close_ends_an_open_round(device: str) -> None:
    started = time.monotonic()
    assert all(run_ranks(3, close_in_an_open_round, mode="thread", device=device))
    assert time.monotonic() - started < 10


WIDE = putget.Payload((16,), torch.float32)
MISMATCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "num_experts": ("num_experts", {"num_experts": 9}),
    "top_k": ("top_k", {"top_k": 3}),
    "max_tokens_per_rank": ("max_tokens_per_rank", {"max_tokens_per_rank": 9}),
    "payload_shape": ("payloads", {"payloads": [putget.Payload((5,), torch.float32)]}),
    "payload_rank": ("payloads", {"payloads": [putget.Payload((2, 2), torch.float32)]}),
    "payload_dtype": ("payloads", {"payloads": [putget.Payload((4,), torch.int32)]}),
    "payload_count": ("payloads", {"payloads": [putget.Payload((4,), torch.float32)] * 2}),
    "output_shape": ("output", {"output": putget.Payload((5,), torch.float32)}),
    "output_dtype": ("output", {"output": putget.Payload((4,), torch.bfloat16)}),
    "combine_dtype": ("combine", {"combine_dtype": torch.float8_e4m3fn, "output": WIDE}),
}
# The arguments of the other ranks, where they are not the defaults.
AGREED: dict[str, dict[str, Any]] = {
    "combine_dtype": {"output": WIDE},
}


def disagree(rank: Rank, agreed: dict[str, Any], options: dict[str, Any]) -> tuple[str, float]:
    """A body: the last rank constructs with other options; then all agree."""
    started = time.monotonic()
    base: dict[str, Any] = {"num_experts": 8, **agreed}
    message = "accepted"
    try:
        rank.all_to_all(**{**base, **(options if rank.rank == rank.size - 1 else {})}).close()
    except ValueError as error:
        message = str(error)
    seconds = time.monotonic() - started
    with rank.all_to_all(**base) as a2a:
        a2a.check()
    return message, seconds


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_configuration_that_differs_is_named_on_all_ranks(name: str, device: str) -> None:
    field, options = MISMATCHES[name]
    mode = "process" if name == "top_k" else "thread"
    for message, seconds in run_ranks(3, disagree, AGREED.get(name, {}), options, mode=mode, device=device):
        assert message.startswith(f"{field} differs between ranks")
        assert "rank 2" in message
        assert seconds < 15  # the deadline is 20 s


BAD: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 33},
    "max_tokens_per_rank": {"max_tokens_per_rank": 0},
    "payloads": {"payloads": []},
    "output": {"output": putget.Payload((4,), torch.int32)},
}


def one_is_wrong(rank: Rank, options: dict[str, Any]) -> tuple[str, str, float]:
    """A body: rank 1 alone passes a wrong argument; then all are right."""
    started = time.monotonic()
    kind = message = "accepted"
    try:
        rank.all_to_all(**(options if rank.rank == 1 else {})).close()
    except (ValueError, putget.PutgetError) as error:
        kind, message = type(error).__name__, str(error)
    seconds = time.monotonic() - started
    with rank.all_to_all() as a2a:
        a2a.check()
    return kind, message, seconds


@pytest.mark.parametrize("mode", ["process", "thread"])
@pytest.mark.parametrize("name", BAD)
def test_one_ranks_wrong_argument_reaches_the_others_promptly(name: str, mode: str, device: str) -> None:
    results = run_ranks(3, one_is_wrong, BAD[name], mode=mode, device=device)
    assert results[1][0] == "ValueError"
    assert name in results[1][1]
    for rank in (0, 2):
        kind, message, seconds = results[rank]
        assert kind != "PeerTimeout"
        assert "rank 1" in message
        assert seconds < 15  # the deadline is 20 s


def disagree_on_workspace(rank: Rank) -> str:
    try:
        putget.Workspace(rank.comm, (1 + (rank.rank == 1)) << 20, device=rank.device).close()
    except ValueError as error:
        return str(error)
    return "accepted"


def test_workspaces_of_different_size_are_refused(device: str) -> None:
    for message in run_ranks(2, disagree_on_workspace, mode="thread", device=device):
        assert "num_bytes" in message
