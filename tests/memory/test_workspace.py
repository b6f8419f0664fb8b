"""Memory: how much, whose, and shared by whom."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import putget
from putget import _abi, reference
from putget.experts import numa
from tests.harness import Rank, run_ranks
from tests.harness.cases import Case, Round, Row
from tests.harness.compare import Outcome, check_round, play_on, play_round

CASE = Case(
    3,
    (Round(1, (3, 8, 0)),),
    num_experts=7,
    top_k=3,
    payloads=(((96,), torch.uint8), ((3,), torch.float32)),
    output=((48,), torch.bfloat16),
)


def bytes_of(case: Case) -> int:
    options = case.options()
    options.pop("expert_to_rank", None)
    options.pop("tuning", None)
    return putget.workspace_bytes(ep_size=case.ep_size, **options)  # type: ignore[arg-type]


def describe(rank: Rank, case: Case) -> tuple[int, str, int, int, tuple[bool, ...]]:
    with rank.all_to_all(**case.options()) as a2a:
        return a2a.workspace.num_bytes, str(a2a), a2a.ep_size, a2a.ep_rank, a2a.active_ranks


@pytest.mark.parametrize("case", [CASE, Case(1, (Round(1, (1,)),)), replace(CASE, ep_size=8, max_tokens_per_rank=513)])
def test_workspace_bytes_answers_before_anything_is_allocated(case: Case, device: str) -> None:
    expected = bytes_of(case)
    for rank, (num_bytes, _, ep_size, ep_rank, active) in enumerate(
        run_ranks(case.ep_size, describe, case, mode="thread", device=device)
    ):
        assert num_bytes == expected
        assert (ep_size, ep_rank, active) == (case.ep_size, rank, (True,) * case.ep_size)
    rows = case.ep_size * case.max_tokens_per_rank
    row_bytes = sum(putget.Payload(*row).row_bytes for row in (*case.payloads, case.output)) + 8 * case.top_k
    sentinel = min(rows * row_bytes * 2 // 3, case.ep_size * 32 * 1024 * 1024)  # sentinel rows
    assert rows * row_bytes + sentinel <= expected <= rows * row_bytes + sentinel + 96 * 1024


@pytest.mark.parametrize("domain_size", [1, 8, 64])
@pytest.mark.parametrize("tokens", [1, 2048, 1 << 14, 50_000, 64_000, 70_000, 1 << 18])
def test_what_is_set_aside_never_reaches_into_rows(tokens: int, domain_size: int) -> None:
    """From the smallest memory up to sizes where nothing is set aside."""
    sizes: dict[str, Any] = {"ep_size": 64, "max_tokens_per_rank": tokens, "top_k": 8, "domain_size": domain_size}
    rows = [putget.Payload((7168,), torch.uint8)]
    regions = 64 * tokens * (7168 + 14336 + 64)
    needed = putget.workspace_bytes(**sizes, payloads=rows, output=putget.Payload((7168,), torch.bfloat16))
    library = _abi.library()
    for memory in (needed, needed + 1, needed * 3 // 2, needed * 4):
        assert regions <= library.putget_sentinel_begin(64, domain_size, memory) <= memory
    assert needed <= regions + min(domain_size * 32 * 1024 * 1024, regions * domain_size // 64) + (1 << 20)


@pytest.mark.parametrize("domain_size", [0, 5])
def test_a_domain_has_at_most_all_ranks(domain_size: int) -> None:
    row = putget.Payload((16,), torch.bfloat16)
    with pytest.raises(ValueError, match=f"^domain_size is {domain_size}, allowed are ints from 1 to 4"):
        putget.workspace_bytes(
            ep_size=4, max_tokens_per_rank=4, top_k=2, payloads=[row], output=row, domain_size=domain_size
        )


@pytest.mark.parametrize(("domains", "blocks"), [(3, [(0, 3)] * 3 + [(3, 3)] * 2), (5, [(0, 5)] * 5)])
def test_the_block_of_a_domain(domains: int, blocks: list[tuple[int, int]]) -> None:
    comms = putget.Communicator.local(5, network=putget.Network("sim", domain_size=domains))
    assert [comm.block for comm in comms] == blocks
    for comm in comms:
        comm.domain_of = (0, 1, 0, 1, 1)
        assert comm.block == (0, 5)
        comm.close()


def test_workspace_bytes_counts_quantised_rows() -> None:
    """All of them: elements, and with block scales 4 bytes for 128 of them, in units of 16 bytes."""
    for width, quantised in ((48, 64), (128, 144), (2880, 2976)):
        case = replace(CASE, output=((width,), torch.bfloat16), wire=torch.float8_e4m3fn, max_tokens_per_rank=5000)
        regions = (
            CASE.ep_size * 5000 * (8 * case.top_k + sum(row_bytes_of(row) for row in (*case.payloads, case.output)))
        )
        assert bytes_of(case) >= regions + CASE.ep_size * 5000 * quantised


def row_bytes_of(row: Row) -> int:
    return putget.Payload(*row).row_bytes


def test_workspace_bytes_has_room_for_more_quantised_rows_than_others(device: str) -> None:
    """32 MiB a peer are the most for rows that may also be got."""
    case = replace(CASE, ep_size=2, output=((7168,), torch.bfloat16), max_tokens_per_rank=8192)
    more = bytes_of(replace(case, wire=torch.float8_e4m3fn)) - bytes_of(case)
    assert more == 2 * (8192 * (7168 + 4 * 56) - (32 << 20))


def test_str_has_the_memory_map(device: str) -> None:
    for num_bytes, text, *_ in run_ranks(3, describe, CASE, mode="thread", device=device):
        for word in (
            "topk_ids",
            "topk_weights",
            "payload 1",
            "combine_input",
            "bfloat16",
            "uint8",
            "float32",
            "96",
            "48",
        ):
            assert word in text, text
        assert str(num_bytes) in text.replace(",", "").replace("_", "")


def shared_memory_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "putget" in name}


def list_files_while_open(rank: Rank) -> tuple[set[str], int]:
    with rank.all_to_all() as a2a:
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if a2a.ep_size and "shm" in line]
        return shared_memory_files(), len(mapped)


def test_no_file_is_left_for_a_crash_to_leak() -> None:
    before = shared_memory_files()
    for files, _ in run_ranks(4, list_files_while_open):
        assert files <= before


def open_descriptors(rank: Rank, rounds: int) -> list[int]:
    counts = []
    for _ in range(rounds):
        with rank.all_to_all():
            pass
        counts.append(len(os.listdir("/proc/self/fd")) + len(Path("/proc/self/maps").read_text().splitlines()))
    return counts


def test_close_gives_descriptors_and_mappings_back() -> None:
    for counts in run_ranks(3, open_descriptors, 12):
        # Allocators may still grow a little; a leak of even one mapping a construction would show as six.
        assert counts[-1] - counts[5] < 5, counts


LAYERS = (
    replace(CASE, rounds=tuple(Round(i, (3, 8, i % 4)) for i in range(6))),
    Case(
        3,
        tuple(Round(i, (8, i % 5, 2), ending="flat") for i in range(6)),
        num_experts=5,
        top_k=5,
        payloads=(((7,), torch.float32),),
        output=((200,), torch.float32),
    ),
    Case(
        3,
        tuple(Round(i, (i % 3, 1, 4), ending=ending) for i, ending in enumerate(("open", "release", "flat") * 2)),
        max_tokens_per_rank=4,
        payloads=(((), torch.int64), ((500,), torch.uint8)),
    ),
)


def play_layers(rank: Rank, cases: tuple[Case, ...], order: tuple[int, ...], num_bytes: int) -> list[list[Outcome]]:
    """A body: several objects over one workspace take turns."""
    workspace = putget.Workspace(rank.comm, num_bytes, device=rank.device, timeout_s=20, warmup_timeout_s=20)
    objects = [rank.all_to_all(**case.options(), workspace=workspace) for case in cases]
    if any(a2a.workspace is not workspace for a2a in objects):
        raise AssertionError("workspace is another one")
    outcomes: list[list[Outcome]] = [[] for _ in cases]
    for layer in order:
        outcomes[layer].append(play_round(objects[layer], rank, cases[layer], len(outcomes[layer])))
    for a2a in objects:
        a2a.close()
    workspace.close()
    workspace.close()
    return outcomes


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_layers_of_different_shape_share_a_workspace(mode: str, device: str) -> None:
    order = (0, 1, 2, 0, 0, 1, 1, 2, 1, 0, 2, 2, 2, 0, 1, 2, 1, 0)
    num_bytes = 2 * max(bytes_of(case) for case in LAYERS)
    results = run_ranks(3, play_layers, LAYERS, order, num_bytes, mode=mode, device=device)
    for layer, case in enumerate(LAYERS):
        for index in range(len(case.rounds)):
            check_round(case, index, {rank: outcomes[layer][index] for rank, outcomes in enumerate(results)})


def join_later(rank: Rank, cases: tuple[Case, ...], epoch: int, num_bytes: int) -> list[list[Outcome]]:
    """A body: another layer comes to the workspace while a round of the first is open on some ranks only."""
    workspace = putget.Workspace(rank.comm, num_bytes, device=rank.device, timeout_s=20, warmup_timeout_s=20)
    first = rank.all_to_all(**cases[0].options(), workspace=workspace)
    workspace._reset(epoch)
    outcomes: list[list[Outcome]] = [[play_round(first, rank, cases[0], 0)], []]
    play_round(first, rank, replace(cases[0], rounds=(replace(cases[0].rounds[1], ending="open"),)), 0)
    if rank.rank == 1:
        first.release()
    second = rank.all_to_all(**cases[1].options(), workspace=workspace)
    for index in range(len(cases[1].rounds)):
        outcomes[1].append(play_round(second, rank, cases[1], index))
        if index % 2 and index < len(cases[0].rounds):
            outcomes[0].append(play_round(first, rank, cases[0], len(outcomes[0])))
    for owner in (first, second, workspace):
        owner.close()
    return outcomes


@pytest.mark.parametrize("mode", ["process", "thread"])
@pytest.mark.parametrize("epoch", [0, 2**32 - 4])
def test_a_layer_comes_later(mode: str, epoch: int, device: str) -> None:
    num_bytes = 2 * max(bytes_of(case) for case in LAYERS)
    for cases in ((LAYERS[0], LAYERS[1]), (LAYERS[1], LAYERS[2]), (LAYERS[2], LAYERS[0])):
        results = run_ranks(3, join_later, cases, epoch, num_bytes, mode=mode, device=device)
        for which, case in enumerate(cases):
            for index in range(len(results[0][which])):
                check_round(case, index, {rank: outcomes[which][index] for rank, outcomes in enumerate(results)})


def share_too_small(rank: Rank, num_bytes: int) -> str:
    workspace = putget.Workspace(rank.comm, num_bytes, device=rank.device)
    with pytest.raises(ValueError, match="workspace") as caught:
        rank.all_to_all(**CASE.options(), workspace=workspace)
    workspace.close()
    return str(caught.value)


def test_a_workspace_too_small_is_refused_with_the_size_it_needs(device: str) -> None:
    needed = bytes_of(CASE)
    for message in run_ranks(3, share_too_small, needed - 4096, mode="thread", device=device):
        assert str(needed) in message


def play_two_at_once(rank: Rank, cases: tuple[Case, Case], steps: int) -> list[list[Outcome]]:
    """A body: two objects with workspaces of their own; ranks launch them in different orders.

    On the CPU a call blocks, so each object has a thread; on CUDA each has a stream and one thread enqueues both.
    """
    objects = [rank.all_to_all(**case.options()) for case in cases]
    outcomes: list[list[Outcome]] = [[], []]
    order = [0, 1] if rank.rank % 2 == 0 else [1, 0]
    if rank.device.type == "cuda":
        streams = [torch.cuda.Stream(rank.device) for _ in cases]
        inputs = [[inputs_of(rank, case, index) for index in range(steps)] for case in cases]
        pending: list[list[Any]] = [[], []]
        torch.cuda.current_stream(rank.device).synchronize()
        rank.meet()
        for index in range(steps):
            for which in order:
                with torch.cuda.stream(streams[which]):
                    pending[which].append(enqueue_round(objects[which], *inputs[which][index]))
        torch.cuda.synchronize(rank.device)
        outcomes = [[seen() for seen in of_object] for of_object in pending]
    else:
        failures: list[BaseException] = []

        def run(which: int) -> None:
            try:
                outcomes[which] = play_on(objects[which], rank, cases[which])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(which,), daemon=True) for which in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        if failures:
            raise failures[0]
    for a2a in objects:
        a2a.close()
    return outcomes


def inputs_of(rank: Rank, case: Case, index: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The arguments of dispatch, and the rows for combine."""
    sent = case.sent(index, rank.rank)
    arguments = [tensor.to(rank.device) for tensor in (sent.topk_ids, sent.topk_weights, *sent.payloads)]
    return arguments, case.expert_rows(index, rank.rank).to(rank.device)


