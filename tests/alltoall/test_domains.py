"""Rounds across virtual domains: the product's proxies over a network of threads, against the oracle, bit by bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import putget
from putget import reference
from tests.alltoall.test_properties import cases
from tests.harness import Rank, run_ranks
from tests.harness.cases import Case, Round
from tests.harness.compare import check_case, check_round, play, play_round, require_same
from tests.harness.domains import World, in_domains, network, play_many, ragged, ragged_case
from tests.memory.test_workspace import LAYERS, bytes_of, play_layers

# Ranks and the size of a domain; the last domain of five ranks is smaller than the first.
WORLDS = [(4, 2), (8, 2), (8, 4), (5, 3), (8, 1)]
NAMES = ["2x2", "4x2", "2x4", "3+2", "8x1"]


def run_case(case: Case, domain_size: int, body: Callable[..., Any] = play, world: World | None = None) -> list[Any]:
    return (world or World()).run(case.ep_size, domain_size, body, case)


@pytest.mark.parametrize(("ep_size", "domain_size"), WORLDS, ids=NAMES)
def test_ragged_rounds_have_the_bits_of_the_oracle(ep_size: int, domain_size: int, world: World) -> None:
    case = ragged_case(ep_size, domain_size, 40)
    check_case(case, run_case(case, domain_size, world=world))


@pytest.mark.parametrize(("ep_size", "domain_size"), [(4, 2), (5, 3)], ids=["2x2", "3+2"])
def test_sentinel_rows_in_a_domain(ep_size: int, domain_size: int, world: World) -> None:
    """Rows that a domain sums for its own tokens; an agent gets those for others, copied from outside too."""
    rounds = ragged(ep_size, 30, 3, 8)
    wide = {"payloads": (((24,), torch.bfloat16),), "output": ((24,), torch.bfloat16)}
    case = in_domains(Case(ep_size, rounds, num_experts=ep_size, top_k=4, sentinel_rows=True, **wide), domain_size)
    check_case(case, run_case(case, domain_size, world=world))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("ep_size", "domain_size"), WORLDS, ids=NAMES)
def test_sums_of_other_domains_come_quantised(ep_size: int, domain_size: int, dtype: torch.dtype, sim: World) -> None:
    """272 elements are two blocks of a scale, and a part of one."""
    rows = ((272,), dtype)
    many = {"num_experts": 2 * ep_size + 1, "top_k": 5, "max_tokens_per_rank": 9}
    case = Case(ep_size, ragged(ep_size, 20, 4, 9), payloads=(rows,), output=rows, wire=torch.float8_e4m3fn, **many)
    case = in_domains(case, domain_size)
    check_case(case, run_case(case, domain_size, world=sim))


def test_quantised_sums_cross_every_network(world: World) -> None:
    """Rows of a real model, in more than one write."""
    rows = ((7168,), torch.bfloat16)
    case = Case(2, ragged(2, 6, 1, 200), max_tokens_per_rank=200, output=rows, wire=torch.float8_e4m3fn)
    case = in_domains(case, 1)
    check_case(case, run_case(case, 1, world=world))


def test_quantised_sums_into_memory_that_is_not_aligned(sim: World) -> None:
    def body(rank: Rank, dtype: torch.dtype) -> torch.Tensor:
        options = {"num_experts": 2, "output": putget.Payload((256,), dtype), "combine_dtype": torch.float8_e4m3fn}
        ids = torch.tensor([[0, 1], [1 - rank.rank, -1]], dtype=torch.int32, device=rank.device)
        out = torch.zeros(2 * 256 + 1, dtype=dtype, device=rank.device)[1:].view(2, 256)
        with rank.all_to_all(**options) as a2a:
            a2a.dispatch(ids, torch.ones(2, 2, device=rank.device), torch.ones(2, 4, device=rank.device))
            a2a.combine_input.copy_(torch.arange(256, dtype=dtype) - 100.5 * rank.rank)
            return a2a.combine(out=out, addend=out.clone()).cpu()

    for dtype in (torch.bfloat16, torch.float32):
        written = [torch.arange(256, dtype=dtype) - 100.5 * rank for rank in range(2)]
        far = [reference.quantised(rows) for rows in written]
        for rank, got in enumerate(sim.run(2, 1, body, dtype)):
            assert torch.equal(got[0], (written[rank].float() + far[1 - rank]).to(dtype))
            assert torch.equal(got[1], far[1 - rank].to(dtype))


def test_bytes_of_quantised_sums(sim: World) -> None:
    def body(rank: Rank) -> tuple[int, int, int, int]:
        wide = {"output": putget.Payload((256,), torch.bfloat16), "num_experts": 2}
        with rank.all_to_all(**wide) as plain, rank.all_to_all(**wide, combine_dtype=torch.float8_e4m3fn) as low:
            sizes = [int(str(a2a).splitlines()[-1].split()[0]) for a2a in (plain, low)]
            assert plain.workspace.num_bytes == low.workspace.num_bytes
            return plain.combine_row_bytes, low.combine_row_bytes, sizes[0], sizes[1]

    tokens = 8  # max_tokens_per_rank
    for plain, low, before, now in sim.run(2, 1, body):
        assert (plain, low) == (512, 256 + 2 * 4 + 8)
        # Returns and landing have smaller rows, and sums lie elsewhere before they are quantised.
        assert now - before == tokens * (512 - 2 * (plain - low))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_any_shape_and_routing(data: st.DataObject) -> None:
    case = data.draw(cases().filter(lambda case: case.ep_size > 1))
    domain_size = data.draw(st.integers(1, case.ep_size - 1))
    case = in_domains(case, domain_size)
    check_case(case, run_case(case, domain_size))


@pytest.mark.parametrize("repeats", [5, pytest.param(50, marks=pytest.mark.soak)], ids=["hundred", "thousand"])
@pytest.mark.parametrize(("ep_size", "domain_size"), [(4, 2), (5, 3)], ids=["2x2", "3+2"])
def test_many_rounds_repeat_their_bits(ep_size: int, domain_size: int, repeats: int, world: World) -> None:
    case = in_domains(Case(ep_size, ragged(ep_size, 20, 5, 4), top_k=3), domain_size)
    results = world.run(ep_size, domain_size, play_many, case, repeats, timeout=200)
    assert results == [0] * ep_size


def test_a_message_of_several_chunks(world: World) -> None:
    """300 tokens are 3 chunks of at most 128 rows."""
    case = Case(4, (Round(1, (300, 0, 129, 128)), Round(2, (1, 300, 300, 300))), max_tokens_per_rank=300, top_k=4)
    case = in_domains(case, 2)
    check_case(case, run_case(case, 2, world=world))


def test_objects_take_turns_on_one_communicator(world: World) -> None:
    """Two objects that are open together, and more than a generation has, one after the other."""

    def body(rank: Rank, case: Case) -> list[Any]:
        with rank.all_to_all(**case.options()) as first, rank.all_to_all(**case.options()) as second:
            for index in range(len(case.rounds)):
                outcomes = [play_round(a2a, rank, case, index) for a2a in (first, second)]
        for _ in range(64):
            rank.all_to_all(**case.options()).close()
        with rank.all_to_all(**case.options()) as last:
            return [*outcomes[-1:], play_round(last, rank, case, len(case.rounds) - 1)]

    case = in_domains(Case(2, ragged(2, 5, 3, 8)), 1)
    final = replace(case, rounds=case.rounds[-1:] * 2)
    check_case(final, run_case(case, 1, body, world))


# --- objects that share a workspace


def test_objects_of_different_shapes_share_a_workspace(world: World) -> None:
    """Layers by turns, in any order. Rounds that one leaves open end with the dispatch of another."""
    order = (0, 1, 2, 0, 0, 1, 1, 2, 1, 0, 2, 2, 2, 0, 1, 2, 1, 0)
    cases = tuple(in_domains(case, 2) for case in LAYERS)
    num_bytes = 2 * max(bytes_of(case) for case in cases)
    results = world.run(3, 2, play_layers, cases, order, num_bytes)
    for layer, case in enumerate(cases):
        for index in range(len(case.rounds)):
            check_round(case, index, {rank: outcomes[layer][index] for rank, outcomes in enumerate(results)})


def test_a_round_that_another_object_has_ended_is_not_combined(provider: str) -> None:
    """It is misuse on every rank, and heals as any fault."""

    def body(rank: Rank) -> tuple[str, float]:
        ids, weights, rows = torch.tensor([[0, 2]], dtype=torch.int32), torch.ones(1, 2), torch.ones(1, 4)
        workspace = putget.Workspace(rank.comm, 1 << 20, device=rank.device, timeout_s=20, warmup_timeout_s=20)
        first, second = (rank.all_to_all(workspace=workspace, timeout_s=20.0) for _ in range(2))
        first.dispatch(ids, weights, rows)
        second.dispatch(ids, weights, rows)
        with pytest.raises(putget.ProtocolMisuse) as raised:
            first.combine()
        workspace.set_active_ranks([True] * 2)
        second.dispatch(ids, weights, rows)
        first.dispatch(ids, weights, rows)
        first.combine_input.fill_(2.0)
        total = first.combine().sum().item()
        for owner in (first, second, workspace):
            owner.close()
        return str(raised.value), total

    for words, total in run_ranks(2, body, mode="thread", timeout=60, network=network(1, provider)):
        assert "no dispatch came before it" in words
        assert total == 4 * (2.0 + 2.0)


def test_objects_that_only_some_ranks_have_are_told() -> None:
    def body(rank: Rank) -> str:
        workspace = putget.Workspace(rank.comm, 1 << 20, device=rank.device, timeout_s=20, warmup_timeout_s=20)
        objects = [rank.all_to_all(workspace=workspace) for _ in range(2)]
        objects[rank.rank].close()
        with pytest.raises(ValueError, match="the workspace has 1 objects on rank") as raised:
            workspace.set_active_ranks([True] * 2)
        for owner in (*objects, workspace):
            owner.close()
        return str(raised.value)

    for words in run_ranks(2, body, mode="thread", timeout=60, network=network(1)):
        assert "close the same ones on all ranks" in words


def test_halves_of_two_objects_overlap(world: World) -> None:
    """Start halves in one order on all ranks, finish halves in another one on each."""

    def body(rank: Rank, case: Case) -> list[list[Any]]:
        seen: list[list[Any]] = [[], []]
        with rank.all_to_all(**case.options()) as first, rank.all_to_all(**case.options()) as second:
            objects = (first, second)
            for index in range(len(case.rounds)):
                turn = (0, 1) if (index + rank.rank) % 2 else (1, 0)
                sent = case.sent(index, rank.rank)
                arguments = [part.to(rank.device) for part in (sent.topk_ids, sent.topk_weights, *sent.payloads)]
                rows = case.expert_rows(index, rank.rank).to(rank.device)
                addend = case.addend(index, rank.rank)
                addend = None if addend is None else addend.to(rank.device)
                rank.meet()
                for a2a in objects:
                    a2a.dispatch_start(*arguments)
                for which in turn:
                    objects[which].dispatch_finish()
                    objects[which].combine_input.copy_(rows)
                for a2a in objects:
                    a2a.combine_start()
                for which in turn:
                    seen[which].append(objects[which].combine_finish(addend=addend).cpu())
                rank.meet()
        return seen

    rounds = tuple(replace(played, ending="zero_copy") for played in ragged(4, 12, 7, 6))
    case = in_domains(Case(4, rounds, top_k=3), 2)
    seen = run_case(case, 2, body, world)
    for index in range(len(rounds)):
        sent = [case.sent(index, rank) for rank in range(4)]
        routings, _ = reference.dispatch(sent, case.table_of(index), max_rows=[case.max_tokens_per_rank] * 4)
        rows = [case.expert_rows(index, rank) for rank in range(4)]
        for rank, routing in enumerate(routings):
            want = reference.combine(routing, rows, rank, case.addend(index, rank), domain_of=case.domain_of)
            for which in (0, 1):
                require_same(f"round {index} rank {rank} object {which}", seen[rank][which][index], want)


@pytest.mark.parametrize("late", [1, 3])
def test_the_start_half_waits_for_the_rows_of_its_domain(late: int, sim: World) -> None:
    """A rank gives its rows long after the agent of its domain has started: no sum for others is made before."""

    def body(rank: Rank) -> list[float]:
        sums = []
        with rank.all_to_all(num_experts=4, top_k=4, timeout_s=20.0) as a2a:
            ids = torch.arange(4, dtype=torch.int32).expand(2, 4).contiguous().to(rank.device)
            ones = torch.ones(2, 4, device=rank.device)
            rank.meet()
            for number in range(3):
                a2a.dispatch_start(ids, ones, ones)
                a2a.dispatch_finish()
                if rank.rank == late:
                    time.sleep(0.2)
                a2a.combine_input.fill_(10.0**rank.rank * (number + 1))
                a2a.combine_start()
                sums.append(a2a.combine_finish()[1, 3].item())
        return sums

    assert sim.run(4, 2, body) == [[1111.0, 2222.0, 3333.0]] * 4


def test_halves_out_of_turn_are_misuse() -> None:
    """Refused here, before any effect: the round goes on."""

    def body(rank: Rank) -> float:
        ids, weights, rows = torch.tensor([[0, 1]], dtype=torch.int32), torch.ones(1, 2), torch.ones(1, 4)
        with rank.all_to_all(num_experts=2) as a2a:
            with pytest.raises(putget.ProtocolMisuse):
                a2a.dispatch_finish()
            a2a.dispatch_start(ids, weights, rows)
            for call in (lambda: a2a.dispatch_start(ids, weights, rows), a2a.combine_start, a2a.release):
                with pytest.raises(putget.ProtocolMisuse):
                    call()
            a2a.dispatch_finish()
            a2a.combine_input.fill_(2)
            a2a.combine_start()
            for call in (a2a.combine, a2a.combine_start, a2a.release, a2a.dispatch_finish):
                with pytest.raises(putget.ProtocolMisuse):
                    call()
            return a2a.combine_finish()[0, 0].item()

    assert run_ranks(2, body, mode="thread", network=network(1)) == [4.0, 4.0]


def test_rows_by_expert_cross_domains(sim: World) -> None:
    """Whole numbers, whose sums have no rounding: each token gets its own row, times what its experts are worth."""

    def body(rank: Rank) -> bool:
        generator = torch.Generator().manual_seed(rank.rank)
        good = []
        with rank.all_to_all(top_k=3) as a2a:
            for _ in range(5):
                ids = torch.randint(-1, 2 * rank.size, (6, 3), generator=generator).to(rank.device)
                rows = torch.randint(10, (6, 4), generator=generator).float().to(rank.device)
                weights = (ids + 1).float()
                want = rows * (ids + 1).sum(1, keepdim=True)
                rank.meet()
                received = a2a.dispatch(ids, weights, rows)
                layout = received.expert_major()
                out = a2a.combine(layout.payloads[0].clone(), layout=layout)
                good.append(torch.equal(out, want))
        return all(good)

    assert sim.run(4, 2, body) == [True] * 4


def with_another_table(rank: Rank, changed_in: tuple[int, ...], halves: bool) -> list[str]:
    """A body: in some rounds rank 1 gives an expert of rank 3 to rank 2; what check() says at the end of each."""
    said = []
    ids, weights, rows = torch.tensor([[0, 4], [2, 6]], dtype=torch.int32), torch.ones(2, 2), torch.ones(2, 4)
    with rank.all_to_all(num_experts=8) as a2a:
        for number in range(4):
            if rank.rank == 1:
                a2a.expert_to_rank[7] = 2 if number in changed_in else 3
            if halves:
                a2a.dispatch_start(ids, weights, rows)
                a2a.dispatch_finish()
            else:
                a2a.dispatch(ids, weights, rows)
            a2a.combine()
            try:
                a2a.check()
                said.append("")
            except putget.ProtocolMisuse as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("halves", [False, True])
def test_tables_that_differ_between_domains_are_counted_by_source(halves: bool) -> None:
    """In the round itself, by the message's header: rank 1 has others than ranks 2 and 3. Rank 0 has its own domain's
    word, in which the experts of other domains are none.
    """
    found = run_ranks(4, with_another_table, (1, 2), halves, mode="thread", network=network(2))
    assert found[0] == [""] * 4
    for rank, sources in ((1, (2, 3)), (2, (1,)), (3, (1,))):
        assert found[rank][0] == found[rank][3] == "", found[rank]
        for number in (1, 2):
            said = found[rank][number]
            assert said.startswith(f"expert_to_rank was another one than on rank {rank} on "), said
            for source in sources:
                assert f"rank {source} in 1 rounds, in which 1 rows came from it" in said, said
            assert said.count("rows came") == len(sources)


def test_domains_of_a_communicator() -> None:
    comms = putget.Communicator.local(5, network=network(3))
    assert comms[4].domains == ((0, 1, 2), (3, 4))
    assert comms[4].near_ranks == (3, 4)
    for comm in comms:
        comm.close()
    before = threading.active_count()
    (alone,) = putget.Communicator.local(1, network=network(3))
    assert alone.domains == ((0,),)
    assert alone.network is None
    alone.close()
    assert threading.active_count() == before


def test_text_of_an_object_counts_network_memory() -> None:
    def body(rank: Rank) -> str:
        with rank.all_to_all() as a2a:
            return str(a2a).splitlines()[-1]

    for line in run_ranks(2, body, mode="thread", network=network(1)):
        number, words = line.split(maxsplit=1)
        assert words == "bytes for other domains"
        assert int(number) > 0
