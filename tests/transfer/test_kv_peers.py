"""KV caches between many prefillers and decoders that join and leave, each with an engine of its own, in one process.

Memory, threads and files stay bounded. The soak has 64 of each side and 1,000 joins and leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt
from putget_transfer import kv

WAIT_S = 60.0
LONG_S = 600.0
ROLES = ("prefill", "decode")
LAYERS, PAGES, TOKENS, BYTES = 2, 16, 4, 256
COUNT = 5
"""Pages of a request."""
UNFINISHED = 4
"""Every fourth leave is in the middle of a request."""
MOST_KIB = 16 << 10
"""The memory that all joins and leaves after the first quarter may leave behind."""


def until(what: str, condition: Callable[[], bool], found: Callable[[], object]) -> None:
    """Wait for something; if it does not come, fail with what was waited for, and what was found in its place."""
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {WAIT_S:g} s in vain: {what}; found: {found()}")
        time.sleep(0.002)


def files() -> int:
    """The open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def kinds() -> Counter[str]:
    """The threads of this process by their names, and its open files by what they lead to."""
    found: Counter[str] = Counter()
    for at in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{at}/comm") as file:
            found[f"thread {file.read().strip()}"] += 1
    for at in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[f"file {re.sub('[0-9]+', '', os.readlink(f'/proc/self/fd/{at}'))}"] += 1
    return found


def threads() -> int:
    """The threads of engines, decoders and prefillers. An earlier test's own may end at any time."""
    return sum(number for kind, number in kinds().items() if re.match("thread (pt-|putget-kv)", kind))


def counts(text: str) -> list[str]:
    """The lines of metrics that are not 0, without histograms."""
    return [line for line in text.splitlines() if not re.search(r"^#|_bucket|_seconds| 0(\.0)?$", line)]


class Mallinfo(ctypes.Structure):
    """The words of glibc's allocator about itself."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (*map("word{}".format, range(4)), "mapped", "word5", "word6"))
    _fields_ += tuple((name, ctypes.c_size_t) for name in ("in_use", "free", "top"))


def used_kib() -> int:
    """The memory that is allocated. Resident memory also grows by the first use of what was allocated long before."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return int(found.in_use + found.mapped) >> 10


class Peer:
    """A rank of either side, with an engine of its own, known to the directory."""

    def __init__(self, engine: pt.Engine, directory: bytes, name: str, role: str) -> None:
        self.engine, self.name, self.role = engine, name, role
        self.pages = np.zeros([LAYERS, PAGES, TOKENS, BYTES], dtype=np.uint8)
        common = {"layout": "LBNC", "page_tokens": TOKENS, "num_kv_heads": 1, "packed": False, "context_bytes": 8}
        cache = kv.KvCache(engine, {"model": self.pages}, **common)
        self.step = 0
        if role == "prefill":
            self.prefiller = kv.Prefiller(cache, lease_s=LONG_S)
        else:
            self.decoder = kv.Decoder(cache, max_requests=4, confirm_s=1.0)
        self.directory = kv.DirectoryClient(engine, directory)
        self.member = self.directory.join(name, role, source=self.prefiller.source() if role == "prefill" else b"")

    def found(self) -> tuple[object, ...]:
        """Say how it stands: for a condition that does not come to hold."""
        side = self.prefiller if self.role == "prefill" else self.decoder
        return self.name, counts(side.metrics_text()), counts(self.engine.metrics_text())

    def ask(self, name: str, prefill: Peer) -> kv.Receive:
        """Ask a prefiller that the directory knows; return once it has accepted."""
        (source,) = (one.source for one in self.directory.entries("prefill") if one.name == prefill.name)
        sources = self.decoder.sources([source])
        receive = self.decoder.request(sources, name, [list(range(COUNT))], tokens=COUNT * TOKENS)
        until(
            f"{prefill.name} answers {self.name}'s request {name}",
            lambda: receive.state != "asked",
            lambda: (receive.state, self.found(), prefill.found()),
        )
        assert receive.state == "accepted", receive.reason
        return receive

    def begin(self, name: str, value: int) -> None:
        self.step += 1
        self.pages[:, :COUNT] = value
        self.prefiller.begin_step(self.step, [(name, COUNT * TOKENS, [list(range(COUNT))])])

    def finish(self, name: str) -> None:
        """Compute the rest of a request; return once its pages are back."""
        self.prefiller.layer_done(LAYERS - 1)
        self.prefiller.finish(name)
        ends: list[tuple[str, str]] = []
        until(
            f"the pages of {name} come back to {self.name}",
            lambda: bool(ends.extend(self.prefiller.poll()) or ends),
            self.found,
        )
        assert [one for one, _ in ends] == [name]