def enqueue_round(a2a: putget.AllToAll, arguments: list[torch.Tensor], rows: torch.Tensor) -> Callable[[], Outcome]:
    """Launches one round with no synchronisation; the result says later what happened."""
    got = a2a.dispatch(*arguments)
    seen: dict[str, Any] = {
        "topk_ids": got.topk_ids.clone(),
        "topk_weights": got.topk_weights.clone(),
        "payloads": tuple(p.clone() for p in got.payloads),
        "num_tokens": got.num_tokens.clone(),
        "target_ranks": a2a.target_ranks.clone(),
        "target_slots": a2a.target_slots.clone(),
    }
    seen["combined"] = a2a.combine(rows)

    def fetch() -> Outcome:
        fields = {name: value.cpu() for name, value in seen.items() if name != "payloads"}
        return Outcome(**fields, payloads=tuple(p.cpu() for p in seen["payloads"]), invalid=0)

    return fetch


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_independent_objects_launched_in_different_orders(mode: str, device: str) -> None:
    steps = 12
    cases = (
        Case(4, tuple(Round(i, (3, 8, 0, i % 5)) for i in range(steps)), top_k=3),
        Case(
            4,
            tuple(Round(i, (i % 4, 1, 8, 2)) for i in range(steps)),
            payloads=(((30,), torch.uint8),),
            output=((16,), torch.bfloat16),
        ),
    )
    results = run_ranks(4, play_two_at_once, cases, steps, mode=mode, device=device)
    for which, case in enumerate(cases):
        for index in range(steps):
            check_round(case, index, {rank: outcomes[which][index] for rank, outcomes in enumerate(results)})


