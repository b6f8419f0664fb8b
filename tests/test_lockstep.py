"""Passes in step, between processes and without a model."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
import time
import warnings
from typing import Any

import pytest

import putget
from putget import lockstep
from putget.lockstep import Bell, Lockstep
from tests.harness import Rank, fresh_ranks, run_ranks

PATIENCE_S = 30.0


def sleep_until_called(rank: Rank, own: list[int]) -> list[tuple[int, bool]]:
    """A body: rank r has own[r] passes of its own and takes part in those of others; (number, idle) of each."""
    step, left, passes = Lockstep(rank.comm), own[rank.rank], []
    while True:
        if left:
            left -= 1
            step.begin()
            step.end()
            passes.append((step.number, False))
            if not left:
                step.finish()
        elif step.begun() is not None:
            step.end(was_idle=True)
            passes.append((step.number, True))
        elif step.all_finished:
            break
        else:
            step.wait(None, 1.0)
    step.close()
    return passes


@pytest.mark.parametrize("own", [[3, 1, 5], [1, 200, 1], [40, 40, 40]])
def test_all_ranks_take_part_in_all_passes(own: list[int]) -> None:
    for rank, passes in enumerate(run_ranks(3, sleep_until_called, own)):
        assert [number for number, _ in passes] == list(range(1, max(own) + 1))
        assert sum(not is_idle for _, is_idle in passes) == own[rank]


def finish_behind_a_pass(rank: Rank) -> None:
    """A body: rank 0 hears of a pass and of its end at once, and takes part before it leaves."""
    step = Lockstep(rank.comm)
    if rank.rank == 0:
        step.finish()
        assert step.begun() is None
        rank.comm.exchange("rank 0 sleeps", 0, PATIENCE_S)
        while step._finished[1] == 0:
            assert not step.all_finished
        assert not step.all_finished
        assert step.begun() == "model"
        step.end(was_idle=True)
        assert step.all_finished
    else:
        rank.comm.exchange("rank 0 sleeps", 0, PATIENCE_S)
        step.begin()
        step.end()
        step.finish()
    rank.comm.exchange("both are done", 0, PATIENCE_S)
    step.close()


def test_a_pass_that_has_begun_is_not_left_behind() -> None:
    run_ranks(2, finish_behind_a_pass)


def wake(rank: Rank) -> tuple[float, bool]:
    """A body: rank 1 sleeps; rank 0 begins a pass once it does."""
    step = Lockstep(rank.comm)
    began = time.monotonic()
    if rank.rank == 0:
        time.sleep(0.3)
        step.begin()
        step.end()
    else:
        while step.begun() is None:
            step.wait(None, PATIENCE_S)
        step.end(was_idle=True)
    waited = time.monotonic() - began
    step.finish()
    while not step.all_finished:
        step.wait(None, 1.0)
    step.close()
    return waited, step.idle_passes == rank.rank


def test_a_rank_that_sleeps_is_woken_by_a_pass() -> None:
    for waited, is_right in run_ranks(2, wake):
        assert waited < PATIENCE_S  # no wait came to its end
        assert is_right


def differ(rank: Rank) -> str:
    """A body: both begin pass 1, under two names."""
    step = Lockstep(rank.comm, ("model", "draft"))
    try:
        step.begin("model" if rank.rank == 0 else "draft")
        while step.begun() is None:
            step.wait(None, 1.0)
        step.end()
    except putget.ProtocolMisuse as error:
        return str(error)
    finally:
        rank.comm.exchange("behind", 0, PATIENCE_S)
        step.close()
    return ""


def test_passes_of_two_names_are_told_both() -> None:
    zero, one = run_ranks(2, differ)
    assert zero == "pass 1: rank 0 runs 'model', rank 1 'draft'"
    assert one == "pass 1: rank 1 runs 'draft', rank 0 'model'"


def name_differently(rank: Rank) -> str:
    """A body."""
    with pytest.raises(ValueError, match="names differs between ranks") as caught:
        Lockstep(rank.comm, ("model", "draft")[: 1 + rank.rank])
    return str(caught.value)


def test_ranks_with_other_names_are_refused() -> None:
    assert all("draft" in text for text in run_ranks(2, name_differently))


def lose_rank_0(rank: Rank) -> str:
    """A body: rank 0 goes when it has said where it listens, and rank 1 connects behind that."""
    exchange = rank.comm.exchange

    def meet(*words: Any) -> dict[int, Any]:
        cards = exchange(*words)
        if rank.rank == 0:
            raise KeyboardInterrupt
        exchange("rank 0 is gone", None, PATIENCE_S)
        return cards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank.comm, "exchange", meet)
        with pytest.raises((putget.PeerTimeout, KeyboardInterrupt)) as caught:
            Lockstep(rank.comm)
    if rank.rank == 0:
        exchange("rank 0 is gone", None, PATIENCE_S)
    return str(caught.value)


def test_a_rank_that_has_gone_before_others_connect_is_named() -> None:
    _, found = run_ranks(2, lose_rank_0, mode="thread")
    assert found == "lockstep, round 0: rank 1 has lost the connection to rank(s) 0"


def find_no_way(rank: Rank, error: OSError) -> str:
    """A body: rank 1's system finds no way to rank 0, which waits for it."""

    def connect(*_: Any, **__: Any) -> Any:
        raise error

    if rank.rank == 0:
        rank.comm.compare("lockstep", {"names": ("model",)}, PATIENCE_S)
        rank.comm.exchange("lockstep", ["elsewhere", "nowhere", 1, "00"], PATIENCE_S)
        return ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lockstep.socket, "create_connection", connect)
        with pytest.raises(putget.PeerTimeout) as caught:
            Lockstep(rank.comm)
    assert caught.value.__cause__ is error
    return str(caught.value)


