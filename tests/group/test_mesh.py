"""Connections between ranks: descriptors that came along, forked children, refusals of any length."""

from __future__ import annotations

import os
import socket
import time

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