def interleave(rank: Rank, cases: tuple[Case, Case]) -> list[list[Outcome]]:
    """A body: two-batch overlap in one thread; the second dispatch comes before the first combine."""
    first, second = (rank.all_to_all(**case.options()) for case in cases)
    outcomes: list[list[Outcome]] = [[], []]
    for index in range(len(cases[0].rounds)):
        arguments, rows = inputs_of(rank, cases[0], index)
        rank.meet()
        first.dispatch(*arguments)
        outcomes[1].append(play_round(second, rank, cases[1], index))
        outcomes[0].append(replace(outcomes[1][-1], combined=first.combine(rows).cpu()))
    first.close()
    second.close()
    return outcomes


def test_a_second_object_runs_inside_the_round_of_the_first(device: str) -> None:
    cases = (Case(3, tuple(Round(i, (3, 8, i)) for i in range(4)), top_k=3), CASE)
    cases = (cases[0], replace(CASE, rounds=tuple(Round(i + 9, (i, 8, 2)) for i in range(4))))
    results = run_ranks(3, interleave, cases, mode="thread", device=device)
    for index in range(4):
        check_round(cases[1], index, {rank: outcomes[1][index] for rank, outcomes in enumerate(results)})
        routings, _ = reference.dispatch(
            [cases[0].sent(index, rank) for rank in range(3)], cases[0].table_of(index), max_rows=8
        )
        rows = [cases[0].expert_rows(index, rank) for rank in range(3)]
        for rank, outcomes in enumerate(results):
            wanted = reference.combine(routings[rank], rows, rank)
            assert torch.equal(outcomes[0][index].combined, wanted)


