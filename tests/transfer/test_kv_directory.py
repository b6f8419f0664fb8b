"""The directory: members join, drain, change roles, leave, are lost and come back, and nobody starts again for it."""

from __future__ import annotations

import base64
import json
import logging
import math
import random
import resource
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt
from putget_transfer import kv

WAIT_S = 60.0
LONG_S = 600.0
SHORT_S = 4.0
"""The silence after which a member is forgotten: one that is there may get no processor for seconds."""
CUT_S = (0.2, 1.5)
"""Heartbeats where a connection is cut: it is down before its member is forgotten."""
SOURCE = bytes(range(256)) * 32
JOINS = 1000


class Place:
    """Engines of one simulated network."""

    def __init__(self) -> None:
        self.network, self.heartbeat = pt.SimNetwork(3), (0.2, 10.0)
        self.engines: list[pt.Engine] = []

    def engine(self) -> pt.Engine:
        builder = pt.Engine.builder().group(pt.DeviceGroup.sim(self.network, 1)).readmit("lost")
        self.engines.append(builder.heartbeat(*self.heartbeat).build())
        return self.engines[-1]

    def client(self, directory: kv.Directory) -> kv.DirectoryClient:
        return kv.DirectoryClient(self.engine(), directory.address)


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    for engine in place.engines:
        engine.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def names(entries: list[kv.Entry]) -> list[str]:
    return [entry.name for entry in entries]


def test_members_join_change_roles_drain_and_leave(place: Place) -> None:
    directory = kv.Directory(place.engine(), timeout_s=LONG_S)
    prefill, decode = place.client(directory), place.client(directory)
    assert decode.entries() == []
    one = prefill.join("p0", "prefill", source=SOURCE, load=2)
    two = prefill.join("p1", "prefill", load=1)
    decode.join("d0", "decode")
    # Those with the lowest load come first.
    assert names(decode.entries("prefill")) == ["p1", "p0"]
    assert decode.entries("prefill")[1].source == SOURCE
    assert names(directory.entries()) == ["d0", "p1", "p0"]
    two.update(load=9)
    until(lambda: names(decode.entries("prefill")) == ["p0", "p1"])
    one.update(draining=True)
    until(lambda: names(decode.entries("prefill")) == ["p1", "p0"])
    assert decode.entries("prefill")[1].draining
    two.update(role="decode")
    until(lambda: names(prefill.entries("decode")) == ["d0", "p1"])
    with one:
        pass
    until(lambda: names(prefill.entries()) == ["d0", "p1"])


def test_a_lost_member_is_forgotten_and_one_that_comes_back_is_known(place: Place) -> None:
    place.heartbeat = CUT_S
    directory = kv.Directory(place.engine(), timeout_s=SHORT_S)
    client, other = place.client(directory), place.client(directory)
    members = [client.join("p0", "prefill"), other.join("p1", "prefill")]
    held, lost = place.engines[0].addresses()[0], place.engines[1].addresses()[0]
    # It stays for as long as it says so.
    until(lambda: "p0" in names(directory.entries()))
    place.network.cut(held, lost)
    until(lambda: names(directory.entries()) == ["p1"])
    with pytest.raises(TimeoutError, match=r"the directory at .* has not answered"):
        client.entries(timeout_s=0.05)
    place.network.heal(held, lost)
    until(lambda: names(directory.entries()) == ["p0", "p1"])
    assert [member.refusal for member in members] == [None, None]


def test_a_member_that_starts_again_takes_its_name_over(place: Place) -> None:
    directory = kv.Directory(place.engine(), timeout_s=SHORT_S)
    before, after = place.client(directory), place.client(directory)
    old = before.join("p0", "prefill", source=b"old")
    new = after.join("p0", "prefill", source=b"new")
    until(lambda: old.refusal is not None)
    assert "another member has the name 'p0'" in str(old.refusal)
    # The old one's end does not end the new one.
    old.leave()
    until(lambda: [entry.source for entry in before.entries(timeout_s=WAIT_S)] == [b"new"])
    assert new.refusal is None


def test_what_a_member_says_last_counts(place: Place) -> None:
    directory = kv.Directory(place.engine(), timeout_s=LONG_S)
    client = place.client(directory)
    member = client.join("p0", "prefill")
    heard, enter = [0], directory._enter

    def counted(*arguments: Any) -> str | None:
        refusal = enter(*arguments)
        heard[0] += 1
        return refusal

    directory._enter = counted  # type: ignore[method-assign]
    # Messages have no order.
    for last in range(100, 600, 100):
        for number in range(last - 99, last + 1):
            member.update(load=number, draining=number == last)
        until(lambda last=last: heard[0] == last)  # type: ignore[misc]
        (entry,) = directory.entries()
        assert (entry.load, entry.draining) == (last, True)


