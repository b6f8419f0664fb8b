"""Rounds across domains whose ranks are processes: transfer engines over sockets and shared memory; who is named."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import putget
from putget.group import meeting, networks
from tests.harness import Rank, run_ranks
from tests.harness.cases import Case, Round
from tests.harness.compare import check_case, play
from tests.harness.domains import in_domains, outlast, play_many, ragged
from tests.harness.processes import RankProcesses, kill
from tests.harness.run import fresh_ranks

pytest.importorskip("putget_transfer._native", reason="putget_transfer is not built: see `make transfer`")

PROVIDERS = pytest.mark.parametrize("provider", ["tcp", "host"])
WORLDS = pytest.mark.parametrize(("ep_size", "domain_size"), [(4, 2), (5, 3)], ids=["2x2", "3+2"])
WIDE: dict[str, Any] = {"payloads": (((24,), torch.bfloat16),), "output": ((24,), torch.bfloat16)}


def check(case: Case, network: putget.Network) -> None:
    assert network.domain_size is not None
    case = in_domains(case, network.domain_size)
    check_case(case, run_ranks(case.ep_size, play, case, timeout=120, network=network))


@PROVIDERS
@WORLDS
def test_ragged_rounds_have_the_bits_of_the_oracle(provider: str, ep_size: int, domain_size: int) -> None:
    rounds = ragged(ep_size, 40, ep_size + domain_size, 9)
    case = Case(ep_size, rounds, num_experts=2 * ep_size + 1, top_k=5, max_tokens_per_rank=9, **WIDE)
    check(case, putget.Network(provider, domain_size=domain_size))


@WORLDS
def test_sentinel_rows_in_a_domain(ep_size: int, domain_size: int) -> None:
    rounds = ragged(ep_size, 30, 3, 8)
    case = Case(ep_size, rounds, num_experts=ep_size, top_k=4, sentinel_rows=True, **WIDE)
    check(case, putget.Network("tcp", domain_size=domain_size))


@PROVIDERS
def test_a_message_of_several_chunks(provider: str) -> None:
    rounds = (Round(1, (300, 0, 129, 128)), Round(2, (1, 300, 300, 300)))
    case = Case(4, rounds, max_tokens_per_rank=300, top_k=4)
    check(case, putget.Network(provider, domain_size=2))


def test_several_nics() -> None:
    rounds = (Round(1, (300, 0, 129, 128)), Round(2, (1, 300, 300, 300)))
    case = Case(4, rounds, max_tokens_per_rank=300, top_k=4)
    check(case, putget.Network("tcp", nics=("127.0.0.1", "127.0.0.1"), domain_size=2))


@PROVIDERS
def test_hundreds_of_rounds_repeat_their_bits(provider: str) -> None:
    case = in_domains(Case(4, ragged(4, 20, 5, 4), top_k=3), 2)
    network = putget.Network(provider, domain_size=2)
    assert run_ranks(4, play_many, case, 20, timeout=200, network=network) == [0] * 4


@PROVIDERS
def test_a_silent_rank_is_named(provider: str) -> None:
    network = putget.Network(provider, domain_size=2)
    raised = run_ranks(4, outlast, 3, "combine", 5, timeout=90, network=network)
    assert raised == ["combine (3,)"] * 3 + [None]


# --- hosts


def on_hosts(rank: Rank, size: int, provider: str, case: Case) -> Any:
    """A body: as if every block of ``size`` ranks had a host of its own."""
    meeting.host_identity = lambda: f"host {rank.rank // size}"
    with putget.Communicator(network=putget.Network(provider)) as comm:
        assert comm.domains == tuple(tuple(range(at, min(at + size, rank.size))) for at in range(0, rank.size, size))
        return play(Rank(rank.rank, rank.size, rank.device, _comm=comm), case)


@pytest.fixture
def five() -> Iterator[RankProcesses]:
    with fresh_ranks(5) as ranks:
        yield ranks


@pytest.fixture
def four() -> Iterator[RankProcesses]:
    with fresh_ranks(4) as ranks:
        yield ranks


def test_each_host_is_a_domain(five: RankProcesses) -> None:
    """Ranks of several hosts meet over TCP, those of one over UNIX sockets; "auto" is tcp then."""
    case = in_domains(Case(5, ragged(5, 20, 4, 8), num_experts=11, top_k=5, **WIDE), 3)
    results = five.call(on_hosts, 3, "auto", case, timeout=120)
    check_case(case, [results[rank] for rank in range(5)])


def without_a_network(rank: Rank, clusters: list[str]) -> tuple[tuple[int, ...], ...]:
    """A body: a communicator of four ranks on two hosts, whose GPUs are in these clusters."""
    meeting.host_identity = lambda: f"host {rank.rank // 2}"
    meeting._clusters = lambda: [clusters[rank.rank]]
    with putget.Communicator() as comm:
        return comm.domains


@pytest.mark.parametrize(
    ("clusters", "domains"),
    [
        (["", "", "", ""], ((0, 1), (2, 3))),
        (["a/0", "a/0", "a/0", "a/1"], ((0, 1), (2, 3))),
        (["a/0", "a/0", "a/0", "a/0"], ((0, 1, 2, 3),)),
    ],
)
def test_hosts_are_domains_unless_they_are_one_nvlink_cluster(
    four: RankProcesses, clusters: list[str], domains: tuple[tuple[int, ...], ...]
) -> None:
    assert four.call(without_a_network, clusters) == dict.fromkeys(range(4), domains)


def split_domain(rank: Rank) -> str:
    meeting.host_identity = lambda: f"host {rank.rank // 2}"
    with pytest.raises(ValueError) as raised:
        putget.Communicator(network=putget.Network("tcp", domain_size=3))
    return str(raised.value)


def test_a_domain_of_several_hosts_is_refused(four: RankProcesses) -> None:
    words = "domain_size is 3, but ranks 0 and 2 are on different hosts"
    assert four.call(split_domain) == dict.fromkeys(range(4), words)


# --- a rank that is gone


def until_lost(rank: Rank, network: putget.Network, gone: int, phase: str, timeout_s: float = 4.0) -> tuple[str, float]:
    """A body: rounds until rank `gone` kills itself in one; whom the others miss, and after how many seconds."""
    comm = putget.Communicator(network=network)
    me = Rank(rank.rank, rank.size, rank.device, _comm=comm)
    a2a = me.all_to_all(timeout_s=4.0, warmup_timeout_s=20.0, num_experts=rank.size, top_k=rank.size)
    ids = torch.arange(rank.size, dtype=torch.int32).expand(2, rank.size).contiguous()
    began = time.monotonic()
    try:
        for number in range(6):
            # The rows that the rank owes others of earlier rounds have come. A process that ends owing something is
            # named by those who wait for it, and these may be named by others.
            torch.distributed.barrier()
            began = time.monotonic()
            if (rank.rank, number, phase) == (gone, 5, "dispatch"):
                os.kill(os.getpid(), signal.SIGKILL)
            received = a2a.dispatch(ids, torch.ones(2, rank.size), torch.ones(2, 4))
            if (rank.rank, number, phase) == (gone, 5, "combine"):
                os.kill(os.getpid(), signal.SIGKILL)
            a2a.combine_input.copy_(received.payloads[0])
            a2a.combine()
    except putget.PeerTimeout as error:
        rank.state["kept"] = (a2a, comm)  # open until all have found out: who has left may be missed
        return str(error.missing), time.monotonic() - began
    raise AssertionError("nobody missed a rank that is gone")


@PROVIDERS
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_killed_rank_is_named_within_the_deadline(four: RankProcesses, provider: str, phase: str) -> None:
    network = putget.Network(provider, domain_size=2)
    for rank in range(4):
        four.submit(rank, until_lost, network, 3, phase)
    found = four.results([0, 1, 2], timeout=90)
    assert {rank: missing for rank, (missing, _) in found.items()} == dict.fromkeys(range(3), "(3,)")
    assert max(took for _, took in found.values()) < 4.0 + 30.0  # a busy machine takes its time, too


def owed(rank: Rank, network: putget.Network, timeout_s: float, late_s: float) -> tuple[str, float, float]:
    """A body: rank 3 has had all of its rows when it is killed, and owes rank 1 a return, because rank 2 is late.

    Gives the missing ranks, and when combine began and ended, on the clock of all processes; rank 2's begins when rank
    3 has ended.
    """
    comm = putget.Communicator(network=network)
    me = Rank(rank.rank, rank.size, rank.device, _comm=comm)
    a2a = me.all_to_all(timeout_s=timeout_s, warmup_timeout_s=timeout_s, num_experts=rank.size, top_k=1)
    expert = (0, 3, 2, 1)[rank.rank]
    pids: list[Any] = [None] * rank.size
    torch.distributed.all_gather_object(pids, os.getpid())
    received = a2a.dispatch(torch.full((2, 1), expert, dtype=torch.int32), torch.ones(2, 1), torch.ones(2, 4))
    a2a.combine_input.copy_(received.payloads[0])
    if rank.rank == 2:
        time.sleep(late_s)  # rows on their way to rank 3 have come
        kill(pids[3])
    began, missing = time.monotonic(), ""
    try:
        a2a.combine()
    except putget.PeerTimeout as error:
        missing = str(error.missing)
    rank.state["kept"] = (a2a, comm)
    return missing, began, time.monotonic()


def find_owed(timeout_s: float, late_s: float) -> tuple[list[str], float, float]:
    """The ranks missing on ranks 0 to 2; when rank 3 was gone and when rank 1 found out, behind the beginning."""
    with fresh_ranks(4) as four:
        for rank in range(4):
            four.submit(rank, owed, putget.Network("host", domain_size=2), timeout_s, late_s)
        answers = four.results([0, 1, 2], timeout=90)
    (_, gone, _), (_, began, ended) = answers[2], answers[1]
    return [answers[rank][0] for rank in range(3)], gone - began, ended - began


@pytest.mark.parametrize(("late_s", "timeout_s"), [(2.0, 24.0), (13.0, 24.0)], ids=["early", "late"])
def test_a_killed_rank_that_owes_a_return_is_found_before_the_deadline(late_s: float, timeout_s: float) -> None:
    """No write to it is under way: its source asks, at half of the deadline and each eighth behind it.

    Over tcp heartbeats take 20 s. Where a busy machine lets the killed process end too late, others are tried.
    """
    eighth, busy_s = timeout_s / 8, 6.0
    for _ in range(4):
        missing, gone, ended = find_owed(timeout_s, late_s)
        if gone <= timeout_s - eighth - busy_s:
            break
    else:
        pytest.skip(f"a killed process takes {gone - late_s:.1f} s to end on this machine")
    assert missing == ["", "(3,)", ""]
    assert ended < max(gone, timeout_s / 2) + eighth + busy_s, f"gone after {gone} s, found after {ended} s"


# --- what is refused, before any effect


def refusals(rank: Rank, networks: list[putget.Network | None]) -> list[str]:
    """A body: what each network of `networks[rank]` comes to, and that a good one works afterwards."""
    words = []
    with pytest.raises((ValueError, putget.PutgetError)) as raised:
        putget.Communicator(network=networks[rank.rank])
    words.append(f"{type(raised.value).__name__}: {raised.value}")
    with putget.Communicator(network=putget.Network("host", domain_size=1)) as comm:
        me = Rank(rank.rank, rank.size, rank.device, _comm=comm)
        with me.all_to_all() as a2a:
            a2a.dispatch(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2), torch.ones(1, 4))
            words.append(str(tuple(a2a.combine().shape)))
    return words


TWO = putget.Network("tcp", domain_size=1)
UNEQUAL = {
    "provider": (
        [TWO, putget.Network("host", domain_size=1)],
        "ValueError: network provider differs between ranks: rank 0 has tcp, rank 1 has host",
    ),
    "domain_size": (
        [TWO, putget.Network("tcp", domain_size=2)],
        "ValueError: network domain_size differs between ranks: rank 0 has 1, rank 1 has 2",
    ),
    "none": (
        [TWO, None],
        "ValueError: network provider differs between ranks: rank 0 has tcp, rank 1 has None",
    ),
    "nics": (
        [TWO, putget.Network("tcp", nics=("203.0.113.77",), domain_size=1)],
        'BackendUnavailable: rank 1: network "tcp": .*203.0.113.77',
    ),
    "verbs": (
        [putget.Network("verbs", domain_size=1, nics=("no_such_nic",))] * 2,
        'rank 0: network "verbs": ',
    ),
    "efa": (
        [putget.Network("efa", domain_size=1)] * 2,
        'rank 0: network "efa": ',
    ),
    "gpu": (
        [putget.Network("verbs", domain_size=1, staging="device")] * 2,
        "rank 0: network (provider 'verbs' needs a CUDA GPU|\"verbs\": )",
    ),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_networks_that_cannot_be_are_named_on_all_ranks(name: str) -> None:
    networks, words = UNEQUAL[name]
    for said, shape in run_ranks(2, refusals, networks):
        assert shape == "(1, 4)"
        assert re.search(words, said), said


def without_engine(rank: Rank) -> str:
    """A body: rank 1 does not find the package."""
    found = networks.engine_library

    def missing() -> str:
        raise putget.BackendUnavailable("a network between processes needs the package putget_transfer: not here")

    if rank.rank == 1:
        networks.engine_library = missing
    try:
        with pytest.raises(putget.BackendUnavailable) as raised:
            putget.Communicator(network=TWO)
    finally:
        networks.engine_library = found
    return str(raised.value)


def test_a_rank_without_an_engine_is_named_on_all_ranks() -> None:
    words = "rank 1: a network between processes needs the package putget_transfer: not here"
    assert run_ranks(2, without_engine) == [words] * 2


def test_providers_of_processes() -> None:
    others = "'auto', 'tcp', 'host', 'nvlink', 'verbs', 'efa'"
    words = f"network provider is 'sim', ranks of several processes have {others}"
    assert run_ranks(2, refused_provider, "sim") == [words] * 2


def refused_provider(rank: Rank, provider: str) -> str:
    with pytest.raises(ValueError) as raised:
        putget.Communicator(network=putget.Network(provider, domain_size=1))
    return str(raised.value)
