"""Rounds across domains on the caller's transfer engine: beside its own writes and other networks; closed; refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist

import putget
from putget.group.networks import EngineNetwork
from tests.harness import Rank, run_ranks
from tests.harness.run import fresh_ranks
from tests.protocol.transports import End, Over, eventually

pytest.importorskip("putget_transfer._native", reason="putget_transfer is not built: see `make transfer`")
import putget_transfer as pt

LONG_S = 60.0
SECRET = b"of this test's two engines"
BYTES = 4096
PROVIDERS = pytest.mark.parametrize("provider", ["tcp", "host"])


def build(provider: str) -> pt.Engine:
    group = pt.DeviceGroup.tcp(["127.0.0.1"]) if provider == "tcp" else pt.DeviceGroup.host()
    return pt.Engine.builder().group(group).secret(SECRET).build()


def engine_threads() -> list[str]:
    """Names of this process's threads that belong to transfer engines."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            names.append((task / "comm").read_text().strip())
    return sorted(name for name in names if name.startswith("pt-"))


def gather(own: object) -> list[object]:
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


class Writes:
    """Plain writes from each of two ranks to the other, counted under an immediate that this class reserves."""

    def __init__(self, engine: pt.Engine, rank: int) -> None:
        self._engine, self._rank, self._sent = engine, rank, 0
        self._source, _ = engine.alloc_mr(BYTES)
        self._target, desc = engine.alloc_mr(BYTES)
        self._imms = engine.reserve_imms("plain writes", 40, 1)
        theirs = gather(desc.to_bytes())[1 - rank]
        assert isinstance(theirs, bytes)
        self._desc = pt.MrDesc.from_bytes(theirs)

    def one(self) -> bool:
        """Whether the other rank's next bytes have come."""
        self._sent += 1
        self._source.write(0, bytes([self._rank + self._sent]) * BYTES)
        self._engine.submit_single_write(BYTES, 40, (self._source, 0), (self._desc, 0)).wait(LONG_S)
        self._engine.expect_imm_count(40, self._sent, deadline_s=LONG_S).wait(LONG_S)
        came = bytes(self._target.read(0, BYTES)) == bytes([1 - self._rank + self._sent]) * BYTES
        counted = self._engine.imm_count(40) == self._sent
        gather(None)  # the next write comes after both ranks have looked
        return came and counted


def round_of(a2a: putget.AllToAll, scale: float) -> float:
    """The sum that a token with rows on both ranks gets."""
    ids = torch.tensor([[0, 3]], dtype=torch.int32)
    received = a2a.dispatch(ids, torch.ones(1, 2), torch.full((1, 4), scale))
    a2a.combine_input.copy_(received.payloads[0])
    return float(a2a.combine()[0, 0])


def share(rank: Rank, provider: str) -> dict[str, object]:
    """A body: two networks and plain writes on one engine, in turns, and writes again without the networks."""
    before = engine_threads()
    with build(provider) as engine:
        own = engine_threads()
        writes = Writes(engine, rank.rank)
        network = putget.Network(domain_size=1, engine=engine)
        found: dict[str, object] = {"own": len(own) > len(before)}
        with putget.Communicator(network=network) as one, putget.Communicator(network=network) as other:
            ranks = [Rank(rank.rank, rank.size, rank.device, _comm=comm) for comm in (one, other)]
            with ranks[0].all_to_all() as first, ranks[1].all_to_all() as second:
                shared = engine_threads()
                found["more threads"] = [name for name in shared if shared.count(name) > own.count(name)]
                found["domains"] = one.domains
                sums = [(round_of(first, 1.0 + n), round_of(second, 10.0 + n), writes.one()) for n in range(20)]
                found["rounds"] = sums == [(2.0 + 2 * n, 20.0 + 2 * n, True) for n in range(20)]
        del first, second, one, other, ranks, network
        found["afterwards"] = writes.one() and writes.one()
        # The ranges of both networks are free again.
        engine.reserve_imms("all others", 41, 2**32 - 41)
    return found


@PROVIDERS
def test_two_networks_and_plain_writes_share_one_engine(provider: str) -> None:
    wanted = {"own": True, "more threads": [], "domains": ((0,), (1,)), "rounds": True, "afterwards": True}
    assert run_ranks(2, share, provider) == [wanted] * 2