@pytest.mark.parametrize("error", [OSError(errno.EHOSTUNREACH, "No route to host"), socket.gaierror(-2, "not known")])
def test_a_rank_that_no_way_leads_to_is_named(error: OSError) -> None:
    _, found = run_ranks(2, find_no_way, error, mode="thread")
    assert found == "lockstep, round 0: rank 1 has lost the connection to rank(s) 0"


@pytest.mark.parametrize("names", [(), ("a", "a"), tuple(map(str, range(256)))])
def test_wrong_names_are_refused(names: tuple[str, ...]) -> None:
    (comm,) = putget.Communicator.local(1)
    with comm:
        with pytest.raises(ValueError, match=r"names is .*, expected 1 to 252 names, each once"):
            Lockstep(comm, names)
        step = Lockstep(comm, ("model", "draft"))
        with pytest.raises(ValueError, match="name is 'other', expected one of 'model', 'draft'"):
            step.begin("other")
        step.close()


def make_step(rank: Rank) -> None:
    """A body."""
    rank.state["step"] = Lockstep(rank.comm)


def sleep(rank: Rank) -> str:
    """A body: until a rank is gone."""
    try:
        while True:
            rank.state["step"].wait(None, PATIENCE_S)
    except putget.PeerTimeout as error:
        return f"{error.lost}"


def test_a_sleeping_rank_hears_at_once_that_another_is_killed() -> None:
    with fresh_ranks(3) as ranks:
        ranks.call(make_step)
        for rank in (0, 2):
            ranks.submit(rank, sleep)
        began = time.monotonic()
        ranks.signal(1, 9)
        assert ranks.results((0, 2)) == {0: "(1,)", 2: "(1,)"}
        assert time.monotonic() - began < PATIENCE_S


def finish_behind_a_reset(rank: Rank) -> list[Any]:
    """A body: rank 1 goes with a word unread, so that the next one to it cannot be sent."""
    step = Lockstep(rank.comm)
    if rank.rank == 0:
        step.begin()
    rank.comm.exchange("a word is unread", 0, PATIENCE_S)
    if rank.rank == 1:
        step.close()
    rank.comm.exchange("rank 1 is gone", 0, PATIENCE_S)
    if rank.rank == 1:
        return []
    assert lockstep._readable(step._peers.values(), PATIENCE_S)  # the end of the connection has come, too
    step.end()
    step.finish()
    with pytest.raises(putget.PeerTimeout) as caught:
        step.begun()
    step.leave(has_finished=True)
    step.close()
    return [step.num_finished, caught.value.lost]


def test_a_rank_finishes_once_beside_one_that_is_gone() -> None:
    """Its next question finds that, and a caller that goes on without lost ranks does so there."""
    assert run_ranks(2, finish_behind_a_reset, mode="thread")[0] == [1, (1,)]


def leave_by_an_error(rank: Rank, options: dict[str, str]) -> str:
    """A body: rank 1 leaves, and rank 0 begins a pass once it has heard of that."""
    step = Lockstep(rank.comm, **options)
    if rank.rank == 1:
        step.leave(has_finished=False)
    rank.comm.exchange("rank 1 has left", 0, PATIENCE_S)
    found = ""
    if rank.rank == 0:
        with pytest.raises(putget.PeerLeft) as caught:
            step.wait(None, PATIENCE_S)
        found = str(caught.value)
    rank.comm.exchange("behind", 0, PATIENCE_S)
    step.close()
    return found


