"""Expert-major rows on GPUs: whole rows, thousands of tokens, CUDA graphs; bit for bit what the oracle says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import putget
import putget.moe
from putget import reference, reference_moe
from tests.gpu.graphs import capture
from tests.gpu.ranks import Ranks
from tests.harness import Rank
from tests.harness.cases import Case, Round
from tests.harness.compare import require_same
from tests.harness.grouped import check_grouped, flat, grouped_rows, play_grouped

BF16 = torch.bfloat16
TIMEOUT_S = 120.0  # of a command: the oracle's data comes from one CPU core


def check(ranks: Ranks, case: Case, alignments: tuple[int, ...]) -> None:
    outcomes = ranks.call(play_grouped, case, alignments, timeout=TIMEOUT_S)
    check_grouped(case, alignments, [outcomes[rank] for rank in range(ranks.size)])


def test_a_deepseek_layer(ranks: Ranks) -> None:
    size = ranks.size
    sizes = tuple((5 * rank + 1) % 13 for rank in range(size))
    case = Case(
        size,
        (Round(1, sizes), Round(2, tuple(12 - n for n in sizes), addend=True)),
        num_experts=256,
        top_k=8,
        max_tokens_per_rank=12,
        payloads=(((7168,), torch.float8_e4m3fn), ((56,), torch.float32)),
        output=((7168,), BF16),
    )
    check(ranks, case, (16, 16))


def test_thousands_of_tokens(ranks: Ranks) -> None:
    size = ranks.size
    sizes = tuple((2048, 1, 777, 0)[rank % 4] for rank in range(size))
    case = Case(
        size,
        (Round(1, sizes, no_expert=0.02), Round(2, sizes[::-1]), Round(3, (0,) * size)),
        num_experts=61,
        top_k=8,
        max_tokens_per_rank=2048,
        payloads=(((4,), torch.int32), ((3,), torch.uint8)),
        output=((8,), torch.float32),
    )
    check(ranks, case, (1, 1, 1))


def replay(rank: Rank, case: Case, alignment: int) -> list[dict[str, Any]]:
    """A body: one graph of dispatch, grouping and combine, replayed with the data of every round."""
    batch = case.max_tokens_per_rank
    with rank.all_to_all(**case.options()) as a2a:
        ids = torch.full((batch, case.top_k), -1, dtype=torch.int32, device=rank.device)
        weights = torch.zeros(batch, case.top_k, device=rank.device)
        payloads = [torch.zeros(batch, *row, dtype=kind, device=rank.device) for row, kind in case.payloads]
        memory = a2a.expert_major_memory(alignment)
        rows = torch.zeros(memory.capacity, *case.output[0], dtype=case.output[1], device=rank.device)
        seen: dict[str, torch.Tensor] = {}

        def record() -> None:
            grouped = a2a.dispatch(ids, weights, *payloads).expert_major(alignment, memory=memory)
            seen["positions"] = grouped.positions.clone()
            seen["payload"] = grouped.payloads[0].clone()
            seen["combined"] = a2a.combine(rows, layout=grouped)

        rank.meet()
        record()
        rank.meet()
        torch.cuda.current_stream(rank.device).synchronize()
        rank.meet()
        graph = capture(rank, record)
        outcomes = []
        for index in range(len(case.rounds)):
            sent = case.sent(index, rank.rank)
            for fixed, new in zip(
                (ids, weights, *payloads), (sent.topk_ids, sent.topk_weights, *sent.payloads), strict=True
            ):
                fixed.copy_(new)
            rows.copy_(grouped_rows(case, index, rank.rank, memory.capacity))
            torch.cuda.current_stream(rank.device).synchronize()
            rank.meet()
            graph.replay()
            outcomes.append({name: value.cpu() for name, value in seen.items()})
            rank.meet()
        a2a.check()
        return outcomes


def test_a_graph_replayed_with_new_data(ranks: Ranks) -> None:
    size, batch = ranks.size, 9
    shares = (0.0, 0.9, 1.1, 0.3)  # of ids that are no expert
    case = Case(
        size,
        tuple(Round(40 + index, (batch,) * size, no_expert=share) for index, share in enumerate(shares)),
        num_experts=24,
        top_k=6,
        max_tokens_per_rank=batch,
        payloads=(((48,), torch.float32),),
        output=((40,), BF16),
    )
    got = ranks.call(replay, case, 8, timeout=TIMEOUT_S)
    for index in range(len(shares)):
        sent = [case.sent(index, rank) for rank in range(size)]
        routings, arrived = reference.dispatch(sent, case.table_of(index), max_rows=batch)
        summed = []
        for rank, came in enumerate(arrived):
            want = reference_moe.expert_major(
                came.topk_ids, came.topk_weights, came.num_tokens, case.table_of(index), rank, 8
            )
            require_same(f"round {index} rank {rank}: positions", got[rank][index]["positions"], want.positions)
            here = want.source_rows >= 0
            wanted = flat(came.payloads[0])[want.source_rows[here].long()]
            require_same(f"round {index} rank {rank}: payload", got[rank][index]["payload"][here], wanted)
            rows = grouped_rows(case, index, rank, len(here))
            done = reference_moe.finalize(rows, want.positions, flat(came.topk_weights))
            summed.append(done.unflatten(0, (batch, size)).transpose(0, 1))
        for rank in range(size):
            wanted = reference.combine(routings[rank], summed, rank)
            require_same(f"round {index} rank {rank}: combined", got[rank][index]["combined"], wanted)


def capture_first_use(rank: Rank) -> str:
    """A body: grouping for the first time while a graph is captured."""
    with rank.all_to_all() as a2a:
        arguments = (
            torch.zeros(2, 2, dtype=torch.int32, device=rank.device),
            torch.zeros(2, 2, device=rank.device),
            torch.zeros(2, 4, device=rank.device),
        )
        a2a.dispatch(*arguments)
        a2a.release()
        message = ""

        def record() -> None:
            nonlocal message
            received = a2a.dispatch(*arguments)
            try:
                received.expert_major(2)
            except putget.ProtocolMisuse as error:
                message = str(error)
            a2a.release()

        capture(rank, record)
        return message


def test_nothing_is_allocated_while_a_graph_is_captured() -> None:
    from tests.gpu.ranks import shared_ranks

    found = shared_ranks(1).call(capture_first_use)[0]
    assert found.startswith("expert_major: nothing is allocated for alignment 2 and max_rows 8 yet")


def test_activation_in_a_graph() -> None:
    """The number of rows is read at each replay."""
    x = torch.randn(50, 256, device="cuda").to(BF16)
    count = torch.tensor([50], dtype=torch.int32, device="cuda")
    out = torch.empty(50, 128, dtype=BF16, device="cuda")
    putget.moe.gated_activation(x, num_valid=count, out=out)
    whole = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        putget.moe.gated_activation(x, num_valid=count, out=out)
    for rows in (0, 1, 33, 50):
        out.fill_(9)
        count.fill_(rows)
        graph.replay()
        assert torch.equal(out[:rows], whole[:rows])
        assert (out[rows:] == 9).all()


@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_activation_equals_the_cpu_within_the_last_place(gate: Any) -> None:
    x = torch.randn(300, 4096, generator=torch.Generator().manual_seed(1)).to(BF16) * 3
    here = putget.moe.gated_activation(x, gate).float()
    there = putget.moe.gated_activation(x.cuda(), gate).cpu().float()
    size = (x[:, :2048].float() * x[:, 2048:].float()).abs()
    assert ((here - there).abs() <= here.abs() * 2**-7 + size * 1e-5).all()
    assert (here != there).float().mean() < 0.05  # gelu of large negative values cancels