@PROVIDERS
def test_immediates_of_two_networks_on_one_engine_count_apart(provider: str) -> None:
    """Both ranks write under the same immediates in two networks, different numbers of times."""
    random = Random(5)
    with build(provider) as first, build(provider) as second:
        engines = (first, second)
        # Ranges differ between the ranks: the second rank makes its networks the other way round.
        made = {(rank, name): end_on(engines[rank], rank) for rank in range(2) for name in ("ab", "ba")[rank]}
        imms = [random.getrandbits(21) << 11 | sender for _ in range(40) for sender in range(2)]
        counters = {(*key, imm): end.counter(imm) for key, end in made.items() for imm in imms}
        memory = bytearray(64)
        regions = {key: end.add_region(memory) for key, end in made.items()}
        targets = {
            (rank, name): end.target_at(made[1 - rank, name], regions[1 - rank, name])
            for (rank, name), end in made.items()
        }
        wanted = {key: random.randrange(4) for key in counters}
        posts = [key for key, count in wanted.items() for _ in range(count)]
        random.shuffle(posts)
        over = Over()
        for rank, name, imm in posts:
            made[1 - rank, name].write(over, imm, targets[1 - rank, name])
        eventually("writes are not over", lambda: over.over == len(posts))
        eventually("writes are not counted", lambda: sum(counter() for counter in counters.values()) == len(posts))
        assert {key: counter() for key, counter in counters.items()} == wanted
        with pytest.raises(AssertionError, match="no such sender"):
            made[0, "a"].counter(2)


def end_on(engine: pt.Engine, rank: int) -> End:
    return End(EngineNetwork(rank, 2, "auto", (), b"", "auto", engine), rank)


def close_under_rounds(rank: Rank) -> str:
    """A body: rank 1 closes its engine between two rounds, and both ranks raise instead of waiting without end."""
    engine = build("tcp")
    rank.state["comm"] = comm = putget.Communicator(network=putget.Network(domain_size=1, engine=engine))
    me = Rank(rank.rank, rank.size, rank.device, _comm=comm)
    rank.state["a2a"] = a2a = me.all_to_all(timeout_s=3.0)
    assert round_of(a2a, 1.0) == 2.0
    gather(None)
    if rank.rank == 1:
        engine.close()
    with pytest.raises(putget.PutgetError) as raised:
        [round_of(a2a, 1.0) for _ in range(3)]
    gather(None)
    a2a.close()
    comm.close()
    engine.close()
    return type(raised.value).__name__


def test_rounds_on_an_engine_that_was_closed_raise() -> None:
    with fresh_ranks(2) as two:
        for rank in range(2):
            two.submit(rank, close_under_rounds)
        assert two.results([0, 1], timeout=90) == {0: "PeerTimeout", 1: "PeerTimeout"}


def unequal(rank: Rank) -> str:
    """A body: rank 0 alone brings an engine; afterwards the engine still has all of its immediates."""
    with build("host") as engine:
        network = putget.Network(domain_size=1, engine=engine if rank.rank == 0 else None)
        with pytest.raises(ValueError) as raised:
            putget.Communicator(network=network)
        engine.reserve_imms("all", 0, 2**32 - 1)
    return str(raised.value)


def closed(rank: Rank) -> str:
    """A body: rank 1 closes its engine before the ranks meet."""
    with build("host") as engine:
        network = putget.Network(domain_size=1, engine=engine)
        if rank.rank == 1:
            engine.close()
        with pytest.raises(ValueError) as raised:
            putget.Communicator(network=network)
    return str(raised.value)


def full(rank: Rank) -> str:
    """A body: rank 1's engine has one immediate that is free."""
    with build("host") as engine:
        network = putget.Network(domain_size=1, engine=engine)
        taken = engine.reserve_imms("all but the last", 0, 2**32 - 1) if rank.rank == 1 else None
        with pytest.raises(ValueError) as raised:
            putget.Communicator(network=network)
        del taken
        putget.Communicator(network=network).close()
    return str(raised.value)


def test_engines_that_cannot_be_are_named_on_all_ranks() -> None:
    words = "network engine differs between ranks: rank 0 has the caller's, rank 1 has none"
    assert run_ranks(2, unequal) == [words] * 2
    words = f"rank 1: network engine: count: {2**22} came; 1 are free, at most 1 in a row"
    assert run_ranks(2, full) == [words] * 2
    words = "rank 1: engine is <Engine closed>, expected an open one of this process: "
    for said in run_ranks(2, closed):
        assert said.startswith(words)


def test_wrong_engines_are_refused() -> None:
    with pytest.raises(ValueError, match=r"engine is 7, expected None or an open putget_transfer\.Engine"):
        putget.Network(engine=7)
    with build("host") as engine:
        with pytest.raises(ValueError, match="provider is 'tcp' and nics is None, but the engine has its own"):
            putget.Network("tcp", engine=engine)
        with pytest.raises(ValueError, match=r"one engine joins processes; ranks of one process each make one"):
            putget.Communicator.local(2, network=putget.Network(domain_size=1, engine=engine))
    with pytest.raises(ValueError, match="engine is <Engine closed>, expected an open one of this process"):
        putget.Network(engine=engine)