def test_words_of_a_member_that_has_left_come_too_late(place: Place) -> None:
    directory = kv.Directory(place.engine(), timeout_s=LONG_S, max_members=2)
    client = place.client(directory)
    for number in range(4):
        member = client.join("p0" if number < 2 else f"p{number}", "prefill")
        member.leave()
        until(lambda: directory.entries() == [])
        # Messages have no order.
        assert client._ask("here", LONG_S, entry=member.entry.encode()) == [
            {"number": client._number, "of": 0, "refusal": "it has left"}
        ]
        assert directory.entries() == []
    # No more are remembered than there may be members.
    assert list(directory._left) == ["p2", "p3"]
    client.join("p3", "decode")
    assert names(directory.entries("decode")) == ["p3"]


def test_a_member_that_leaves_before_it_is_known_never_enters(place: Place) -> None:
    directory = kv.Directory(place.engine(), timeout_s=LONG_S, max_members=2)
    client = place.client(directory)

    def refusal(kind: str, name: str, began_ns: int) -> str | None:
        entry = kv.Entry(name=name, role="prefill", source=b"", load=0, draining=False, began_ns=began_ns)
        return client._ask(kind, LONG_S, entry=entry.encode())[0]["refusal"]

    # The end has overtaken the beginning.
    assert refusal("leave", "p0", 5) is None
    assert refusal("here", "p0", 5) == "it has left"
    # An end that comes twice, or the late end of an earlier life, drops nobody else, and forgets no later end.
    refusal("leave", "p1", 7)
    for began_ns in (5, 3):
        refusal("leave", "p0", began_ns)
    assert {name: began_ns for name, (began_ns, _) in directory._left.items()} == {"p1": 7, "p0": 5}
    # The one that is remembered again is the last to be dropped.
    refusal("leave", "p2", 1)
    assert list(directory._left) == ["p0", "p2"]
    # The end of a later life ends an earlier one, and that of an earlier life leaves a later one alone.
    assert refusal("here", "p0", 6) is None
    refusal("leave", "p0", 5)
    assert names(directory.entries()) == ["p0"]
    refusal("leave", "p0", 8)
    assert directory.entries() == []
    assert refusal("here", "p0", 7) == "it has left"


def test_a_mistake_in_a_change_silences_nobody(place: Place) -> None:
    directory = kv.Directory(place.engine(), timeout_s=SHORT_S)
    client = place.client(directory)
    client.join("p0", "prefill")
    member = client.join("p1", "prefill", source=memoryview(b"kept"))  # type: ignore[arg-type]
    wrong: dict[str, Any] = {"source": "text", "role": 7, "load": "much", "draining": 1}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name}: .*{value}"):
            member.update(**{name: value})
        if name != "draining":
            with pytest.raises(ValueError, match=f"{name}: .*{value}"):
                client.join(**{"name": "p2", "role": "decode", name: value})
    time.sleep(1.5 * SHORT_S)
    # A member that is silent for good is forgotten by now. One that had no processor for a while says that it is there.
    until(lambda: names(directory.entries()) == ["p0", "p1"])
    member.update(source=bytearray(b"new"), load=2)  # type: ignore[arg-type]
    until(lambda: [entry.source for entry in directory.entries()] == [b"", b"new"])


def test_a_directory_that_has_forgotten_a_member_knows_it_again(place: Place) -> None:
    directory = kv.Directory(place.engine(), timeout_s=SHORT_S)
    client = place.client(directory)
    client.join("p0", "prefill", source=SOURCE)
    directory._entries.clear()
    until(lambda: [entry.source for entry in client.entries(timeout_s=WAIT_S)] == [SOURCE])


