"""Objects that adapters share: sizes, workspaces that are kept and given back, and going on without a lost rank."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import putget
from putget.adapters import shared
from putget.adapters.flashinfer import MoeAlltoAll
from putget.adapters.flashinfer.layout import moe_a2a_active_rank_mask
from putget.adapters.rounds import unquantised_row
from putget.adapters.tensorrt_llm import FourPayloadAllToAll
from tests.adapters.layer import Layer, same_bits
from tests.harness import Rank, fresh_ranks, run_ranks

LAYER = Layer(num_tokens=(2, 1, 3), num_experts=6, top_k=2, no_expert=0.0)
TWO = Layer(num_tokens=(2, 3), num_experts=4, top_k=2, no_expert=0.0)


def alltoall(rank: Rank, layer: Layer) -> FourPayloadAllToAll:
    return FourPayloadAllToAll(
        rank.comm,
        layer.num_experts,
        layer.top_k,
        layer.max_tokens_per_rank,
        hidden_size=layer.hidden_size,
        device="cpu",
        timeout_s=3.0,
        warmup_timeout_s=20.0,
    )


def round_of(a2a: FourPayloadAllToAll, rank: Rank, layer: Layer) -> torch.Tensor:
    x, _, ids, weights = a2a.dispatch(*layer.rows(rank.rank), None, *layer.routes(rank.rank))
    return a2a.combine(layer.experts((x,), ids, weights, rank.rank))


def lose_a_rank(rank: Rank) -> tuple[int, ...]:
    """A body: rank 2 stays away after the first round; the others go on."""
    a2a = alltoall(rank, LAYER)
    assert same_bits(round_of(a2a, rank, LAYER), LAYER.expected(rank.rank))
    missing: tuple[int, ...] = ()
    if rank.rank != 2:
        with pytest.raises(putget.PeerTimeout) as caught:
            round_of(a2a, rank, LAYER)
        missing = caught.value.missing
        a2a.all_to_all.set_active_ranks([True, True, False])
        # All experts live on the survivors now.
        a2a.all_to_all.expert_to_rank = [0, 0, 1, 1, 0, 1]
        x, _, ids, _ = a2a.dispatch(*LAYER.rows(rank.rank), None, *LAYER.routes(rank.rank))
        mine = torch.isin(ids, torch.tensor([(0, 1, 4), (2, 3, 5)][rank.rank]))
        combined = a2a.combine((x.float() * mine.sum(1, keepdim=True)).bfloat16())
        assert torch.equal(combined, (LAYER.hidden(rank.rank).float() * LAYER.top_k).bfloat16())
    shared.close_shared(rank.comm)
    return missing


def test_survivors_go_on_without_a_lost_rank() -> None:
    # Processes of its own: their ranks are not at the same step any more.
    with fresh_ranks(3) as ranks:
        assert ranks.call(lose_a_rank) == {0: (2,), 1: (2,), 2: ()}


class Interrupted(Exception):
    """Raised by a handler of a signal."""


def interrupt(rank: Rank) -> None:
    """A body: a signal ends rank 0's wait in combine, which rank 1 does not come to; both go on."""
    a2a = alltoall(rank, TWO)
    assert same_bits(round_of(a2a, rank, TWO), TWO.expected(rank.rank))
    x, _, ids, weights = a2a.dispatch(*TWO.rows(rank.rank), None, *TWO.routes(rank.rank))
    if rank.rank == 0:

        def handler(*_: object) -> None:
            raise Interrupted

        def combine_beside_a_timer() -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.3)  # wherever it comes: rank 1 does not
            a2a.combine(TWO.experts((x,), ids, weights, rank.rank))

        before = signal.signal(signal.SIGALRM, handler)
        with pytest.raises(Interrupted):
            combine_beside_a_timer()
        signal.signal(signal.SIGALRM, before)
    assert a2a.all_to_all.recover() == (0, 1)
    assert same_bits(round_of(a2a, rank, TWO), TWO.expected(rank.rank))
    shared.close_shared(rank.comm)


def test_a_round_that_a_signal_ends_is_over_once_ranks_agree() -> None:
    with fresh_ranks(2) as ranks:
        ranks.call(interrupt)


def miss_in_a_half(rank: Rank) -> None:
    """A body: rank 0 misses rank 1 in the second half of a dispatch; both go on."""
    a2a = alltoall(rank, TWO)
    assert same_bits(round_of(a2a, rank, TWO), TWO.expected(rank.rank))
    (x,) = TWO.rows(rank.rank)
    if rank.rank == 0:
        a2a._rounds.dispatch_start(*TWO.routes(rank.rank), [x], names=["x"])
        with pytest.raises(putget.PeerTimeout):
            a2a._rounds.dispatch_finish()
    assert a2a.all_to_all.recover() == (0, 1)
    assert same_bits(round_of(a2a, rank, TWO), TWO.expected(rank.rank))
    shared.close_shared(rank.comm)


