"""The host store: experts of all ranks in shared memory, whole or refused, also when a rank dies; nothing leaks."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import putget
from putget.balancer import ExpertBlobs, HostStore, host_settings
from putget.experts.store_layout import RECORD_BYTES, StoreLayout
from putget.memory import host_memory
from tests.harness import Rank, RankError, fresh_ranks, run_ranks
from tests.harness.processes import thread_states

EXPERTS, LAYERS, RANKS = 10, 3, 4


def blobs_of(num_slots: int, layer: int, device: torch.device | str = "cpu") -> tuple[ExpertBlobs, dict[str, Any]]:
    """Experts of a layer: layers have other sizes."""
    tensors = {
        "gate_up": torch.zeros(num_slots, 6 + layer, 50, dtype=torch.bfloat16, device=device),
        "down": torch.zeros(num_slots, 33, dtype=torch.uint8, device=device),
        "scales": torch.zeros(num_slots, 1, device=device),
    }
    return ExpertBlobs(tensors), tensors


SIZES = [blobs_of(1, layer)[0].slot_bytes for layer in range(LAYERS)]


def fill(tensors: dict[str, Any], slot: int, layer: int, expert: int) -> None:
    tensors["gate_up"][slot] = expert + 0.5
    tensors["down"][slot] = layer * 20 + expert
    tensors["scales"][slot] = -expert


def packed(layer: int, expert: int) -> torch.Tensor:
    blobs, tensors = blobs_of(1, layer)
    fill(tensors, 0, layer, expert)
    return blobs.pack(0)


def save_own(store: HostStore, rank: int, size: int) -> None:
    """Each expert is saved by a rank that has no part in common with it."""
    for layer in range(LAYERS):
        for expert in range(rank, EXPERTS, size):
            blobs, tensors = blobs_of(2, layer)
            fill(tensors, 1, layer, expert)
            store.save(layer, expert, blobs, 1)


def meet(rank: Rank) -> None:
    rank.comm.compare("met", {}, 30.0)


def every_rank_has_all(rank: Rank) -> str:
    """A body."""
    with HostStore(rank.comm, SIZES, EXPERTS, timeout_s=30.0) as store:
        assert not any(store.holds(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS))
        meet(rank)
        save_own(store, rank.rank, rank.size)
        meet(rank)
        for layer in range(LAYERS):
            blobs, tensors = blobs_of(EXPERTS, layer)
            for expert in range(EXPERTS):
                assert store.holds(layer, expert)
                assert torch.equal(store.view(layer, expert), packed(layer, expert))
                store.load(layer, expert, blobs, EXPERTS - 1 - expert)
            expected, filled = blobs_of(EXPERTS, layer)
            for expert in range(EXPERTS):
                fill(filled, EXPERTS - 1 - expert, layer, expert)
            assert all(torch.equal(tensors[name], filled[name]) for name in tensors)
            assert expected.slot_bytes == SIZES[layer]
        meet(rank)
        return str(store.report)


@pytest.mark.parametrize(("size", "mode"), [(1, "process"), (RANKS, "process"), (3, "thread"), (12, "thread")])
def test_every_rank_has_all_experts(size: int, mode: str) -> None:
    """With 12 ranks some have no part."""
    for rank, report in enumerate(run_ranks(size, every_rank_has_all, mode=mode)):
        own = re.search(r"(\d+) bytes in all, (\d+) of this rank", report)
        assert own
        layout = StoreLayout.of(SIZES, EXPERTS, size, host_settings().huge_page_bytes)
        assert int(own[2]) == layout.part_bytes(rank)
        assert int(own[1]) == sum(map(layout.part_bytes, range(size)))
        assert "copy threads: 2 on CPUs " in report


def by_threads(rank: Rank) -> None:
    """A body: all at once through the copy threads."""
    with HostStore(rank.comm, SIZES, EXPERTS, num_threads=3, timeout_s=30.0) as store:
        blobs, tensors = blobs_of(EXPERTS, 1)
        mine = range(rank.rank, EXPERTS, rank.size)
        for expert in mine:
            fill(tensors, expert, 1, expert)
        for done in [store.start_save(1, expert, blobs, expert) for expert in mine]:
            done.result(30)
        meet(rank)
        back, found = blobs_of(EXPERTS, 1)
        for done in [store.start_load(1, expert, back, expert) for expert in range(EXPERTS)]:
            done.result(30)
        for expert in range(EXPERTS):
            assert torch.equal(back.pack(expert), packed(1, expert)), found
        with pytest.raises(ValueError, match="layer 0, expert 0 has not been saved"):
            store.start_load(0, 0, blobs_of(1, 0)[0], 0).result(30)
        with pytest.raises(ValueError, match="slot is 10, allowed are ints from 0 to 9"):
            store.start_load(1, 0, back, EXPERTS)  # at once
        meet(rank)


def test_copy_threads() -> None:
    run_ranks(2, by_threads)


def test_copies_run_on_the_nodes_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = min(os.sched_getaffinity(0))
    monkeypatch.setattr("putget.experts.store.numa.nodes", lambda: (0, 7))
    monkeypatch.setattr("putget.experts.store.numa.cpus_of", lambda node: frozenset({cpu} if node == 7 else ()))
    (comm,) = putget.Communicator.local(1)
    with comm, HostStore(comm, [16], 1, numa_node=7, num_threads=1) as store:
        assert store.report.cpus == (cpu,)
        assert store.report.numa_node == 7
        assert store._threads.submit(os.sched_getaffinity, 0).result(30) == {cpu}
    assert os.sched_getaffinity(0) != {cpu} or len(os.sched_getaffinity(0)) == 1


def start(rank: Rank) -> None:
    """A body: the store stays open behind it."""
    store = rank.state["store"] = HostStore(rank.comm, SIZES, EXPERTS, timeout_s=30.0)
    save_own(store, rank.rank, rank.size)
    meet(rank)


def die_while_saving(rank: Rank) -> None:
    """A body: rank 1 dies in the middle of a copy, by SIGKILL."""
    if rank.rank != 1:
        return
    store = rank.state["store"]
    blobs, _ = blobs_of(1, 2)

    def half(slot: int, *, out: torch.Tensor) -> None:
        out[: len(out) // 2] = 255
        os.kill(os.getpid(), signal.SIGKILL)

    blobs.pack = half  # type: ignore[assignment, method-assign]
    store.save(2, 4, blobs, 0)


def go_on(rank: Rank) -> str:
    """A body, of the survivors."""
    store = rank.state["store"]
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            if (layer, expert) != (2, 4):
                assert torch.equal(store.view(layer, expert), packed(layer, expert))
    assert not store.holds(2, 4)
    blobs, tensors = blobs_of(1, 2)
    with pytest.raises(putget.PutgetError) as caught:
        store.load(2, 4, blobs, 0)
    assert not any(tensor.any() for tensor in tensors.values())  # the slot is unchanged
    return str(caught.value)


def save_again(rank: Rank) -> None:
    """A body: a survivor saves what was lost, also into the part that the dead rank made."""
    store = rank.state["store"]
    if rank.rank == 3:
        store.write(0, 3, packed(0, 3))
        store.write(2, 4, packed(2, 4))  # the last one: the others wait for it
    deadline = time.monotonic() + 20
    while not store.holds(2, 4):
        assert time.monotonic() < deadline
    assert torch.equal(store.view(2, 4), packed(2, 4))
    assert torch.equal(store.view(0, 3), packed(0, 3))
    store.close()


def test_a_rank_that_dies_leaves_the_store_to_the_others() -> None:
    with fresh_ranks(RANKS) as ranks:
        ranks.call(start)
        with pytest.raises(RankError, match="rank 1: the process ended"):
            ranks.call(die_while_saving)
        others = [0, 2, 3]
        for message in ranks.call(go_on, ranks=others).values():
            assert "layer 2, expert 4 in the host store is not whole: rank 1 is saving it, or died while" in message
        ranks.call(save_again, ranks=others)


def stop_while_saving(rank: Rank, path: Path) -> str | None:
    """A body: rank 1 stands still in the middle of a save, rank 0 saves newer bytes meanwhile, and rank 1 wakes up."""
    with HostStore(rank.comm, SIZES, EXPERTS, timeout_s=30.0) as store:
        blobs, _ = blobs_of(1, 2)

        def in_halves(slot: int, *, out: torch.Tensor) -> None:
            out[: len(out) // 2] = 255
            path.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            out[len(out) // 2 :] = 255

        said = None
        if rank.rank == 1:
            blobs.pack = in_halves  # type: ignore[assignment, method-assign]
            store.save(2, 4, blobs, 0)
        else:
            deadline = time.monotonic() + 30
            while not (path.exists() and path.read_text() and thread_states(int(path.read_text())) == {"T"}):
                assert time.monotonic() < deadline
            store.write(2, 4, packed(2, 4))
            assert torch.equal(store.view(2, 4), packed(2, 4))
            os.kill(int(path.read_text()), signal.SIGCONT)
        meet(rank)
        if rank.rank == 0:
            with pytest.raises(putget.PutgetError) as caught:
                store.view(2, 4)
            said = str(caught.value)
        meet(rank)
        return said


def test_a_rank_that_wakes_up_in_a_save_does_not_end_a_newer_one(tmp_path: Path) -> None:
    """Half of the bytes are its own then: they are never taken for an expert."""
    with fresh_ranks(2) as ranks:  # the error's frames hold the memory, which tests in other processes count
        said = ranks.call(stop_while_saving, tmp_path / "pid")[0]
    assert "layer 2, expert 4 in the host store is not whole: the checksum of its bytes is" in said
    assert "rank 0 saved" in said


def mapped() -> int:
    return sum("putget-experts" in line for line in Path("/proc/self/maps").read_text().splitlines())


def descriptors() -> int:
    gc.collect()  # objects of other tests are not counted now and freed later
    return len(os.listdir("/proc/self/fd"))


def test_nothing_stays_behind() -> None:
    """A store that is closed, or dropped, leaves nothing; a view keeps its part."""
    comms = putget.Communicator.local(1)
    before = descriptors()
    for is_dropped in (False, True):
        store = HostStore(comms[0], SIZES, EXPERTS, num_threads=1)
        assert mapped() == 1
        assert descriptors() <= before
        store.write(1, 2, packed(1, 2))
        view = store.view(1, 2)
        if is_dropped:
            held = [store]
            del store
            with pytest.warns(ResourceWarning, match="HostStore.rank=0, 10 experts of 3 layers, .* without close"):
                held.clear()
            gc.collect()
        else:
            store.close()
            store.close()
            with pytest.raises(ValueError, match="the host store is closed"):
                store.view(1, 2)
        assert mapped() == 1
        assert torch.equal(view, packed(1, 2))
        del view
        gc.collect()
        assert mapped() == 0
    comms[0].close()


def test_bytes_that_changed_are_found() -> None:
    (comm,) = putget.Communicator.local(1)
    with comm, HostStore(comm, SIZES, EXPERTS, num_threads=1) as store:
        store.write(1, 2, packed(1, 2))
        store._bytes_of(1, 2)[7] += 1
        with pytest.raises(putget.PutgetError, match=r"layer 1, expert 2 .*checksum of its bytes is 0x\w{8}, rank 0"):
            store.view(1, 2)
        assert not torch.equal(store.view(1, 2, verify=False), packed(1, 2))
        store.write(1, 2, packed(1, 2))
        assert torch.equal(store.view(1, 2), packed(1, 2))


def test_places_do_not_overlap() -> None:
    for num_ranks in (1, 3, 4, 12):
        layout = StoreLayout.of([100, 5000, 1], EXPERTS, num_ranks, 1 << 21)
        taken: dict[int, list[tuple[int, int]]] = {}
        for layer, num_bytes in enumerate(layout.expert_bytes):
            for expert in range(EXPERTS):
                place = layout.place(layer, expert)
                assert place.offset % 4096 == 0
                assert layout.first_of(place.rank) <= expert < layout.first_of(place.rank + 1)
                spans = taken.setdefault(place.rank, [])
                spans += [(place.record, place.record + RECORD_BYTES), (place.offset, place.offset + num_bytes)]
        for rank, spans in taken.items():
            spans.sort()
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
            assert spans[-1][1] <= layout.part_bytes(rank)
        assert sum(layout.count_of(rank) for rank in range(num_ranks)) == EXPERTS


BAD: list[tuple[dict[str, Any], str]] = [
    ({"expert_bytes": []}, "the length of expert_bytes is 0, allowed"),
    ({"expert_bytes": 16}, "expert_bytes is 16, expected the bytes of an expert of each layer"),
    ({"expert_bytes": [16, 0]}, r"expert_bytes\[1\] is 0, allowed are ints from 1"),
    ({"num_experts": 0}, "num_experts is 0, allowed are ints from 1"),
    ({"num_threads": 0}, "num_threads is 0, allowed are ints from 1 to 64"),
    ({"timeout_s": 0}, "timeout_s is 0"),
    ({"numa_node": 512}, "numa_node is 512, online are"),
    ({"device": "meta"}, "device is 'meta'"),
    ({"comm": None}, "comm is None, expected a putget.Communicator"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    (comm,) = putget.Communicator.local(1)
    with comm, pytest.raises(ValueError, match=message):
        HostStore(**{"comm": comm, "expert_bytes": [16], "num_experts": 2, **changes})
    assert mapped() == 0


def test_bad_calls_are_named() -> None:
    (comm,) = putget.Communicator.local(1)
    with comm, HostStore(comm, SIZES, EXPERTS, num_threads=1) as store:
        blobs, _ = blobs_of(2, 0)
        for call, message in (
            (lambda: store.view(3, 0), "layer is 3, allowed are ints from 0 to 2"),
            (lambda: store.holds(0, 10), "expert is 10, allowed are ints from 0 to 9"),
            (lambda: store.view(0, 0), "layer 0, expert 0 has not been saved"),
            (lambda: store.save(0, 0, blobs, 2), "slot is 2, allowed are ints from 0 to 1"),
            (lambda: store.save(1, 0, blobs, 0), "blobs have slots of .* bytes; layer 1 of the host store has"),
            (lambda: store.load(1, 0, blobs, 0), "blobs have slots of .* bytes; layer 1 of the host store has"),
            (lambda: store.write(0, 0, torch.zeros(3, dtype=torch.uint8)), r"packed is torch.uint8 \[3\]; it must be"),
            (lambda: store.write(0, 0, torch.zeros(SIZES[0])), "packed is torch.float32"),
            (lambda: store.write(9, 0, torch.zeros(3)), "layer is 9, allowed"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        assert not store.holds(0, 0)


def differing(rank: Rank) -> str:
    """A body: one rank has another model."""
    sizes = SIZES if rank.rank else [*SIZES[:-1], SIZES[-1] + 16]
    with pytest.raises(ValueError) as caught:
        HostStore(rank.comm, sizes, EXPERTS, timeout_s=30.0)
    with pytest.raises(ValueError) as refused:
        HostStore(rank.comm, SIZES, EXPERTS, num_threads=1 if rank.rank else 0, timeout_s=30.0)
    with HostStore(rank.comm, SIZES, EXPERTS, timeout_s=30.0) as store:  # and then all is well
        meet(rank)
        assert not store.holds(0, 0)
    return f"{caught.value}; {refused.value}"


def test_ranks_that_want_other_stores_hear_of_it() -> None:
    for rank, messages in enumerate(run_ranks(2, differing)):
        assert "expert_bytes differs between ranks: rank" in messages
        assert ("rank 0: num_threads is 0" if rank else "num_threads is 0") in messages


def too_large(rank: Rank, late: int) -> str:
    """A body: a cgroup has room for less than all parts, though for each of them; one rank read its free bytes late.

    That rank finds enough, and hears of the others' refusal.
    """
    room = StoreLayout.of(SIZES, EXPERTS, rank.size, host_settings().huge_page_bytes).part_bytes(0)
    free = 2 * room if rank.rank == late else 2 * room - 1
    limit = host_memory.Limit("0:1", "the memory.max of a test", 100 * room, free)
    own = host_memory.limits
    host_memory.limits = lambda: [*own(), limit]  # type: ignore[assignment]
    try:
        with pytest.raises(MemoryError) as caught:
            HostStore(rank.comm, SIZES, EXPERTS, timeout_s=30.0)
    finally:
        host_memory.limits = own
    assert mapped() == 0
    return str(caught.value)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_store_that_is_too_large_is_refused_before_anything_is_allocated(late: int) -> None:
    messages = run_ranks(2, too_large, late)
    heard = {rank for rank, message in enumerate(messages) if message.startswith(f"rank {1 - rank}: ")}
    # Where both refuse, one may hear of the other's refusal before it says its own.
    assert len(heard) < 2 if late == 2 else heard == {late}
    for message in messages:
        assert re.search(
            r"10 experts of 3 layers want \d+ bytes of shared memory from 2 ranks; free are \d+ of the \d+ bytes of "
            "the memory.max of a test",
            message,
        )


def test_more_than_the_host_has_is_a_memory_error() -> None:
    (comm,) = putget.Communicator.local(1)
    began = time.monotonic()
    with comm, pytest.raises(MemoryError, match="free are"):
        HostStore(comm, [1 << 36] * 64, 256)
    assert time.monotonic() - began < 10


def test_hosts_apart_are_refused() -> None:
    (comm,) = putget.Communicator.local(1)
    comm._mesh.one_host = False
    with comm, pytest.raises(ValueError, match="comm has ranks on several hosts"):
        HostStore(comm, [16], 1)


def test_a_forked_child_leaves_the_memory_alone() -> None:
    (comm,) = putget.Communicator.local(1)
    with comm, HostStore(comm, SIZES, EXPERTS, num_threads=1) as store:
        store.write(0, 0, packed(0, 0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            parts = store._parts
            store._parts, store._bytes = [], []
            del parts
            os._exit(0 if mapped() == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(store.view(0, 0), packed(0, 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_memory_is_locked_for_the_gpu() -> None:
    (comm,) = putget.Communicator.local(1)
    with comm, HostStore(comm, SIZES, EXPERTS, device="cuda") as store:
        assert store.report.is_registered, store.report
        blobs, tensors = blobs_of(2, 1, "cuda")
        fill(tensors, 0, 1, 5)
        store.start_save(1, 5, blobs, 0).result(30)
        assert torch.equal(store.view(1, 5), packed(1, 5))
        assert store.view(1, 5).is_pinned()
        store.start_load(1, 5, blobs, 1).result(30)
        assert torch.equal(blobs.pack(1).cpu(), packed(1, 5))
        node = store.report.numa_node
        assert node is None or node in host_settings().numa_nodes
