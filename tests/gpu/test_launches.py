"""Calls only launch: no synchronisation, no copy to the host, nothing that waits for a peer on the host's side."""

from __future__ import annotations

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable

import pytest
import torch

import putget
from putget.tuning import Tuning
from tests.gpu.graphs import GraphRound
from tests.gpu.ranks import Ranks, stream_of
from tests.gpu.test_graphs import case_of, open_object, prepare_graphs
from tests.harness import Rank, run_ranks
from tests.harness.cases import Case, Round
from tests.harness.compare import Outcome, check_round

CU_GRAPH_NODE_TYPE_KERNEL = 0


def case_for(ranks: Ranks) -> Case:
    return case_of(ranks.size, (Round(3, (8,) * ranks.size), Round(4, (8,) * ranks.size)))


def load_round(rank: Rank, index: int) -> None:
    """A body: puts a round's data in place and waits for it."""
    rank.state["graphs"][8].load(index)
    torch.cuda.current_stream(rank.device).synchronize()


def launch_round(rank: Rank) -> float:
    """A body: launches a round eagerly; returns the seconds until the calls came back."""
    began = time.monotonic()
    rank.state["graphs"][8].record()
    return time.monotonic() - began


def fetch_round(rank: Rank) -> Outcome:
    """A body: what the launched round did."""
    return rank.state["graphs"][8].outcome()


def launch_round_where_waiting_is_an_error(rank: Rank) -> None:
    """A body: a round under torch's check for synchronising calls."""
    rank.state["graphs"][8].record()


def set_sync_debug(rank: Rank, mode: str) -> None:
    """A body: torch's reaction to synchronising calls; one setting per process."""
    torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.timed
def test_calls_come_back_before_the_peers_come(peers: Ranks) -> None:
    """Every rank but one launches dispatch and combine; they come back although their kernels cannot end."""
    case = case_for(peers)
    peers.call(open_object, "a2a", case)
    peers.call(prepare_graphs, case, (8,))
    peers.call(load_round, 0)
    last = peers.size - 1
    early = peers.call(launch_round, ranks=range(last))
    time.sleep(0.2)
    late = peers.call(launch_round, ranks=[last])
    check_round(case, 0, peers.call(fetch_round), check=False)
    assert max([*early.values(), *late.values()]) < 0.1


def test_no_call_synchronises(ranks: Ranks) -> None:
    case = case_for(ranks)
    ranks.call(open_object, "a2a", case)
    ranks.call(prepare_graphs, case, (8,))
    ranks.call(load_round, 1)
    ranks.call(set_sync_debug, "error")
    try:
        ranks.call(launch_round_where_waiting_is_an_error)
    finally:
        ranks.call(set_sync_debug, "default")
    check_round(case, 1, ranks.call(fetch_round), check=False)


