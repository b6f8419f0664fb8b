"""Rounds between hosts: network namespaces with a cable each, rows over TCP; losses, and a cable that is pulled."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import putget
from tests.harness import Rank, hosts
from tests.harness.cases import Case
from tests.harness.compare import check_case, play
from tests.harness.domains import in_domains, ragged
from tests.harness.processes import RankProcesses

pytest.importorskip("putget_transfer._native", reason="putget_transfer is not built: see `make transfer`")

WIDE: dict[str, Any] = {"payloads": (((24,), torch.bfloat16),), "output": ((24,), torch.bfloat16)}
DOMAINS = ((0, 1), (2, 3))
TIMEOUT_S = 4.0
PATIENCE_S = 30.0  # for a deadline and what a busy machine adds
SHORT_S = 0.7
LONG_S = 2.0  # TCP sends again after up to as long again, and a peer may be silent for 5 s
TRIES = 10


@contextlib.contextmanager
def between_two_hosts() -> Iterator[tuple[hosts.Hosts, RankProcesses]]:
    """Two hosts of two ranks each."""
    with hosts.made(2) as made, RankProcesses(4, on_hosts=[made.names[rank // 2] for rank in range(4)]) as ranks:
        yield made, ranks


@pytest.fixture
def two() -> Iterator[tuple[hosts.Hosts, RankProcesses]]:
    with between_two_hosts() as made_and_ranks:
        yield made_and_ranks


def play_between_hosts(rank: Rank, case: Case) -> Any:
    """A body: nobody says that there are two hosts."""
    with putget.Communicator() as comm:
        assert comm.domains == DOMAINS
        return play(Rank(rank.rank, rank.size, rank.device, _comm=comm), case)


def test_rounds_have_the_bits_of_the_oracle(two: tuple[hosts.Hosts, RankProcesses]) -> None:
    case = in_domains(Case(4, ragged(4, 20, 4, 8), num_experts=9, top_k=5, **WIDE), 2)
    results = two[1].call(play_between_hosts, case, timeout=120)
    check_case(case, [results[rank] for rank in range(4)])


def begin(rank: Rank, timeout_s: float) -> None:
    """A body: an object, and a round with everybody."""
    comm = putget.Communicator()
    me = Rank(rank.rank, rank.size, rank.device, _comm=comm)
    options: dict[str, Any] = {"timeout_s": timeout_s, "warmup_timeout_s": PATIENCE_S}
    rank.state["a2a"] = me.all_to_all(num_experts=rank.size, top_k=rank.size, **options)
    rank.state["kept"] = comm
    assert round_of(rank, range(rank.size)) == "well"


def round_of(rank: Rank, experts: Any, first: int = 0) -> str:
    """A body: a round to the rank of each expert; "well" if every row came back from all of them."""
    a2a = rank.state["a2a"]
    ids = torch.full((3, rank.size), -1, dtype=torch.int32)
    ids[:, : len(experts)] = torch.tensor(list(experts), dtype=torch.int32)
    rows = torch.arange(first, first + 12, dtype=torch.float32).view(3, 4)
    try:
        received = a2a.dispatch(ids, torch.ones(ids.shape), rows)
        a2a.combine_input.copy_(received.payloads[0])
        combined = a2a.combine()
        a2a.check()
    except putget.PeerTimeout as error:
        return f"without {error.missing}"
    return "well" if torch.equal(combined, rows * len(experts)) else f"wrong: {combined}"


def many_rounds(rank: Rank, seconds: float) -> tuple[list[str], float]:
    """A body: rounds for so long, as many on every rank; and how long the longest one took."""
    said: list[str] = []
    longest = 0.0
    end = time.monotonic() + seconds
    while True:
        begin = time.monotonic()
        # Rank 0 says whether there is another one; by the rows themselves, since nothing else crosses the cable.
        goes_on = time.monotonic() < end
        a2a = rank.state["a2a"]
        ids = torch.arange(rank.size, dtype=torch.int32).expand(1, -1).contiguous()
        row = torch.full((1, 4), float(goes_on))
        received = a2a.dispatch(ids, torch.ones(ids.shape), row)
        another = bool(received.payloads[0][0, 0, 0])
        a2a.combine_input.copy_(received.payloads[0])
        said.append("well" if torch.equal(a2a.combine(), row * rank.size) else "wrong")
        longest = max(longest, time.monotonic() - begin)
        if not another:
            return said, longest


def test_an_interruption_only_takes_time() -> None:
    """Peers are missing after five seconds. An interruption of several, by a busy machine, says nothing."""
    for _ in range(TRIES):
        with between_two_hosts() as (made, ranks):
            ranks.call(begin, PATIENCE_S, timeout=PATIENCE_S)
            for rank in range(4):
                ranks.submit(rank, many_rounds, 3.0)
            time.sleep(1.0)
            if made.interrupt(SHORT_S) > LONG_S:
                continue
            found = ranks.results(range(4), timeout=60)
            assert all(set(said) == {"well"} for said, _ in found.values()), found
            assert len({len(said) for said, _ in found.values()}) == 1
            assert all(longest > SHORT_S / 2 for _, longest in found.values()), "nothing was interrupted"
            return
    pytest.fail(f"no interruption was shorter than {LONG_S} s")


def go_on(rank: Rank, mask: list[bool]) -> str:
    """A body: agrees with these ranks, and has a round with the experts on them."""
    rank.state["a2a"].set_active_ranks(mask)
    return round_of(rank, [expert for expert, is_active in enumerate(mask) if is_active], first=rank.rank)


def test_a_cable_that_is_pulled_and_put_back(two: tuple[hosts.Hosts, RankProcesses]) -> None:
    """Both hosts name who is missing, and go on alone; then all go on together."""
    made, ranks = two
    ranks.call(begin, TIMEOUT_S, timeout=PATIENCE_S)
    made.pull(1)
    for rank in range(4):
        ranks.submit(rank, round_of, range(4))
    found = ranks.results(range(4), timeout=PATIENCE_S)
    assert found == {rank: f"without {DOMAINS[1 - rank // 2]}" for rank in range(4)}
    for rank in range(4):
        ranks.submit(rank, go_on, [other // 2 == rank // 2 for other in range(4)])
    assert ranks.results(range(4), timeout=PATIENCE_S) == dict.fromkeys(range(4), "well")
    made.put_back(1)
    assert ranks.call(go_on, [True] * 4, timeout=60) == dict.fromkeys(range(4), "well")
