"""Dispatch, experts and combine in CUDA graphs: captured once, replayed with new data, other graphs on every rank."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import putget
from tests.gpu.graphs import GraphRound, capture
from tests.gpu.ranks import Ranks, stream_of
from tests.harness import Rank
from tests.harness.cases import Case, Round
from tests.harness.compare import Outcome, check_round, play_round

CAPACITY = 16


def case_of(ep_size: int, rounds: tuple[Round, ...], **changes: Any) -> Case:
    """A small layer with rows of several access widths."""
    case = Case(
        ep_size,
        rounds,
        num_experts=3 * ep_size + 1,
        top_k=4,
        max_tokens_per_rank=CAPACITY,
        payloads=(((128,), torch.float8_e4m3fn), ((3,), torch.float32), ((5,), torch.uint8)),
        output=((72,), torch.bfloat16),
    )
    return replace(case, **changes)


def padded_rounds(ep_size: int, count: int, batches: tuple[int, ...], seed: int = 0) -> tuple[Round, ...]:
    """Rounds in which every rank has a batch from `batches` and 0 to that many valid tokens."""
    rng = random.Random(seed)
    rounds = []
    for index in range(count):
        sizes = tuple(rng.choice(batches) for _ in range(ep_size))
        valid = tuple(rng.choice((0, size, rng.randint(0, size))) for size in sizes)
        rounds.append(Round(100 + index, sizes, num_valid=valid, no_expert=0.1))
    return tuple(rounds)


def open_object(rank: Rank, name: str, case: Case, options: dict[str, Any] | None = None) -> None:
    """A body: makes an AllToAll that later commands find under `name`."""
    a2a = rank.all_to_all(**{**case.options(), **(options or {})})
    rank.state.setdefault("objects", []).append(a2a)
    rank.state[name] = a2a


def prepare_graphs(rank: Rank, case: Case, batches: tuple[int, ...]) -> None:
    """A body: one graph per batch size, each run once eagerly; ends with all of this rank's kernels done."""
    rank.state["graphs"] = {batch: GraphRound(rank, rank.state["a2a"], case, batch) for batch in batches}
    for graph in rank.state["graphs"].values():
        graph.record()
    torch.cuda.current_stream(rank.device).synchronize()


def capture_graphs(rank: Rank) -> None:
    """A body for one rank at a time: emulated ranks share one allocator, which knows one capture."""
    for graph in rank.state["graphs"].values():
        graph.capture()


def replay_round(rank: Rank, case: Case, index: int) -> Outcome:
    """A body: new data into this rank's graph of the round's batch size, then one replay."""
    graph: GraphRound = rank.state["graphs"][case.rounds[index].num_tokens[rank.rank]]
    graph.load(index)
    rank.meet()  # as often as play_round, which other ranks may be running
    graph.replay()
    rank.meet()
    return graph.outcome()


def set_up(ranks: Ranks, case: Case, batches: tuple[int, ...], options: dict[str, Any] | None = None) -> None:
    """An object, and one graph per batch size, on every rank."""
    ranks.call(open_object, "a2a", case, options)
    ranks.call(prepare_graphs, case, batches)
    for rank in range(ranks.size):
        ranks.call(capture_graphs, ranks=[rank])


def replay_all(ranks: Ranks, case: Case) -> None:
    for index in range(len(case.rounds)):
        check_round(case, index, ranks.call(replay_round, case, index), check=False)


def test_one_graph_replayed_with_new_data(ranks: Ranks) -> None:
    rounds = tuple(Round(index, (8,) * ranks.size, no_expert=0.05) for index in range(5))
    case = case_of(ranks.size, rounds, num_stats=37)
    set_up(ranks, case, (8,))
    replay_all(ranks, case)


def test_ranks_replay_graphs_of_different_batch_sizes(ranks: Ranks) -> None:
    batches = (0, 1, 4, CAPACITY)
    case = case_of(ranks.size, padded_rounds(ranks.size, 12, batches))
    set_up(ranks, case, batches)
    replay_all(ranks, case)


