"""Connections between ranks: descriptors that came along, forked children, refusals of any length."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import putget
from putget.group.mesh import Deadline, Mesh
from putget.group.peers import Message, Peer
from tests.harness import Rank, run_ranks


def receive(peer: Peer) -> Message:
    deadline = time.monotonic() + 10
    while not peer.inbox and time.monotonic() < deadline:
        peer.receive_all()
    return peer.inbox.popleft()


def test_a_received_descriptor_is_closed_on_exec() -> None:
    ours, theirs = (Peer(sock) for sock in socket.socketpair())
    with open("/dev/null") as file:
        ours.send({"step": 1}, [file.fileno()], 1.0)
    message = receive(theirs)
    assert message.fields == {"step": 1}
    assert not os.get_inheritable(message.descriptors[0])
    message.close()
    ours.close()
    theirs.close()


def test_who_closed_is_lost_and_who_is_silent_is_not() -> None:
    pairs = {peer: socket.socketpair() for peer in (1, 2)}
    mesh = Mesh(0, {peer: ours for peer, (ours, _) in pairs.items()}, one_host=True)
    with pytest.raises(putget.PeerTimeout) as caught:
        mesh.wait(lambda: False, lambda: {1, 2}, Deadline(0.2), "check")
    assert (caught.value.missing, caught.value.lost) == ((1, 2), ())
    pairs[2][1].close()
    began = time.monotonic()
    with pytest.raises(putget.PeerTimeout, match=r"rank 0 has lost the connection to rank\(s\) 2$") as caught:
        mesh.wait(lambda: False, lambda: {1, 2}, Deadline(60.0), "check")
    assert (caught.value.missing, caught.value.lost) == ((2,), (2,))
    assert time.monotonic() - began < 30
    pairs[1][1].close()
    mesh.close()


def test_a_message_that_no_peer_would_read_is_refused() -> None:
    ours, theirs = (Peer(sock) for sock in socket.socketpair())
    with pytest.raises(putget.PutgetError, match="allowed"):
        ours.send({"step": 1, "long": "x" * (1 << 20)}, [], 1.0)
    ours.close()
    theirs.close()


def test_a_forked_child_has_no_sockets() -> None:
    comms = putget.Communicator.local(2)
    child = os.fork()
    if child == 0:
        try:
            open_ones = [peer.sock.fileno() for comm in comms for peer in comm._mesh.peers.values()]
            comms[0].require_open()
        except ValueError:
            os._exit(0 if open_ones == [-1, -1] else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for comm in comms:
        comm.require_open()
        comm.close()


def refuse_at_length(rank: Rank, reason: str) -> str:
    def call() -> None:
        if rank.rank == 1:
            raise ValueError(reason)
        rank.comm.compare("a step", {}, 20.0)

    with pytest.raises(ValueError) as caught:
        rank.comm.attempt("a call", call)
    with rank.all_to_all():
        return str(caught.value)


@pytest.mark.parametrize("letter", ["x", "\N{PILE OF POO}"], ids=["ascii", "escaped"])
def test_a_refusal_of_any_length_reaches_the_others(letter: str) -> None:
    messages = run_ranks(3, refuse_at_length, letter * (3 << 20))
    assert messages[1] == letter * (3 << 20)
    for message in (messages[0], messages[2]):
        assert message.startswith("rank 1: " + letter * 100)
        assert f"{len(messages[1])} characters in all" in message
        assert len(message) < 1 << 20


SENT_TO_EACH = 100
PROMPT_S = 30.0


def send_many(rank: Rank) -> str:
    """Every rank sends every other as many descriptors as its limit leaves room for."""
    if os.geteuid() == 0:  # Linux lets root send any number
        try:
            os.setresuid(65533, 65533, 65533)
        except OSError as error:
            return f"root cannot become another user here: {error}"
    own = [os.open("/dev/null", os.O_RDONLY) for _ in range(SENT_TO_EACH)]
    needed = len(os.listdir("/proc/self/fd")) + SENT_TO_EACH * (rank.size - 1) + 32
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        return f"{hard} files may be open here, needed are {needed}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        receivers = {peer: own for peer in range(rank.size) if peer != rank.rank}
        came = rank.comm.exchange_descriptors("many", {}, 120.0, receivers, members=range(rank.size))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in own:
            os.close(descriptor)
    counts = [len(message.descriptors) for message in came.values()]
    for message in came.values():
        message.close()
    assert counts == [SENT_TO_EACH] * (rank.size - 1)
    return ""


def test_more_descriptors_than_may_be_on_their_way_go_one_after_the_other() -> None:
    """Ranks that read only when all is sent get stuck: two ranks' messages are more than Linux lets a user send."""
    reasons = run_ranks(8, send_many)
    for reason in filter(None, reasons):
        pytest.skip(reason)