@pytest.mark.parametrize(("options", "what"), [({}, "Lockstep"), ({"what": "serve_all"}, "serve_all")], ids=str)
def test_a_rank_that_leaves_is_told_by_the_callers_name(options: dict[str, str], what: str) -> None:
    found = run_ranks(2, leave_by_an_error, options, mode="thread")
    assert found[0] == f"rank 1 has left {what}: it raised an error inside; call it again on all ranks"


def fork_between_passes(rank: Rank) -> list[Any]:
    """A body: a child of rank 1 tries every call, and leaves by an error; then rank 1 has a pass."""
    step, refused = Lockstep(rank.comm), 0
    if rank.rank == 1:
        child = os.fork()
        if not child:
            calls = (step.begin, step.begun, lambda: step.wait(None, 0.0), step.finish, lambda: step.pause(1))
            for call in calls:
                with contextlib.suppress(putget.ForkedChild):
                    call()
                    os._exit(1)
            step.leave(has_finished=False)
            os._exit(0)
        refused = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    rank.comm.exchange("the child has ended", 0, PATIENCE_S)
    before = step.begun()
    rank.comm.exchange("nothing was said", 0, PATIENCE_S)
    if rank.rank == 1:
        step.begin()
    while rank.rank == 0 and step.begun() is None:
        step.wait(None, PATIENCE_S)
    step.end()
    rank.comm.exchange("behind", 0, PATIENCE_S)
    step.close()
    return [refused, before, step.number]


def test_a_forked_child_is_refused_and_does_not_leave() -> None:
    assert run_ranks(2, fork_between_passes) == [[0, None, 1]] * 2


def play_with_many_files(rank: Rank) -> list[Any]:
    """A body: the process has more than a thousand descriptors before it makes its own."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most[1], most[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        step, bell = Lockstep(rank.comm), Bell()
        bell.set()
        step.wait(bell, PATIENCE_S)
        if rank.rank == 0:
            step.begin()
        while step.begun() is None and rank.rank != 0:
            step.wait(None, PATIENCE_S)
        step.end()
        rank.comm.exchange("behind", 0, PATIENCE_S)
        step.close()
        return [bell.fileno() >= 1024, bell.is_set(), step.number]
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048, reason="few descriptors are allowed")
def test_descriptors_have_any_number() -> None:
    assert run_ranks(2, play_with_many_files) == [[True, True, 1]] * 2


def test_a_bell_rings_until_it_is_cleared() -> None:
    bell = Bell()
    assert not bell.wait(0.0)
    bell.set()
    bell.set()
    assert bell.wait(PATIENCE_S)
    assert bell.is_set()
    bell.clear()
    bell.clear()
    assert not bell.is_set()


def test_a_forked_child_neither_rings_nor_stills_its_parents_bell() -> None:
    bell = Bell()
    for call in (bell.set, bell.clear):
        was_set = bell.is_set()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # threads of other tests
            child = os.fork()
        if child == 0:
            try:
                call()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert bell.is_set() == was_set
        bell.set()


def leave_one_out(rank: Rank) -> list[Any]:
    """A body: rank 1 has begun a pass, of which rank 2 alone has heard, when the others leave it out."""
    step = rank.state["step"] = Lockstep(rank.comm)
    if rank.rank == 1:
        step.begin()
        with contextlib.suppress(putget.PeerTimeout):
            step.wait(None, PATIENCE_S)  # until a rank has closed its end
        return []
    while step.begun() is None:
        step.wait(None, PATIENCE_S)
    step.leave_out([1])
    before = step.begun()
    if rank.rank == 2:
        step.join(0, "model")
    return [before, step.begun(), step.end(), step.begun(), step.number]


def test_passes_of_a_rank_that_is_left_out_are_forgotten_but_for_ranks_that_are_in_them() -> None:
    with fresh_ranks(3) as ranks:
        for rank in range(3):
            ranks.submit(rank, leave_one_out)
        found = ranks.results((0, 2))
    assert found == {0: [None, None, None, None, 1], 2: [None, "model", None, None, 1]}


def test_a_bell_rings_when_the_interpreter_ends() -> None:
    """A handler that was registered early runs late: the bell's number is not another file's by then."""
    code = (
        "import atexit\n"
        "bells = []\n"
        "atexit.register(lambda: (bells[0].set(), print(bells[0].is_set())))\n"
        "from putget.lockstep import Bell\n"
        "bells.append(Bell())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