def construct_on_different_workspaces(rank: Rank) -> tuple[str, float]:
    pair = [putget.Workspace(rank.comm, 1 << 20, rank.device, timeout_s=20, warmup_timeout_s=20) for _ in range(2)]
    started = time.monotonic()
    with pytest.raises(ValueError, match="workspace") as caught:
        rank.all_to_all(workspace=pair[rank.rank % 2])
    seconds = time.monotonic() - started
    rank.all_to_all(workspace=pair[1]).close()  # nothing is left behind
    for workspace in pair:
        workspace.close()
    return str(caught.value), seconds


def test_a_workspace_that_differs_between_ranks_is_found_at_construction(device: str) -> None:
    for message, seconds in run_ranks(3, construct_on_different_workspaces, mode="thread", device=device):
        assert "differs between ranks" in message
        assert "rank 0" in message
        assert "rank 1" in message
        assert seconds < 10


def allocated_bytes() -> int:
    """Bytes in the C library's heaps, by its own count (mallinfo2)."""

    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")

    class Report(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in names]

    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Report
    return int(mallinfo2().uordblks)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_objects_that_are_dropped_leak_nothing() -> None:
    comm = putget.Communicator.local(1)[0]
    rank = Rank(0, 1, torch.device("cpu"), _comm=comm)
    workspace = putget.Workspace(comm, 1 << 16, rank.device)

    def grown(times: int) -> float:
        gc.collect()
        before = allocated_bytes()
        for _ in range(times):
            rank.all_to_all(workspace=workspace)
        gc.collect()
        return (allocated_bytes() - before) / times

    grown(50)
    assert grown(500) < 100
    workspace.close()
    comm.close()