@pytest.mark.parametrize("leaves", [False, True])
def test_descriptors_that_find_no_room_on_their_way_are_named_at_the_deadline(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = meshes(2)
    send = one.peers[1].send

    def send_no_descriptors(fields: dict[str, Any], descriptors: list[int], timeout_s: float) -> bool:
        return not descriptors and send(fields, descriptors, timeout_s)

    monkeypatch.setattr(one.peers[1], "send", send_no_descriptors)
    timeout_s = PROMPT_S if leaves else 0.2  # a rank that has left is not waited for
    if leaves:
        other.refuse(putget.PutgetError("it rains"))
    with open("/dev/null") as file, pytest.raises(putget.PutgetError) as caught:
        one.exchange("a step", {}, members=[0, 1], timeout_s=timeout_s, descriptors={1: [file.fileno()]})
    wanted = "it rains" if leaves else r"rank 0 could not send 1 file descriptors to each of rank\(s\) 1: too many"
    assert caught.match(wanted)
    one.close()
    other.close()


def meshes(size: int) -> list[Mesh]:
    """Ranks of this process."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for rank in range(size):
        for peer in range(rank):
            sockets[rank][peer], sockets[peer][rank] = socket.socketpair()
    return [Mesh(rank, connections, one_host=True) for rank, connections in enumerate(sockets)]


def call(mesh: Mesh, what: str) -> None:
    """A collective call of two steps."""

    def body() -> None:
        for step in range(2):
            mesh.exchange(f"{what} {step}", {}, members=range(len(mesh.peers) + 1), timeout_s=120.0)

    mesh.within(what, body, ends_together=True)


def leave_late(mesh: Mesh, what: str) -> None:
    """Leaves behind the last message, once the others have sent the first one of their next call."""
    wait = mesh.wait

    def wait_and_leave(look: Any, missing: Any, deadline: Any, phase: str, where: str = "") -> None:
        if "'end'" not in where:
            wait(look, missing, deadline, phase, where=where)
            return
        end = time.monotonic() + PROMPT_S
        while not all(any(one.fields["attempt"] > mesh.number for one in peer.inbox) for peer in mesh.peers.values()):
            assert time.monotonic() < end, "the others do not go on"
            for peer in mesh.peers.values():
                peer.receive_all()
        raise KeyboardInterrupt

    mesh.wait = wait_and_leave  # type: ignore[method-assign, assignment]
    try:
        call(mesh, what)
    finally:
        mesh.__dict__.pop("wait")


def hold_back(mesh: Mesh, leaver: int, may_read: Callable[[], bool]) -> None:
    """From its next call on, reads nothing of a rank until it may."""
    peer = mesh.peers[leaver]
    receive, first = peer._receive, mesh.number + 1

    def receive_later() -> bool:
        return receive() if mesh.number <= first or may_read() else False

    peer._receive = receive_later  # type: ignore[method-assign]


@pytest.mark.parametrize("other", ["second", "first"])
@pytest.mark.parametrize("leaver", [0, 2])
def test_a_retry_takes_nothing_of_a_call_that_was_begun_in_ignorance(leaver: int, other: str) -> None:
    """Ranks that have gone on have not heard yet that one left late, which tries again at once and meets them."""
    ranks = meshes(3)
    looked = threading.Event()

    def leave_and_retry(mesh: Mesh) -> None:
        with pytest.raises(KeyboardInterrupt):
            leave_late(mesh, "first")
        wait = mesh.wait

        def wait_and_tell(look: Any, *args: Any, **options: Any) -> None:
            def look_and_tell() -> bool:
                try:
                    return bool(look())  # the first one sees whatever the others have sent
                finally:
                    looked.set()

            wait(look_and_tell, *args, **options)

        mesh.wait = wait_and_tell  # type: ignore[method-assign, assignment]
        call(mesh, "first")

    def go_on(mesh: Mesh) -> None:
        hold_back(mesh, leaver, looked.is_set)
        call(mesh, "first")
        with pytest.raises(putget.PeerLeft, match=f"rank {leaver} has left first: KeyboardInterrupt, behind its last"):
            call(mesh, other)
        call(mesh, "first")

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(leave_and_retry if mesh.rank == leaver else go_on, mesh) for mesh in ranks]
        try:
            for future in running:
                future.result(PROMPT_S)
        finally:
            for mesh in ranks:
                mesh.close()
    assert len({mesh.number for mesh in ranks}) == 1
