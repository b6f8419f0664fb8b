"""Set-up: ranks find each other, and strangers neither get in nor hold anybody up."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import putget
from putget.group import meeting
from putget.group.handshake import Listener, Meeting
from putget.group.mesh import Deadline

# The time that a loaded machine with two cores may take beyond the deadline.
SLACK_S = 30.0

Met = dict[int, socket.socket] | Exception
FAMILIES = pytest.mark.parametrize("one_host", [True, False], ids=["unix", "tcp"])


def files() -> set[tuple[str, str]]:
    """The open files of this process. Files that an earlier test has left to the collector may go at any time."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of this folder
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


class Group:
    """Listeners of some ranks, and their cards."""

    def __init__(self, size: int, one_host: bool) -> None:
        self.listeners = [Listener(one_host) for _ in range(size)]
        self.cards = [listener.card() for listener in self.listeners]
        for card in self.cards:
            if "name" in card:
                card["name"] = "127.0.0.1"

    def meet(self, ranks: list[int], timeout_s: float) -> list[Met]:
        """Has these ranks meet, each in a thread."""
        met: dict[int, Met] = {}

        def run(rank: int) -> None:
            try:
                met[rank] = Meeting(rank, self.cards, self.listeners[rank], Deadline(timeout_s)).run()
            except Exception as error:
                met[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [met[rank] for rank in ranks]

    def call(self, rank: int) -> socket.socket:
        """A stranger's connection to a rank."""
        card = self.cards[rank]
        sock = socket.socket(socket.AF_UNIX if "unix" in card else socket.AF_INET, socket.SOCK_STREAM)
        sock.settimeout(10)
        sock.connect("\0" + card["unix"] if "unix" in card else ("127.0.0.1", card["port"]))
        return sock

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    made: list[Group] = []
    yield made
    for group in made:
        group.close()


def require_connected(met: list[Met]) -> None:
    """Each pair has one connection of its own."""
    for rank, connections in enumerate(met):
        assert isinstance(connections, dict), connections
        for peer, sock in connections.items():
            sock.settimeout(10)
            sock.sendall(bytes([rank, peer]))
    for rank, connections in enumerate(met):
        assert isinstance(connections, dict)
        assert connections.keys() == set(range(len(met))) - {rank}
        for peer, sock in connections.items():
            assert sock.recv(2) == bytes([peer, rank])
    for connections in met:
        assert isinstance(connections, dict)
        for sock in connections.values():
            sock.close()


@FAMILIES
def test_ranks_meet(groups: list[Group], one_host: bool) -> None:
    groups.append(Group(6, one_host))
    require_connected(groups[0].meet(list(range(6)), 30))


def test_a_listener_is_one_socket_of_one_family(groups: list[Group]) -> None:
    for one_host, family in ((True, socket.AF_UNIX), (False, socket.AF_INET)):
        before = files()
        groups.append(Group(1, one_host))
        assert len(files() - before) == 1
        assert groups[-1].listeners[0].sock.family == family


@FAMILIES
def test_silent_strangers_hold_nobody_up(groups: list[Group], one_host: bool) -> None:
    group = Group(3, one_host)
    groups.append(group)
    with contextlib.ExitStack() as stack:
        for rank in range(3):
            for _ in range(60):  # more than are kept waiting
                stack.enter_context(group.call(rank))
        started = time.monotonic()
        require_connected(group.meet([0, 1, 2], 60))
        assert time.monotonic() - started < 30


def drip(sock: socket.socket, stop: threading.Event) -> None:
    with contextlib.suppress(OSError), sock:
        while not stop.wait(0.05):
            sock.send(b"x")


@FAMILIES
def test_one_deadline_holds_however_slowly_a_stranger_speaks(groups: list[Group], one_host: bool) -> None:
    group = Group(3, one_host)
    groups.append(group)
    stop = threading.Event()
    thread = threading.Thread(target=drip, args=(group.call(0), stop))
    thread.start()
    started = time.monotonic()
    first, second = group.meet([0, 1], 5.0)
    seconds = time.monotonic() - started
    stop.set()
    thread.join()
    for rank, error in enumerate((first, second)):
        assert isinstance(error, putget.PeerTimeout), error
        assert (error.phase, error.rank, error.missing) == ("setup", rank, (2,))
    assert 4.9 < seconds < 5.0 + SLACK_S


def test_another_user_is_turned_away_without_a_byte(groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(2, one_host=True)
    groups.append(group)
    with group.call(0) as stranger:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        (missed,) = group.meet([0], 4.0)  # within it the rank has to look at its listener
        assert isinstance(missed, putget.PeerTimeout)
        assert stranger.recv(1) == b""
    # Nor does a caller prove anything to somebody else's listener.
    (refused,) = group.meet([1], 30.0)
    assert isinstance(refused, putget.PutgetError)
    assert "somebody else" in str(refused)


class Relay:
    """Stands between a caller and a listener, and writes down what both say."""

    def __init__(self, port: int) -> None:
        self.said = {"caller": b"", "listener": b""}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._to = port
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        caller, _ = self._listener.accept()
        with caller, socket.create_connection(("127.0.0.1", self._to)) as listener:
            answers = threading.Thread(target=self._pass, args=("listener", listener, caller))
            answers.start()
            self._pass("caller", caller, listener)
            answers.join()

    def _pass(self, who: str, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                self.said[who] += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()
        self._thread.join()


def test_what_travels_over_tcp_proves_but_does_not_tell_the_secret(groups: list[Group]) -> None:
    group = Group(2, one_host=False)
    groups.append(group)
    relay = Relay(group.cards[0]["port"])
    group.cards[0]["port"], port = relay.port, group.cards[0]["port"]
    require_connected(group.meet([0, 1], 20))
    relay.close()
    secret = group.cards[0]["secret"]
    said = relay.said["caller"] + relay.said["listener"]
    assert len(said) >= 4 * 32
    for form in (secret.encode(), bytes.fromhex(secret)):
        assert form not in said
    # Said again, it opens nothing: the next challenge is another.
    group.cards[0]["port"] = port
    with group.call(0) as stranger:
        stranger.sendall(relay.said["caller"][:68])
        (missed,) = group.meet([0], 0.5)
        assert isinstance(missed, putget.PeerTimeout)
        assert missed.missing == (1,)


def test_somebody_else_at_a_ranks_address_is_found_out(groups: list[Group]) -> None:
    group = Group(2, one_host=False)
    groups.append(group)
    with socket.create_server(("127.0.0.1", 0)) as other:
        group.cards[0]["port"] = other.getsockname()[1]

        def answer() -> None:
            with other.accept()[0] as caller:
                caller.sendall(bytes(64))
                caller.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        (refused,) = group.meet([1], 10)
        thread.join()
    assert isinstance(refused, putget.PutgetError)
    assert not isinstance(refused, putget.PeerTimeout)
    assert "somebody else" in str(refused)


def test_a_rank_that_has_ended_is_told_at_once(groups: list[Group]) -> None:
    group = Group(2, one_host=True)
    groups.append(group)
    group.listeners[0].close()
    started = time.monotonic()
    (refused,) = group.meet([1], 90)
    assert isinstance(refused, putget.PutgetError)
    assert "rank 0" in str(refused)
    assert time.monotonic() - started < 45


def test_what_failed_leaves_no_descriptor(groups: list[Group]) -> None:
    group = Group(3, one_host=True)
    groups.append(group)
    before = files()
    first, second = group.meet([0, 1], 0.5)
    assert isinstance(first, putget.PeerTimeout)
    assert isinstance(second, putget.PeerTimeout)
    assert files() <= before


class SlowSender(socket.socket):
    """Goes on when the answer to what it has sent may be there."""

    def send(self, *args: Any) -> int:
        sent = super().send(*args)
        time.sleep(0.3)
        return sent


@FAMILIES
def test_a_listener_that_answers_at_once_is_not_waited_for(
    one_host: bool, groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(2, one_host)
    groups.append(group)
    monkeypatch.setattr(socket, "socket", SlowSender)
    began = time.monotonic()
    require_connected(group.meet([0, 1], 60.0))
    assert time.monotonic() - began < 30.0


def test_a_rank_that_waits_says_for_whom(groups: list[Group], caplog: pytest.LogCaptureFixture) -> None:
    group = Group(3, one_host=True)
    groups.append(group)
    with caplog.at_level("WARNING", logger="putget"):
        group.meet([0, 1], 8.0)  # they find each other in less than half of it
    for rank, line in enumerate(sorted(caplog.messages)):
        assert line.startswith(f"putget: rank {rank} is at Communicator, connecting and has waited")
        assert "for rank(s) 2; it gives up in" in line
    assert len(caplog.messages) == 2


def test_a_gather_that_takes_long_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """torch.distributed does not say whom it waits for, and has a time-out of its own."""

    def gather(everyone: list[object], own: object, group: object) -> None:
        ends = time.monotonic() + 30
        while not caplog.messages and time.monotonic() < ends:
            time.sleep(0.01)
        everyone[0] = own

    monkeypatch.setattr(meeting, "_CONNECT_TIMEOUT_S", 0.02)
    monkeypatch.setattr(meeting.dist, "all_gather_object", gather)
    monkeypatch.setattr(meeting.dist, "get_rank", lambda _: 5)
    with caplog.at_level("WARNING", logger="putget"):
        assert meeting._gather(None, 1, "hosts", dict) == [{}]
    assert "rank 5 is at Communicator, step 'hosts'" in caplog.messages[0]
