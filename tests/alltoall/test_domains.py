"""Rounds across virtual domains: the product's proxies over a network of threads, against the oracle, bit by bit."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import putget
from putget import reference
from tests.alltoall.test_properties import cases
from tests.harness import Rank, run_ranks
from tests.harness.cases import COMBINE, DISPATCH, ENDINGS, Case, Round
from tests.harness.compare import check_case, check_round, play, play_round, require_same
from tests.test_workspace import LAYERS, bytes_of, play_layers

# Ranks and the size of a domain; the last domain of five ranks is smaller than the first.
WORLDS = [(4, 2), (8, 2), (8, 4), (5, 3), (8, 1)]
NAMES = ["2x2", "4x2", "2x4", "3+2", "8x1"]


# Networks of threads, and transfer engines over sockets and shared memory.
PROVIDERS = ("sim", "tcp", "shm")


@dataclass(frozen=True)
class World:
    """What joins the domains, and where ranks compute: ranks on CUDA are emulated on one GPU."""

    provider: str = "sim"
    device: str = "cpu"

    def run(self, size: int, domain_size: int, body: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        joined = network(domain_size, self.provider)
        return run_ranks(size, body, *args, mode="thread", device=self.device, timeout=timeout, network=joined)


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> str:
    if request.param != "sim":
        pytest.importorskip("putget_transfer._native", reason="putget_transfer is not built: see `make transfer`")
    return str(request.param)


@pytest.fixture
def world(provider: str, device: str) -> World:
    return World(provider, device)


@pytest.fixture
def sim(device: str) -> World:
    return World("sim", device)


def network(size: int, provider: str = "sim") -> putget.Network:
    return putget.Network(provider, domain_size=size)


def in_domains(case: Case, domain_size: int) -> Case:
    return replace(case, domain_of=network(domain_size).domain_of(case.ep_size))


def ragged(ep_size: int, count: int, seed: int, most: int) -> tuple[Round, ...]:
    """Rounds with few tokens, none on some ranks and in some rounds none at all."""
    generator = torch.Generator().manual_seed(seed)
    rounds = []
    for number in range(count):
        drawn = torch.randint(-most // 2, most + 1, (ep_size,), generator=generator).clamp(min=0)
        tokens = tuple(drawn.tolist()) if number % 7 else (0,) * ep_size
        ending = ENDINGS[int(torch.randint(len(ENDINGS), (1,), generator=generator))]
        halves = tuple(torch.randint(DISPATCH + COMBINE + 1, (ep_size,), generator=generator).tolist())
        rounds.append(Round(seed * 1000 + number, tokens, ending, no_expert=0.2, addend=number % 3 == 0, halves=halves))
    return tuple(rounds)


def ragged_case(ep_size: int, domain_size: int, count: int) -> Case:
    """Such rounds, with rows of two kinds and statistics."""
    case = Case(
        ep_size,
        ragged(ep_size, count, ep_size + domain_size, 9),
        num_experts=2 * ep_size + 1,
        top_k=5,
        max_tokens_per_rank=9,
        payloads=(((24,), torch.bfloat16), ((3,), torch.uint8)),
        output=((24,), torch.bfloat16),
        num_stats=3,
    )
    return in_domains(case, domain_size)


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


def play_many(rank: Rank, case: Case, repeats: int) -> int:
    """A body: plays the rounds of a case again and again; the number of wrong ones."""
    wrong = 0
    with rank.all_to_all(**case.options()) as a2a:
        first = [play_round(a2a, rank, case, index) for index in range(len(case.rounds))]
        for _ in range(repeats - 1):
            for index, want in enumerate(first):
                got = play_round(a2a, rank, case, index)
                same = (got.combined is None) == (want.combined is None)
                if same and got.combined is not None and want.combined is not None:
                    same = torch.equal(got.combined, want.combined)
                wrong += not (same and torch.equal(got.topk_ids, want.topk_ids))
        rank.wait()
        rank.meet()  # as in play
    return wrong


@pytest.mark.parametrize(("ep_size", "domain_size"), [(4, 2), (5, 3)], ids=["2x2", "3+2"])
def test_a_thousand_rounds_repeat_their_bits(ep_size: int, domain_size: int, world: World) -> None:
    case = in_domains(Case(ep_size, ragged(ep_size, 20, 5, 4), top_k=3), domain_size)
    results = world.run(ep_size, domain_size, play_many, case, 50, timeout=200)
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


def shared_then_changed(rank: Rank, case: Case, masks: list[tuple[bool, ...]], meeting: threading.Barrier) -> list[Any]:
    """A body: two objects of a workspace under one mask after the other; one goes in the middle, another comes."""
    outcomes: list[Any] = []
    workspace = putget.Workspace(rank.comm, 2 * bytes_of(case), device=rank.device, timeout_s=20, warmup_timeout_s=20)
    objects = [rank.all_to_all(**case.options(), workspace=workspace) for _ in range(3)]
    objects.pop(1).close()
    objects.append(rank.all_to_all(**case.options(), workspace=workspace))
    for number, mask in enumerate(masks):
        outcomes.append([])
        if mask[rank.rank]:
            if number > 0:
                workspace.set_active_ranks(mask)
            under_it = replace(case, active=mask)
            for index in range(len(case.rounds)):
                outcomes[-1].append(play_round(objects[index % 3], rank, under_it, index))
        meeting.wait(60)
    for owner in (*objects, workspace):
        owner.close()
    return outcomes


def test_active_ranks_change_for_all_objects_of_a_workspace(provider: str) -> None:
    wide = {"payloads": (((24,), torch.bfloat16),), "output": ((24,), torch.bfloat16)}
    case = in_domains(Case(4, ragged(4, 9, 2, 9), num_experts=8, top_k=4, max_tokens_per_rank=9, **wide), 2)
    masks = [only(4, 0, 1, 2, 3), only(4, 0, 1, 2), only(4, 1, 3), only(4, 0, 1, 2, 3)]
    net = network(2, provider)
    meeting = threading.Barrier(4)
    found = run_ranks(4, shared_then_changed, case, masks, meeting, mode="thread", timeout=200, network=net)
    for number, mask in enumerate(masks):
        for index in range(len(case.rounds)):
            held = {rank: found[rank][number][index] for rank in range(4) if mask[rank]}
            check_round(replace(case, active=mask), index, held)


def test_a_round_that_another_object_has_ended_is_not_combined(provider: str) -> None:
    """It is misuse on every rank, and heals as any fault."""

    def body(rank: Rank) -> tuple[str, float]:
        ids, weights, rows = torch.tensor([[0, 2]], dtype=torch.int32), torch.ones(1, 2), torch.ones(1, 4)
        workspace = putget.Workspace(rank.comm, 1 << 20, device=rank.device, timeout_s=5, warmup_timeout_s=5)
        first, second = (rank.all_to_all(workspace=workspace, timeout_s=5.0) for _ in range(2))
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
        workspace = putget.Workspace(rank.comm, 1 << 20, device=rank.device, timeout_s=5, warmup_timeout_s=5)
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


# --- who is named


def outlast(rank: Rank, gone: int, step: str, rounds: int) -> str | None:
    """A body: plays rounds until rank `gone` stops; what the others then raise.

    They keep their objects open for a while: who has left may be missed by those whose deadline comes later.
    """
    a2a = rank.all_to_all(timeout_s=3.0, warmup_timeout_s=20.0, num_experts=rank.size, top_k=rank.size)
    ids = torch.arange(rank.size, dtype=torch.int32).expand(2, rank.size).contiguous().to(rank.device)
    rows, weights = torch.ones(2, 4, device=rank.device), torch.ones(2, rank.size, device=rank.device)
    rank.meet()
    try:
        for number in range(rounds + 1):
            if number == rounds and rank.rank == gone and step == "dispatch":
                return _stop(rank, a2a)
            received = a2a.dispatch(ids, weights, rows)
            if number == rounds and rank.rank == gone:
                return _stop(rank, a2a)
            a2a.combine_input.copy_(received.payloads[0])
            a2a.combine()
            a2a.check()
    except putget.PeerTimeout as error:
        time.sleep(3.0)
        a2a.close()
        return f"{error.phase} {error.missing}"
    a2a.close()
    return None


def _stop(rank: Rank, a2a: putget.AllToAll) -> None:
    """Stands still until the others have given up."""
    time.sleep(7.0)
    a2a.close()


@pytest.mark.parametrize(
    ("ep_size", "domain_size", "step"), [(4, 2, "dispatch"), (4, 2, "combine"), (5, 3, "dispatch")]
)
def test_a_silent_rank_is_named(ep_size: int, domain_size: int, step: str, world: World) -> None:
    gone = ep_size - 1
    raised = world.run(ep_size, domain_size, outlast, gone, step, 5, timeout=60)
    assert raised == [f"{step} ({gone},)"] * gone + [None]


def leave(rank: Rank, gone: int, seen: threading.Barrier) -> str | None:
    """A body: rank `gone` closes its object in the middle; whom the others miss. They leave together: who has left
    may be missed.
    """
    a2a = rank.all_to_all(timeout_s=3.0, num_experts=rank.size, top_k=rank.size)
    ids = torch.arange(rank.size, dtype=torch.int32).expand(2, rank.size).contiguous().to(rank.device)
    rows, weights = torch.ones(2, 4, device=rank.device), torch.ones(2, rank.size, device=rank.device)
    rank.meet()
    for number in range(20):
        if rank.rank == gone and number == 3:
            a2a.close()
            return None
        try:
            a2a.dispatch(ids, weights, rows)
            a2a.combine()
            a2a.check()
        except putget.PeerTimeout as error:
            seen.wait(30)
            a2a.close()
            return str(error.missing)
    raise AssertionError("nobody missed a rank that is gone")


@pytest.mark.parametrize("domain_size", [1, 2])
def test_a_rank_that_has_gone_is_named(domain_size: int, world: World) -> None:
    """At once where a write to it fails; else when the deadline has passed."""
    seen = threading.Barrier(3)
    raised = world.run(4, domain_size, leave, 3, seen, timeout=60)
    assert raised == ["(3,)"] * 3 + [None]


def test_more_rows_than_a_rank_looks_at(world: World) -> None:
    """As in one domain: of a source in another one too."""
    seen = threading.Barrier(2)

    def body(rank: Rank) -> str:
        a2a = rank.all_to_all(timeout_s=10.0)
        tokens = 3 * rank.rank
        ids = torch.zeros(tokens, 2, dtype=torch.int32, device=rank.device)  # all on rank 0
        weights, rows = torch.ones(tokens, 2, device=rank.device), torch.ones(tokens, 4, device=rank.device)
        raised = ""
        rank.meet()
        try:
            a2a.dispatch(ids, weights, rows, max_rows=None if rank.rank else 2)
            a2a.check()
        except putget.CapacityExceeded as error:
            raised = f"{error.source}: {error.rows} of {error.max_rows}"
        seen.wait(30)  # who leaves may not have sent what the other waits for
        with contextlib.suppress(putget.PutgetError):
            a2a.close()
        return raised

    assert world.run(2, 1, body) == ["1: 3 of 2", ""]


# --- other active ranks


class Masks:
    """Active ranks that change; the members of each mask meet by themselves, and all when it is over."""

    def __init__(self, *masks: tuple[bool, ...]) -> None:
        self.masks = masks
        self._over = threading.Barrier(len(masks[0]))
        self._members = [threading.Barrier(sum(mask)) for mask in masks]

    def play(self, rank: Rank, a2a: putget.AllToAll, body: Callable[[Rank, tuple[bool, ...]], Any]) -> list[Any]:
        """What the body gives under each mask; None where the rank is left out."""
        outcomes: list[Any] = []
        for number, mask in enumerate(self.masks):
            outcomes.append(None)
            if mask[rank.rank]:
                if number > 0:
                    a2a.set_active_ranks(mask)
                assert a2a.active_ranks == mask
                me = rank if rank._barrier is None else replace(rank, _barrier=self._members[number])
                outcomes[-1] = body(me, mask)
                rank.wait()
            self._over.wait(60)
        return outcomes


def come_and_go(rank: Rank, case: Case, masks: Masks) -> list[Any]:
    """A body: the rounds of a case under one mask after the other; ranks that are left out wait for their turn."""
    with rank.all_to_all(**case.options()) as a2a:

        def rounds(me: Rank, mask: tuple[bool, ...]) -> list[Any]:
            under_it = replace(case, active=mask)
            return [play_round(a2a, me, under_it, index) for index in range(len(case.rounds))]

        return masks.play(rank, a2a, rounds)


def check_masks(case: Case, masks: Masks, found: list[Any]) -> None:
    """Every round under every mask has the bits of the oracle."""
    for number, mask in enumerate(masks.masks):
        for index in range(len(case.rounds)):
            held = {rank: found[rank][number][index] for rank in range(case.ep_size) if mask[rank]}
            check_round(replace(case, active=mask), index, held)


def only(size: int, *members: int) -> tuple[bool, ...]:
    return tuple(rank in members for rank in range(size))


@pytest.mark.parametrize(
    ("ep_size", "domain_size", "members"),
    [(4, 2, [(0, 1, 2), (1, 3), (0, 1), (2,)]), (5, 3, [(0, 3, 4), (1, 2, 3), (0, 1, 2)]), (3, 1, [(0, 2), (1,)])],
    ids=["2x2", "3+2", "3x1"],
)
def test_active_ranks_come_and_go(ep_size: int, domain_size: int, members: list[Any], world: World) -> None:
    """A rank, agents and whole domains leave, others begin anew, and all come back."""
    rounds = ragged(ep_size, 8, ep_size, 9)
    wide = {"payloads": (((24,), torch.bfloat16),), "output": ((24,), torch.bfloat16)}
    case = in_domains(
        Case(ep_size, rounds, num_experts=2 * ep_size, top_k=4, max_tokens_per_rank=9, **wide), domain_size
    )
    everyone = only(ep_size, *range(ep_size))
    masks = Masks(everyone, *(only(ep_size, *some) for some in members), everyone)
    check_masks(case, masks, world.run(ep_size, domain_size, come_and_go, case, masks, timeout=200))


def test_a_round_that_is_open_ends_with_the_active_ranks(world: World) -> None:
    """Rounds of before leave nothing behind, however they stood."""

    def body(rank: Rank) -> float:
        ids = torch.arange(4, dtype=torch.int32).expand(2, 4).contiguous().to(rank.device)
        weights, rows = torch.ones(2, 4, device=rank.device), torch.ones(2, 4, device=rank.device)
        with rank.all_to_all(num_experts=4, top_k=4, timeout_s=20.0) as a2a:
            for number in range(6):
                rank.meet()
                if number % 3:
                    a2a.dispatch(ids, weights, rows)
                if number % 2:
                    a2a.dispatch_start(ids, weights, rows)
                rank.wait()
                rank.meet()
                a2a.set_active_ranks([True] * 4)
            rank.meet()
            a2a.dispatch(ids, weights, rows)
            a2a.combine_input.fill_(10.0**rank.rank)
            out = a2a.combine()
            rank.wait()
            rank.meet()
            return out[1, 0].item()

    assert world.run(4, 2, body) == [1111.0] * 4


# --- what ends a round differently, and what is refused


def test_ends_that_differ_are_misuse(world: World) -> None:
    def body(rank: Rank) -> str:
        a2a = rank.all_to_all(timeout_s=2.0)
        ids = torch.tensor([[0, 2]], dtype=torch.int32, device=rank.device)
        weights, rows = torch.ones(1, 2, device=rank.device), torch.ones(1, 4, device=rank.device)
        rank.meet()
        try:
            for number in range(3):
                a2a.dispatch(ids, weights, rows)
                if number == 1 and rank.rank == 1:
                    a2a.release()
                else:
                    a2a.combine()
                a2a.check()
        except putget.PutgetError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            with contextlib.suppress(putget.PutgetError):
                a2a.close()
        return ""

    raised = world.run(2, 1, body, timeout=60)
    assert any("ProtocolMisuse" in text and "without combine" in text for text in raised), raised


def test_ranks_that_quantise_differently_are_told() -> None:
    def body(rank: Rank) -> str:
        low = torch.float8_e4m3fn if rank.rank else None
        with pytest.raises(ValueError, match="combine differs between ranks") as caught:
            rank.all_to_all(output=putget.Payload((16,), torch.bfloat16), combine_dtype=low)
        return str(caught.value)

    for text in run_ranks(2, body, mode="thread", network=network(1)):
        assert text.count("as written") == text.count("a scale for 128") == 1, text


def test_rows_that_cannot_be_quantised_are_refused() -> None:
    def body(rank: Rank) -> None:
        with pytest.raises(ValueError, match="output has 20 elements, expected a multiple of 16"):
            rank.all_to_all(output=putget.Payload((20,), torch.bfloat16), combine_dtype=torch.float8_e4m3fn)

    run_ranks(2, body, mode="thread", network=network(1))


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