def test_a_half_that_misses_a_rank_ends_its_round() -> None:
    run_ranks(2, miss_in_a_half, mode="thread")


def keep_and_give_back(rank: Rank) -> None:
    """A body: one workspace per size and purpose, until it is given back."""
    device = torch.device("cpu")
    first = shared.shared_workspace(rank.comm, 1 << 20, device)
    assert shared.shared_workspace(rank.comm, 1 << 20, device) is first
    others = [
        shared.shared_workspace(rank.comm, 1 << 21, device),
        shared.shared_workspace(rank.comm, 1 << 20, device, share_by=1),
    ]
    assert len({id(first), *map(id, others)}) == 3
    assert shared.communicator_of(rank.comm) is rank.comm
    shared.close_shared(rank.comm)
    assert shared.shared_workspace(rank.comm, 1 << 20, device) is not first
    a2a = alltoall(rank, replace(LAYER, num_tokens=(1, 1)))
    shared.close_shared(rank.comm)
    with pytest.raises(ValueError, match="closed"):
        round_of(a2a, rank, replace(LAYER, num_tokens=(1, 1)))


def test_workspaces_are_kept_and_given_back() -> None:
    run_ranks(2, keep_and_give_back)


@pytest.mark.parametrize(
    ("row", "returned"),
    [
        (putget.Payload((64,), torch.bfloat16), putget.Payload((64,), torch.bfloat16)),
        (putget.Payload((64,), torch.float16), putget.Payload((64,), torch.float16)),
        (putget.Payload((64,), torch.float8_e4m3fn), putget.Payload((64,), torch.bfloat16)),
        (putget.Payload((32,), torch.uint8), putget.Payload((64,), torch.bfloat16)),
    ],
)
def test_rows_say_what_experts_return(row: putget.Payload, returned: putget.Payload) -> None:
    assert unquantised_row(row) == returned


@pytest.mark.parametrize("row", [putget.Payload((64,), torch.int32), putget.Payload((8, 8), torch.bfloat16)])
def test_rows_that_do_not_say_it_are_named(row: putget.Payload) -> None:
    with pytest.raises(ValueError, match="do not say what the experts return"):
        unquantised_row(row)


@pytest.mark.parametrize("dispatch_bytes", [0, True, 1.5])
def test_sizes_are_checked(dispatch_bytes: int) -> None:
    output = putget.Payload((64,), torch.bfloat16)
    with pytest.raises(ValueError, match="dispatch_bytes is"):
        shared.engine_workspace_bytes(ep_size=2, max_tokens_per_rank=4, dispatch_bytes=dispatch_bytes, output=output)