def open_and_mapped() -> tuple[int, int]:
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:putget" in line]
    return len(os.listdir("/proc/self/fd")), len(mapped)


def drop(make: Callable[[], Any]) -> None:
    made = make()
    del made
    gc.collect()


def test_what_is_dropped_without_close_warns_and_is_freed() -> None:
    gc.collect()
    before = open_and_mapped()

    def on_one_rank(make: Callable[[Rank], Any]) -> None:
        with putget.Communicator.local(1)[0] as comm:
            drop(lambda: make(Rank(0, 1, torch.device("cpu"), _comm=comm)))

    with pytest.warns(ResourceWarning, match="AllToAll.*close"):
        on_one_rank(lambda rank: rank.all_to_all())
    with pytest.warns(ResourceWarning, match="Workspace.*close"):
        on_one_rank(lambda rank: putget.Workspace(rank.comm, 1 << 16, rank.device))
    with pytest.warns(ResourceWarning, match="Communicator.*close"):
        drop(lambda: putget.Communicator.local(2))
    # Objects that another test left may go, too.
    assert all(now <= then for now, then in zip(open_and_mapped(), before, strict=True)), before


def test_what_is_closed_does_not_warn() -> None:
    gc.collect()  # objects of other tests warn now
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with putget.Communicator.local(1)[0] as comm, putget.Workspace(comm, 1 << 16, "cpu") as workspace:
            Rank(0, 1, torch.device("cpu"), _comm=comm).all_to_all(workspace=workspace).close()
            Rank(0, 1, torch.device("cpu"), _comm=comm).all_to_all().close()
        del comm, workspace
        gc.collect()
    assert [str(warning.message) for warning in caught if warning.category is ResourceWarning] == []


def nodes_of_pages(rank: Rank, case: Case) -> tuple[int, set[int]]:
    """A body: the NUMA node that the rank is bound to, and the nodes of its workspace's pages."""
    online = numa.nodes()
    node = online[rank.rank % len(online)]
    os.sched_setaffinity(0, numa.cpus_of(node))
    get_mempolicy = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    found = ctypes.c_int(-1)
    pages = set()
    with rank.all_to_all(**case.options()) as a2a:
        rows = a2a.combine_input
        for address in range(rows.data_ptr(), rows.data_ptr() + rows.nbytes, 4096):
            of_address = 3  # MPOL_F_NODE | MPOL_F_ADDR
            pointer = ctypes.c_void_p(address)
            assert libc.syscall(get_mempolicy, ctypes.byref(found), None, 0, pointer, of_address) == 0, (
                ctypes.get_errno()
            )
            pages.add(found.value)
    return node, pages


@pytest.mark.skipif(len(numa.nodes()) < 2, reason="this machine has one NUMA node")
def test_pages_are_on_the_node_that_the_rank_is_bound_to() -> None:
    case = replace(CASE, max_tokens_per_rank=513)
    for node, pages in run_ranks(case.ep_size, nodes_of_pages, case, mode="process", device="cpu"):
        assert pages == {node}


# Reserving memory as a kernel does it whose calls a signal ends.
INTERRUPTED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/types.h>
int posix_fallocate(int file, off_t begin, off_t bytes) {
  static int calls;
  if (++calls % 4 != 0) return EINTR;
  return ((int (*)(int, off_t, off_t))dlsym(RTLD_NEXT, "posix_fallocate"))(file, begin, bytes);
}
"""
RESERVE = """
import putget
(comm,) = putget.Communicator.local(1)
with comm, putget.Workspace(comm, 1 << 20, "cpu") as workspace:
    workspace.set_active_ranks([True])
print("reserved")
"""


def test_signals_do_not_end_the_reservation_of_memory(tmp_path: Path) -> None:
    library = tmp_path / "interrupted.so"
    compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(compiler, input=INTERRUPTED, text=True, check=True, timeout=120)
    done = subprocess.run(
        [sys.executable, "-c", RESERVE],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "reserved\n", done.stderr
