"""Slots of experts: one mover has them at a time, and each says which expert in which version is in force."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import putget
from putget.balancer import Landing, Move
from putget.experts import ExpertBlobs, ExpertSlots, HostStore, SlotState
from tests.harness import Rank, run_ranks


def slots_of(experts: list[list[int]], **options: Any) -> ExpertSlots:
    return ExpertSlots([ExpertBlobs({"w": torch.zeros(len(one), 8)}) for one in experts], experts, **options)


def test_one_mover_has_the_slots() -> None:
    slots = slots_of([[3, 0]])
    assert slots.mover is None
    assert slots.take("moves") is None
    assert slots.take("moves") is None, "a mover keeps what it has"
    assert slots.take("an update") == "moves"
    assert slots.mover == "moves"
    slots.give_back("moves", moved=True)
    assert slots.take("an update") is None
    assert slots.moved == 1
    slots.give_back("an update")
    assert (slots.moved, slots.mover) == (1, None)


def test_of_many_threads_one_gets_the_slots() -> None:
    slots = slots_of([[0]])
    start = threading.Barrier(8)
    said: list[str | None] = []

    def take(name: str) -> None:
        start.wait(20)
        said.append(slots.take(name))

    for _ in range(50):
        said.clear()
        threads = [threading.Thread(target=take, args=(str(number),)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert slots.mover is not None
        assert sorted(said, key=str) == [slots.mover] * 7 + [None]
        slots.give_back(slots.mover)


def test_two_movers_of_one_name_are_two() -> None:
    slots = slots_of([[0, 1]])
    with landing_of(slots) as one, landing_of(slots) as other:
        assert one.hold_slots() is None
        assert other.hold_slots() == "a balancer's moves"
        one.progress()
        assert other.hold_slots() is None


def test_a_mover_without_the_slots_changes_nothing() -> None:
    slots = slots_of([[3, 0]], version=4)
    for holder in (None, "moves"):
        if holder:
            slots.take(holder)
        with pytest.raises(ValueError, match=f"put_in_force: 'an update' came; {holder!r} has the slots"):
            slots.put_in_force("an update", 5)
        with pytest.raises(ValueError, match=f"give_back: 'an update' came; {holder!r} has the slots"):
            slots.give_back("an update")
    assert slots.versions() == (4,)
    assert slots.mover == "moves"


def test_versions_come_into_force() -> None:
    slots = slots_of([[3, -1], [0, 1]], version=4)
    assert slots.in_force(0, 0) == SlotState(3, 4)
    assert slots.experts(1) == [0, 1]
    slots.take("an update")
    slots.put_in_force("an update", None)
    assert slots.in_force(1, 1) == SlotState(1, -1)
    slots.put_in_force("an update", 7)
    assert slots.in_force(1, 1) == SlotState(1, 7)
    assert slots.in_force(0, 1).expert == -1
    assert slots.versions() == (7,)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("experts has [1] slots in its layers; layers has [2]", lambda: ExpertSlots(slots_of([[0, 1]]).layers, [[0]])),
        ("experts has [] slots in its layers; layers has []", lambda: slots_of([])),
        ("version is -1", lambda: slots_of([[0]], version=-1)),
        ("layer is 1", lambda: slots_of([[0]]).in_force(1, 0)),
        ("slot is 1", lambda: slots_of([[0]]).in_force(0, 1)),
        ("putget: expert and version is there already", lambda: ExpertSlots(slots_of([[0]]).layers, [[0]])),
    ],
)
def test_wrong_arguments_are_refused(message: str, call: Any) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_a_landing_takes_the_layers_of_its_slots() -> None:
    (comm,) = putget.Communicator.local(1)
    slots = slots_of([[0, 1]])
    with pytest.raises(ValueError, match="layers are not those of slots"):
        Landing(comm, [ExpertBlobs({"w": torch.zeros(2, 8)})], device="cpu", slots=slots)


def test_a_store_keeps_the_version_of_what_it_saved() -> None:
    (comm,) = putget.Communicator.local(1)
    slots = slots_of([[3, 0]], version=4)
    with HostStore(comm, [slots.layers[0].slot_bytes], num_experts=4) as store:
        store.save(0, 3, slots.layers[0], 0)
        slots.take("an update")
        slots.put_in_force("an update", 5)
        store.load(0, 3, slots.layers[0], 1)
    assert [slots.in_force(0, slot) for slot in (0, 1)] == [SlotState(3, 5), SlotState(3, 4)]


def landing_of(slots: ExpertSlots) -> Landing:
    (comm,) = putget.Communicator.local(1)
    return Landing(comm, slots.layers, device="cpu", timeout_s=20.0, slots=slots)


def test_slots_stay_with_a_balancer_while_ranks_are_left_out() -> None:
    """Until all of it is over, and whether it ends well or not."""
    slots = slots_of([[3, 0]])
    with landing_of(slots) as landing:
        assert landing.hold_slots() is None
        with landing.moving():
            landing.set_active_ranks([True])
            assert slots.mover == "a balancer's moves"
            assert slots.moved == 0
        assert [slots.mover, slots.moved] == [None, 1]
        assert landing.hold_slots() is None
        landing.release_slots()
        assert [slots.mover, slots.moved] == [None, 1]
        assert landing.hold_slots() is None
        with pytest.raises(KeyError), landing.moving():
            raise KeyError
        assert [slots.mover, slots.moved] == [None, 2]


def test_slots_come_back_from_a_landing_that_fails_or_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = slots_of([[3, 0]])
    landing = landing_of(slots)
    assert landing.hold_slots() is None

    def fails(_: Any) -> None:
        raise putget.PutgetError("rank 1 did not come")

    monkeypatch.setattr(landing._workspace, "set_active_ranks", fails)
    with pytest.raises(putget.PutgetError, match="did not come"):
        landing.set_active_ranks([True])
    landing.close()
    assert slots.mover is None
    landing = landing_of(slots)
    assert landing.hold_slots() is None
    with pytest.warns(ResourceWarning, match="dropped without close"):
        del landing
    assert slots.mover is None


def test_slots_stay_while_a_batch_is_open_that_may_still_be_taken() -> None:
    slots = slots_of([[3, 0]])
    with landing_of(slots) as landing:
        assert landing.hold_slots() is None
        assert landing.post([])
        with pytest.raises(KeyError), landing.moving():
            raise KeyError
        assert slots.mover == "a balancer's moves"
        landing.release_slots()
        assert slots.mover == "a balancer's moves"
        while landing.progress().agreed != 1:
            landing.move()
            landing.take(landing.landed)
        assert [slots.mover, slots.moved] == [None, 1]


def test_slots_come_back_from_a_landing_that_failed_and_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = slots_of([[3, 0]])
    landing = landing_of(slots)
    assert landing.hold_slots() is None

    def fails() -> None:
        raise putget.PutgetError("rank 1 did not come")

    monkeypatch.setattr(landing, "_start", fails)
    with pytest.raises(putget.PutgetError, match="did not come"), landing.moving():
        landing.set_active_ranks([True])
    monkeypatch.undo()
    assert slots.mover is None
    assert landing.hold_slots() is None
    with pytest.warns(ResourceWarning, match="dropped without close"):
        del landing
    assert slots.mover is None


@pytest.mark.parametrize("expert", [-2, 1.9, True, None])
def test_an_expert_is_a_number_or_none(expert: Any) -> None:
    with pytest.raises(ValueError, match="experts"):
        slots_of([[0, expert]])


def move_beside_an_update(rank: Rank) -> list[Any]:
    """A body: experts 0 and 1 are on rank 0, 2 and 3 on rank 1. Rank 0 is in an update when expert 0 shall move."""
    first = 2 * rank.rank
    w = torch.full((2, 8), float(rank.rank), device=rank.device)
    slots = ExpertSlots([ExpertBlobs({"w": w})], [[first, first + 1]], version=4)
    landing = Landing(rank.comm, slots.layers, device=rank.device, timeout_s=20.0, slots=slots)

    def turn() -> int:
        landing.move()
        rank.wait()
        said = rank.comm.exchange("landed", int(landing.landed.cpu()), 20.0)
        landing.take(torch.tensor([min(said.values())], dtype=torch.int32, device=rank.device))
        rank.wait()
        return landing.progress().agreed

    if rank.rank == 0:
        assert slots.take("an update") is None
    moves = [Move(0, 0, 0, 1, 1)]
    said: list[Any] = [landing.post(moves)]
    said += [max(turn() for _ in range(6)), slots.mover, slots.in_force(0, 1)]
    if rank.rank == 0:
        w.fill_(9.0)
        slots.put_in_force("an update", 5)
        slots.give_back("an update")
        said.append(landing.post(moves))
    while turn() < 1:
        pass
    said += [slots.mover, slots.moved, slots.in_force(0, 1), w[1, 0].item()]
    assert landing.post([])  # a batch without moves does not need the slots
    assert slots.mover is None
    landing.post([Move(0, 1, 0, 0, 0)])
    said.append(slots.mover)
    landing.close()
    said.append(slots.mover)
    return said


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_move_waits_for_an_update_and_brings_its_version(mode: str, device: str) -> None:
    sender, receiver = run_ranks(2, move_beside_an_update, mode=mode, device=device)
    moves = "a balancer's moves"
    assert sender == [False, 0, "an update", (1, 4), True, None, 1, (1, 5), 9.0, moves, None]
    assert receiver == [True, 0, moves, (3, 4), None, 1, (0, 5), 9.0, moves, None]