@pytest.mark.parametrize(
    ("device", "place"), [("cuda", "cuda:3"), ("cuda:1", "cuda:1"), ("cpu", "cpu"), (torch.device("cuda"), "cuda:3")]
)
def test_a_device_without_a_number_is_the_current_one(
    device: str | torch.device, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors name their device with its number, and are compared with it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert shared.place_of(device) == torch.device(place)


def memories() -> tuple[int, int]:
    """Descriptors and mappings of symmetric memory that this process holds."""
    links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:putget" in link for link in links), sum("memfd:putget" in line for line in maps)


def of_flashinfer(comm: putget.Communicator, x: torch.Tensor, ids: torch.Tensor) -> Callable[[], object]:
    layer = MoeAlltoAll(SimpleNamespace(moe_ep_size=1, moe_ep_rank=0), 4, 1, 2, hidden_size=16, comm=comm, device="cpu")

    def play() -> None:
        rows, _ = layer.dispatch(ids, [x, ids], 4)
        layer.combine(rows, 4)

    return play


def of_tensorrt_llm(comm: putget.Communicator, x: torch.Tensor, ids: torch.Tensor) -> Callable[[], object]:
    layer = FourPayloadAllToAll(comm, 2, 1, 4, hidden_size=16, device="cpu")

    def play() -> None:
        rows, *_ = layer.dispatch(x, None, ids, torch.ones(1, 1))
        layer.combine(rows)

    return play


@pytest.mark.parametrize("make", [of_flashinfer, of_tensorrt_llm])
def test_a_closed_communicator_gives_its_workspaces_back(make: Callable[..., Callable[[], object]]) -> None:
    """Engines that start anew in one process make a communicator each time."""
    x, ids = torch.ones(1, 16, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int32)
    before = memories()
    for _ in range(5):
        (comm,) = putget.Communicator.local(1)
        play = make(comm, x, ids)
        play()
        assert memories() > before
        comm.close()
        assert comm.is_closed
        assert memories() == before
        with pytest.raises(ValueError, match="closed"):
            play()


def test_the_number_of_payloads_is_named() -> None:
    (comm,) = putget.Communicator.local(1)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    layer = MoeAlltoAll(SimpleNamespace(moe_ep_size=1, moe_ep_rank=0), 4, 1, 2, hidden_size=16, comm=comm, device="cpu")
    for count in (0, 9):
        with pytest.raises(ValueError, match=f"input_payloads has {count} tensors, expected 1 to 8 payloads"):
            layer.dispatch(ids, [torch.ones(1, 1)] * count, 4)
    comm.close()


def differ(rank: Rank) -> list[str]:
    """A body: the ranks give other capacities, in the words of each adapter."""
    said = []
    mapping = SimpleNamespace(moe_ep_size=2, moe_ep_rank=rank.rank)
    for make in (
        lambda: MoeAlltoAll(mapping, 4 + rank.rank, 1, 2, hidden_size=16, comm=rank.comm, device="cpu"),
        lambda: MoeAlltoAll(mapping, 4, 1, 2, hidden_size=16 + 16 * rank.rank, comm=rank.comm, device="cpu"),
        lambda: FourPayloadAllToAll(rank.comm, 2, 1, 4 + rank.rank, hidden_size=16, device="cpu"),
    ):
        with pytest.raises(ValueError, match="differs between ranks") as caught:
            make()
        said.append(str(caught.value).partition(" differs")[0])
    return said


def test_arguments_that_differ_are_named() -> None:
    hidden = "workspace_size_per_rank (where it is None, by hidden_size and top_k)"
    assert run_ranks(2, differ) == [["max_num_tokens", hidden, "max_num_tokens_per_rank"]] * 2


def test_a_closed_communicator_leaves_the_workspaces_of_others() -> None:
    device = torch.device("cpu")
    (one,), (other,) = putget.Communicator.local(1), putget.Communicator.local(1)
    kept = shared.shared_workspace(other, 1 << 20, device)
    before = memories()
    shared.shared_workspace(one, 1 << 20, device)
    one.close()
    assert memories() == before
    kept.require_open()
    assert shared.shared_workspace(other, 1 << 20, device) is kept
    other.close()


def test_memory_that_moves_to_another_communicator_is_closed_with_that_one() -> None:
    before = memories()
    (first,), (second,) = putget.Communicator.local(1), putget.Communicator.local(1)
    kept = shared.shared_workspace(first, 1 << 20, torch.device("cpu"))
    kept.suspend()
    kept.resume(second)
    first.close()
    kept.require_open()
    assert shared.shared_workspace(second, 1 << 20, torch.device("cpu")) is kept
    second.close()
    assert memories() == before


def stop_while_ranks_change(rank: Rank, away: threading.Barrier) -> torch.Tensor | None:
    """A body: rank 1 is interrupted behind the agreement on a mask without rank 2; both ranks call again."""
    a2a = MoeAlltoAll(
        SimpleNamespace(moe_ep_size=3, moe_ep_rank=rank.rank),
        max_num_tokens=4,
        top_k=1,
        num_experts=3,
        hidden_size=8,
        enable_rank_mask=True,
        comm=rank.comm,
        device="cpu",
        timeout_s=3.0,
        warmup_timeout_s=20.0,
    )
    x, ids = torch.full((1, 8), 1.0 + rank.rank).bfloat16(), torch.tensor([[(1, 0, 2)[rank.rank]]], dtype=torch.int32)
    mask = moe_a2a_active_rank_mask([0, 1, 2], 3)
    (rows,) = a2a.dispatch(ids, [x], 4, active_rank_mask=mask)
    a2a.combine(rows.clone(), 4, active_rank_mask=mask)
    if rank.rank == 2:
        away.wait(60)
        return None

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    workspace = a2a._shared._workspace
    assert workspace is not None
    mask = moe_a2a_active_rank_mask([0, 1], 3)
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:
            patch.setattr(workspace, "_meet", stop)
        with pytest.raises((putget.PeerLeft, KeyboardInterrupt)):
            a2a.dispatch(ids, [x], 4, active_rank_mask=mask)
    (rows,) = a2a.dispatch(ids, [x], 4, active_rank_mask=mask)
    summed = a2a.combine(rows.clone(), 4, active_rank_mask=mask)
    away.wait(60)
    return summed


def test_a_mask_whose_agreement_has_failed_is_agreed_again() -> None:
    found = run_ranks(3, stop_while_ranks_change, threading.Barrier(3), mode="thread", timeout=60)
    assert [None if rows is None else rows.mean().item() for rows in found] == [1.0, 2.0, None]