def test_a_member_whose_directory_has_ended_is_told_once_and_joins_the_next(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    client = place.client(kv.Directory(place.engine(), timeout_s=SHORT_S))
    client.join("p0", "prefill", source=SOURCE)
    place.engines[0].close()
    until(lambda: "is not reached, so it forgets its members" in caplog.text)
    with pytest.raises(TimeoutError, match="has not answered for 4 s"):
        client.entries()
    assert caplog.text.count("is not reached") == 1
    again = kv.Directory(place.engine(), timeout_s=SHORT_S)
    kv.DirectoryClient(place.engines[1], again.address).join("p0", "prefill", source=SOURCE)
    assert [entry.source for entry in again.entries()] == [SOURCE]


def test_an_old_message_that_fails_behind_a_newer_one_that_arrives_is_not_told(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = place.client(kv.Directory(place.engine(), timeout_s=LONG_S))
    ends: list[Callable[[Any], None]] = []
    engine = SimpleNamespace(submit_send=lambda *_, done, **__: ends.append(done))
    monkeypatch.setattr(client, "_engine", engine)
    for number in range(3):
        client._post("list", number, role=None)
    ends[1](None)
    ends[0](pt.EngineError("its deadline is over"))
    assert "is not reached" not in caplog.text
    ends[2](pt.EngineError("its deadline is over"))
    assert caplog.text.count("is not reached") == 1


def test_mistakes_and_hostile_bytes_have_no_effect(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    directory = kv.Directory(place.engine(), timeout_s=LONG_S, max_members=2)
    client = place.client(directory)
    client.join("p0", "prefill")
    client.join("p1", "prefill")
    with pytest.raises(ValueError, match="'p2' came; the directory refuses it: there are 2 members"):
        client.join("p2", "prefill")
    for wrong in ({"name": ""}, {"role": "r" * 257}, {"source": bytes(1 << 20)}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: "):
            client.join(**{"name": "p0", "role": "prefill", **wrong})
    for timeout_s in (0, -1.0, math.nan, math.inf, 1e12):
        with pytest.raises(ValueError, match=f"timeout_s: {timeout_s} came"):
            kv.Directory(place.engines[0], timeout_s=timeout_s)
    forever = json.dumps({**json.loads(directory.address), "timeout_s": math.inf}).encode()
    for address in (b"", b"{}", b"[]", b'{"address": "AA==", "pool": 1, "timeout_s": 1}', forever):
        with pytest.raises(ValueError, match=r"directory: .* came"):
            kv.DirectoryClient(place.engines[0], address)
    to, pool = place.engines[0].main_address(), json.loads(directory.address)["pool"]
    entry = directory.entries()[0].encode()
    random.seed(1)
    hostile = [random.randbytes(100), b"[" * 3000, b"7", json.dumps({"kind": "here", "answers": 1}).encode()]
    hostile.append(b'{"kind": "list", "answers": Infinity, "number": 1}')
    for name, value in (
        ("name", 7),
        ("load", "1"),
        ("load", math.inf),
        ("load", 10**400),
        ("source", "x"),
        ("began_ns", 1.5),
        ("role", ""),
    ):
        message = {"kind": "here", "answers": 5, "number": 1, "entry": {**entry, name: value}}
        hostile.append(json.dumps(message).encode())
    with caplog.at_level(logging.WARNING):
        for message in hostile:
            place.engines[1].submit_send(to, message, pool=pool).wait(WAIT_S)
        until(lambda: sum("cannot be read" in record.message for record in caplog.records) >= len(hostile))
    assert names(client.entries()) == ["p0", "p1"]
    assert base64.b64decode(entry["source"]) == b""


def test_many_members_come_and_go(place: Place) -> None:
    directory = kv.Directory(place.engine(), timeout_s=LONG_S)
    clients = [place.client(directory) for _ in range(8)]
    members: dict[str, kv.Member] = {}
    for number in range(64):
        for role in ("prefill", "decode"):
            name = f"{role}{number}"
            members[name] = clients[number % 8].join(name, role, source=SOURCE)
    assert len(clients[0].entries("prefill")) == len(clients[1].entries("decode")) == 64
    rng, used = random.Random(7), []
    for at in range(JOINS):
        name = rng.choice(sorted(members))
        role = "prefill" if at % 3 else "decode"
        members.pop(name).leave()
        # The new one begins on another engine, under a name that nobody had.
        members[f"m{at}"] = rng.choice(clients).join(f"m{at}", role, source=SOURCE)
        if at % 200 == 199:
            until(lambda: set(names(directory.entries())) == members.keys())
            used.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert len(directory._entries) == len(members) == 128
    assert sum(len(client._members) for client in clients) == 128
    assert not any(client._answers for client in clients)
    # KiB: what 800 joins and leaves have left behind.
    assert used[-1] - used[0] < 32 << 10
    for member in members.values():
        member.leave()
    until(lambda: directory.entries() == [])