def nodes_of_a_pair(rank: Rank) -> list[int]:
    """A body for one rank at a time: the types of the nodes (CUgraphNodeType) of one dispatch and one combine."""
    one: GraphRound = rank.state["graphs"][8]
    a2a = rank.state["a2a"]
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.current_stream(rank.device).synchronize()
    with torch.cuda.graph(graph, stream=stream_of(rank), capture_error_mode="thread_local"):
        a2a.dispatch(*one.arguments)
        a2a.combine()
    driver = ctypes.CDLL("libcuda.so.1")
    captured, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetNodes(captured, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(captured, nodes, ctypes.byref(count)) == 0
    types = []
    for node in nodes:
        kind = ctypes.c_int(-1)
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        types.append(kind.value)
    return types


def test_a_round_is_two_kernels(ranks: Ranks) -> None:
    """One kernel dispatches, one combines, and no copy hides between them."""
    case = case_for(ranks)
    ranks.call(open_object, "a2a", case)
    ranks.call(prepare_graphs, case, (8,))
    assert ranks.call(nodes_of_a_pair, ranks=[0])[0] == [CU_GRAPH_NODE_TYPE_KERNEL] * 2


def time_launches(rank: Rank, times: int) -> dict[str, float]:
    """A body: microseconds of host time per eager call (medians)."""
    one: GraphRound = rank.state["graphs"][8]
    a2a = rank.state["a2a"]
    samples: dict[str, list[float]] = {"dispatch": [], "combine": []}
    for _ in range(times):
        marks = [time.perf_counter_ns()]
        a2a.dispatch(*one.arguments)
        marks.append(time.perf_counter_ns())
        a2a.combine()
        marks.append(time.perf_counter_ns())
        torch.cuda.current_stream(rank.device).synchronize()
        for name, (begin, end) in zip(samples, itertools.pairwise(marks), strict=True):
            samples[name].append((end - begin) / 1000)
    return {name: statistics.median(values) for name, values in samples.items()}


@pytest.mark.timed
def test_time_of_a_launch(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    """For information: prints what a call costs the host; only a gross excess fails."""
    case = case_for(ranks)
    ranks.call(open_object, "a2a", case)
    ranks.call(prepare_graphs, case, (8,))
    micros = ranks.call(time_launches, 200)[0]
    with capsys.disabled():
        print(f"\nhost us per call, ep{ranks.size}: " + ", ".join(f"{name} {us:.1f}" for name, us in micros.items()))
    if ranks.size == 1:
        assert micros["dispatch"] < 1000


class KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def grid_of(rank: Rank, call: Callable[[], object]) -> int:
    """CTAs of the one kernel that a call launches."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.current_stream(rank.device).synchronize()
    with torch.cuda.graph(graph, stream=stream_of(rank), capture_error_mode="thread_local"):
        call()
    driver = ctypes.CDLL("libcuda.so.1")
    captured, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(1)
    node, params = ctypes.c_void_p(), KernelNodeParams()
    assert driver.cuGraphGetNodes(captured, ctypes.byref(node), ctypes.byref(count)) == 0
    assert count.value == 1
    assert driver.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(params)) == 0
    return int(params.grid[0])


def grids_of_halves(rank: Rank, options: dict[str, int]) -> dict[str, int]:
    """A body: CTAs of each half for so many tokens that each takes all SMs that it is given."""
    tokens = 1000
    payload = torch.zeros(tokens, 7168, dtype=torch.uint8, device=rank.device)
    ids = torch.zeros(tokens, 2, dtype=torch.int32, device=rank.device)
    weights = torch.zeros(tokens, 2, device=rank.device)
    with rank.all_to_all(
        max_tokens_per_rank=tokens,
        payloads=[putget.Payload((7168,), torch.uint8)],
        output=putget.Payload((7168,), torch.bfloat16),
        **options,
    ) as a2a:
        halves: dict[str, Callable[[], object]] = {
            "dispatch_start": lambda: a2a.dispatch_start(ids, weights, payload),
            "dispatch_finish": a2a.dispatch_finish,
            "combine_start": a2a.combine_start,
            "combine_finish": a2a.combine_finish,
        }
        return {name: grid_of(rank, half) for name, half in halves.items()}


def test_a_finish_half_takes_the_sms_that_it_is_given() -> None:
    (same,) = run_ranks(1, grids_of_halves, {"num_sms": 4}, mode="thread", device="cuda")
    (more,) = run_ranks(
        1,
        grids_of_halves,
        {"num_sms": 4, "tuning": Tuning(finish_num_sms=48)},
        mode="thread",
        device="cuda",
    )
    (fewer,) = run_ranks(
        1,
        grids_of_halves,
        {"num_sms": 48, "tuning": Tuning(finish_num_sms=4)},
        mode="thread",
        device="cuda",
    )
    assert max(same.values()) == same["dispatch_start"] == same["combine_finish"] == 4
    assert more == same | {"combine_finish": 48}
    assert fewer == same | {"dispatch_start": 48, "combine_start": fewer["combine_start"]}