class Cluster:
    """The directory, and whoever is there."""

    def __init__(self, network: str) -> None:
        self.random, self.sim = random.Random(11), pt.SimNetwork(3) if network == "sim" else None
        self.own = self.engine()
        self.directory = kv.Directory(self.own, timeout_s=LONG_S)
        self.peers: dict[str, list[Peer]] = {role: [] for role in ROLES}
        self.number = 0

    def engine(self) -> pt.Engine:
        group = pt.DeviceGroup.sim(self.sim, 1) if self.sim else pt.DeviceGroup.tcp(["127.0.0.1"])
        return pt.Engine.builder().group(group).readmit("lost").heartbeat(0.5, 10.0).build()

    def join(self, role: str) -> None:
        self.number += 1
        self.peers[role].append(Peer(self.engine(), self.directory.address, f"{role}{self.number}", role))

    def leave(self, role: str, at: int) -> None:
        peer = self.peers[role].pop(at)
        peer.member.leave()
        until(
            f"{peer.name} is out of the directory",
            lambda: peer.name not in [one.name for one in self.directory.entries()],
            lambda: (peer.found(), counts(self.own.metrics_text())),
        )
        peer.engine.close()

    def request(self, prefill: Peer, decode: Peer) -> None:
        """Move a request between two of them."""
        self.number += 1
        name, value = f"r{self.number}", 1 + self.number % 250
        receive = decode.ask(name, prefill)
        prefill.begin(name, value)
        prefill.finish(name)
        receive.wait(WAIT_S)
        assert (decode.pages[:, :COUNT] == value).all()
        assert decode.decoder.poll() == ([receive.number], [], [])

    def break_off(self, role: str, at: int) -> None:
        """Have one leave in the middle of a request. The other side is through with it at once, and goes on."""
        self.number += 1
        name, other = f"r{self.number}", self.random.choice(self.peers[ROLES[role == "prefill"]])
        prefill, decode = (self.peers[role][at], other) if role == "prefill" else (other, self.peers[role][at])
        receive = decode.ask(name, prefill)
        prefill.begin(name, 251)
        self.leave(role, at)
        if role == "decode":
            other.finish(name)
            return
        with pytest.raises(kv.ReceiveFailed):
            receive.wait(WAIT_S)
        until(
            f"{other.name} releases the pages of {name}, whose prefiller {prefill.name} has left",
            lambda: other.decoder.quarantined == 0,
            lambda: (receive.state, receive.reason, other.found()),
        )
        _, failed, released = other.decoder.poll()
        assert ([number for number, _ in failed], released) == ([receive.number], [receive.number])

    def turn(self, at: int) -> None:
        """One leaves and one joins; the new one takes part in a request."""
        role = ROLES[at % 2]
        # The first of each side stay.
        chosen = self.random.randrange(1, len(self.peers[role]))
        if at // 2 % UNFINISHED == 0:
            self.break_off(role, chosen)
        else:
            self.leave(role, chosen)
        self.join(role)
        pair = {one: self.random.choice(self.peers[one]) for one in ROLES}
        pair[role] = self.peers[role][-1]
        self.request(pair["prefill"], pair["decode"])

    def close(self) -> None:
        for role in ROLES:
            for at in reversed(range(len(self.peers[role]))):
                # Its thread that tells the directory ends with that: those of the next test are counted.
                self.leave(role, at)
        self.own.close()


@pytest.fixture(params=["sim", "tcp"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    before = threads()
    cluster = Cluster(str(request.param))
    yield cluster
    cluster.close()
    until(f"at most {before} threads are left", lambda: threads() <= before, kinds)


def come_and_go(cluster: Cluster, each: int, turns: int) -> list[tuple[int, int, int]]:
    """Return memory, threads and files: of one pair, of all after a quarter, of all at the end, of the pair again."""
    found: list[tuple[int, int, int]] = []

    def note() -> tuple[int, int, int]:
        gc.collect()
        found.append((used_kib(), threads(), files()))
        return found[-1]

    alone = threads()
    for role in ROLES:
        cluster.join(role)
    first = [cluster.peers[role][0] for role in ROLES]
    cluster.request(*first)
    _, of_pair, _ = note()
    first_kinds = kinds()
    # A prefiller's thread that arms begins with its first request, so that later there may be more, up to these.
    most = alone + each * (of_pair - alone)
    for role in ROLES:
        for _ in range(each - 1):
            cluster.join(role)
    for at in range(turns):
        if at == turns // 4:
            note()
        cluster.turn(at)
    until(f"at most {most} threads", lambda: threads() <= most, kinds)
    note()
    for role in ROLES:
        while len(cluster.peers[role]) > 1:
            cluster.leave(role, 1)
    cluster.request(*first)
    until("threads and files as at first", lambda: not kinds() - first_kinds, lambda: kinds() - first_kinds)
    note()
    assert len(cluster.directory.entries()) == 2
    assert found[2][0] - found[1][0] < MOST_KIB
    return found


def test_peers_come_and_go(cluster: Cluster) -> None:
    come_and_go(cluster, 4, 32)


@pytest.mark.soak
def test_a_thousand_peers_come_and_go(cluster: Cluster) -> None:
    print(come_and_go(cluster, 64, int(os.environ.get("PUTGET_TRANSFER_ROUNDS", "1000"))))