def test_expert_to_rank_changes_between_replays(ranks: Ranks) -> None:
    rng = random.Random(5)
    experts = 3 * ranks.size + 1
    tables = [tuple(rng.randrange(ranks.size) for _ in range(experts)) for _ in range(3)]
    rounds = tuple(
        Round(index, (CAPACITY,) * ranks.size, table=tables[index // 2] if index % 2 else None) for index in range(6)
    )
    case = case_of(ranks.size, rounds)
    set_up(ranks, case, (CAPACITY,))
    replay_all(ranks, case)


def mixed_round(rank: Rank, case: Case, index: int) -> Outcome:
    """A body: half of the ranks replay, the others call eagerly, and they change places every round."""
    if (rank.rank + index) % 2 == 0:
        return replay_round(rank, case, index)
    return play_round(rank.state["a2a"], rank, case, index, check=False)


def test_graphs_and_eager_calls_meet(ranks: Ranks) -> None:
    rounds = tuple(Round(index, tuple((index + rank) % 3 * 8 for rank in range(ranks.size))) for index in range(8))
    case = case_of(ranks.size, rounds)
    set_up(ranks, case, (0, 8, 16))
    for index in range(len(rounds)):
        check_round(case, index, ranks.call(mixed_round, case, index), check=False)


def replay_many(rank: Rank, case: Case, index: int, times: int) -> Outcome:
    """A body: the same replay over and over, enqueued with nothing in between."""
    graph: GraphRound = rank.state["graphs"][case.rounds[index].num_tokens[rank.rank]]
    graph.load(index)
    for _ in range(times):
        graph.replay()
    return graph.outcome()


def test_replays_enqueued_back_to_back(ranks: Ranks) -> None:
    case = case_of(ranks.size, padded_rounds(ranks.size, 2, (4, CAPACITY), seed=3))
    set_up(ranks, case, (4, CAPACITY))
    for index in range(2):
        check_round(case, index, ranks.call(replay_many, case, index, 30), check=False)


# Layers of different hidden size, payload count and top_k over one workspace, as one model has them.
def layers_of(ep_size: int) -> tuple[Case, ...]:
    rounds = tuple(Round(40 + index, (8,) * ep_size) for index in range(4))
    return (
        case_of(ep_size, rounds),
        case_of(ep_size, rounds, payloads=(((272,), torch.bfloat16),), output=((272,), torch.bfloat16)),
        case_of(ep_size, rounds, top_k=2, payloads=(((9,), torch.float16),), output=((500,), torch.float32)),
    )


def open_layers(rank: Rank, cases: tuple[Case, ...]) -> None:
    """A body: one workspace, one AllToAll per layer, each run once eagerly."""
    needed = sum(bytes_of(case) for case in cases)
    workspace = putget.Workspace(rank.comm, needed, device=rank.device, timeout_s=20.0, warmup_timeout_s=20.0)
    objects = [rank.all_to_all(**case.options(), workspace=workspace) for case in cases]
    rank.state["objects"] = [*objects, workspace]
    rank.state["layers"] = [GraphRound(rank, a2a, case, 8) for a2a, case in zip(objects, cases, strict=True)]
    for layer in rank.state["layers"]:
        layer.record()
    torch.cuda.current_stream(rank.device).synchronize()


def bytes_of(case: Case) -> int:
    options = case.options()
    return putget.workspace_bytes(
        ep_size=case.ep_size,
        max_tokens_per_rank=case.max_tokens_per_rank,
        top_k=case.top_k,
        num_experts=case.num_experts,
        payloads=options["payloads"],
        output=options["output"],
    )


def capture_layers(rank: Rank) -> None:
    """A body for one rank at a time: all layers, twice over, in one graph."""

    def record() -> None:
        for layer in rank.state["layers"] * 2:
            layer.record()

    rank.state["graph"] = capture(rank, record)


def replay_layers(rank: Rank, index: int) -> list[Outcome]:
    """A body: new data for every layer, one replay of the whole model."""
    for layer in rank.state["layers"]:
        layer.load(index)
    rank.state["graph"].replay()
    return [layer.outcome() for layer in rank.state["layers"]]


def test_layers_of_different_hidden_size_share_a_workspace_in_one_graph(ranks: Ranks) -> None:
    cases = layers_of(ranks.size)
    ranks.call(open_layers, cases)
    for rank in range(ranks.size):
        ranks.call(capture_layers, ranks=[rank])
    for index in range(4):
        results = ranks.call(replay_layers, index)
        for layer, case in enumerate(cases):
            check_round(case, index, {rank: outcomes[layer] for rank, outcomes in results.items()}, check=False)


def open_two(rank: Rank, cases: tuple[Case, Case], batch: int) -> None:
    """A body: two objects with workspaces of their own, each run once eagerly."""
    for name, case in zip(("first", "second"), cases, strict=True):
        open_object(rank, name, case)
    rank.state["pair"] = [
        GraphRound(rank, rank.state[name], case, batch) for name, case in zip(("first", "second"), cases, strict=True)
    ]
    for one in rank.state["pair"]:
        one.record()
    torch.cuda.current_stream(rank.device).synchronize()


def splits_of_combine(rank: Rank, batch: int) -> int:
    """A body: more than 1 where all CTAs of the first object's combine send."""
    return rank.state["first"].launches(batch)[1].splits


def capture_two(rank: Rank) -> None:
    """A body for one rank at a time: a graph per object."""
    for one in rank.state["pair"]:
        one.capture()


def replay_two(rank: Rank, index: int) -> list[Outcome]:
    """A body: both graphs on streams of their own; odd ranks launch them in the other order."""
    order = (0, 1) if rank.rank % 2 == 0 else (1, 0)
    for which in order:
        rank.state["pair"][which].load(index)
    torch.cuda.current_stream(rank.device).synchronize()
    for which in order:
        with torch.cuda.stream(stream_of(rank, 1 + which)):
            rank.state["pair"][which].replay()
    for which in order:
        stream_of(rank, 1 + which).synchronize()
    return [one.outcome() for one in rank.state["pair"]]


@pytest.mark.parametrize("fills", [False, True], ids=["small", "fills_a_gpu"])
def test_independent_graphs_launched_in_different_orders(peers: Ranks, fills: bool) -> None:
    """Also combines of which each fills a GPU until half of its CTAs have sent their rows and left."""
    batch = 128 if fills else 8
    rounds = tuple(Round(70 + index, (batch,) * peers.size) for index in range(3 if fills else 6))
    cases = (case_of(peers.size, rounds), case_of(peers.size, rounds, output=((40,), torch.float16)))
    if fills:
        large = case_of(
            peers.size,
            rounds,
            max_tokens_per_rank=batch,
            output=((7168,), torch.bfloat16),
            wire=torch.float8_e4m3fn,
        )
        cases = (large, large)
    peers.call(open_two, cases, batch)
    if fills and peers.size == 2 <= torch.cuda.device_count():  # emulated ranks get a part of their GPU
        assert list(peers.call(splits_of_combine, batch).values()) == [2, 2]
    for rank in range(peers.size):
        peers.call(capture_two, ranks=[rank])
    for index in range(len(rounds)):
        results = peers.call(replay_two, index)
        for which, case in enumerate(cases):
            check_round(case, index, {rank: outcomes[which] for rank, outcomes in results.items()}, check=False)


def capture_releases(rank: Rank, case: Case) -> None:
    """A body for one rank at a time: a graph whose rounds end by release, by the next dispatch, and by combine."""
    a2a = rank.state["a2a"]
    one: GraphRound = rank.state["graphs"][8]

    def record() -> None:
        a2a.dispatch(*one.arguments)
        a2a.release()
        a2a.dispatch(*one.arguments)
        one.record()

    one.graph = capture(rank, record)


def test_rounds_without_combine_inside_a_graph(ranks: Ranks) -> None:
    rounds = tuple(Round(index, (8,) * ranks.size) for index in range(4))
    case = case_of(ranks.size, rounds)
    ranks.call(open_object, "a2a", case)
    ranks.call(prepare_graphs, case, (8,))
    for rank in range(ranks.size):
        ranks.call(capture_releases, case, ranks=[rank])
    replay_all(ranks, case)
