"""Callers' other acts beside submitting: they cancel, raise, fork, hit Ctrl-C, and read the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt

LONG_S = 60.0


@pytest.fixture
def pair() -> Iterator[tuple[pt.Engine, pt.Engine]]:
    network = pt.SimNetwork(seed=8)
    with (
        pt.Engine.builder().group(pt.DeviceGroup.sim(network, 2)).build() as a,
        pt.Engine.builder().group(pt.DeviceGroup.sim(network, 2)).build() as b,
    ):
        yield a, b


def test_a_cancelled_task_stops_waiting_and_nothing_else_does(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    (src, _), (_dst, desc) = a.alloc_mr(64), b.alloc_mr(64)
    complaints: list[dict[str, object]] = []

    async def wait(transfer: pt.Transfer) -> None:
        await transfer

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
        for cancelled in (True, False):
            arrived = b.expect_imm_count(7, 1, deadline_s=LONG_S)
            others = [asyncio.ensure_future(wait(arrived)) for _ in range(3)]
            task = asyncio.ensure_future(wait(arrived))
            await asyncio.sleep(0.01)
            if cancelled:
                task.cancel()
            with pytest.raises(asyncio.CancelledError if cancelled else asyncio.TimeoutError):
                await asyncio.wait_for(task, 0.01)
            assert not arrived.done()
            await a.submit_single_write(64, 7, (src, 0), (desc, 0))
            await asyncio.wait_for(asyncio.gather(*others), LONG_S)
            assert b.reset_imm(7) == 1
        # A loop that ends before the transfer does.
        task = asyncio.ensure_future(wait(b.expect_imm_count(7, 1, deadline_s=LONG_S)))
        await asyncio.sleep(0)

    asyncio.run(work())
    a.submit_single_write(64, 7, (src, 0), (desc, 0)).wait(LONG_S)
    b.expect_imm_count(7, 1, deadline_s=LONG_S).wait(LONG_S)
    assert complaints == []


def test_a_cancelled_wait_keeps_no_loop_and_says_nothing_to_it(
    pair: tuple[pt.Engine, pt.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    (src, _), (_dst, desc) = a.alloc_mr(64), b.alloc_mr(64)
    complaints: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    arrived, told = b.expect_imm_count(7, 1, deadline_s=LONG_S), threading.Event()

    async def wait() -> None:
        await arrived

    async def work() -> None:
        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(work())
    loop.close()
    kept = weakref.ref(loop)
    del loop
    gc.collect()
    assert kept() is None
    assert not arrived.done()
    # Callbacks are called one after the other.
    arrived.add_done_callback(lambda _error: told.set())
    a.submit_single_write(64, 7, (src, 0), (desc, 0)).wait(LONG_S)
    assert told.wait(LONG_S)
    assert complaints == []


def test_what_a_callback_raises_is_reported_and_harms_nobody_else(
    pair: tuple[pt.Engine, pt.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    (src, _), (_dst, desc) = a.alloc_mr(8), b.alloc_mr(8)
    reported: queue.Queue[tuple[type[BaseException], object]] = queue.Queue()
    monkeypatch.setattr(sys, "unraisablehook", lambda found: reported.put((found.exc_type, found.object)))

    def bad(*_arguments: object) -> None:
        raise LookupError("a caller's mistake")

    b.submit_recvs(64, 1, bad)
    watcher = b.alloc_uvm_watcher(bad)
    watcher.store(1)
    a.submit_single_write(8, None, (src, 0), (desc, 0), done=bad).wait(LONG_S)
    # With one buffer, the second message needs the one that the first callback had.
    for _ in range(2):
        a.submit_send(b.main_address(), b"text", deadline_s=LONG_S).wait(LONG_S)
    for _ in range(4):
        assert reported.get(timeout=LONG_S) == (LookupError, bad)
    told: queue.Queue[BaseException | None] = queue.Queue()
    for engine in (a, b):
        engine.expect_imm_count(1, 0, done=told.put).wait(LONG_S)
        assert told.get(timeout=LONG_S) is None


def test_a_refused_submission_leaves_its_flag_as_it_was(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    (src, _), (_dst, desc), flag = a.alloc_mr(8), b.alloc_mr(8), pt.Flag()
    with pytest.raises(ValueError, match="src"):
        a.submit_single_write(9, None, (src, 0), (desc, 0), done=flag)
    assert (flag.pending, flag.failed) == (0, 0)
    a.submit_single_write(8, None, (src, 0), (desc, 0), done=flag).wait(LONG_S)
    assert (flag.pending, flag.failed) == (0, 0)


MISTAKES: dict[str, Callable[[pt.Engine, pt.MrHandle, pt.MrDesc], object]] = {
    r"len: -1 came": lambda a, h, d: a.submit_single_write(-1, None, (h, 0), (d, 0)),
    r"imm: 4294967296 came; numbers from 0 to 4294967295": lambda a, h, d: a.submit_single_write(
        1, 1 << 32, (h, 0), (d, 0)
    ),
    r"imm: -1 came": lambda a, _h, _d: a.imm_count(-1),
    r"src: .*, -1\) came": lambda a, h, d: a.submit_single_write(1, None, (h, -1), (d, 0)),
    r"dst: .*, -1\) came": lambda _a, _h, d: pt.ScatterDst(1, 0, (d, -1)),
    r"nic: -1 came": lambda a, h, d: a.submit_single_write(1, None, (h, 0), (d, 0), nic=-1),
    r"nic: 2 came; 0 to 1": lambda a, h, d: a.submit_single_write(1, None, (h, 0), (d, 0), nic=2),
    r"indices: \[-1, 0, .{100,}\.\.\. came": lambda _a, _h, _d: pt.Pages([-1, *range(1000)], 8),
    r"stride: -8 came": lambda _a, _h, _d: pt.Pages([0], -8),
    r"count: -1 came": lambda a, _h, _d: a.expect_imm_count(1, -1),
    r"deadline_s: NaN came": lambda a, _h, _d: a.expect_imm_count(1, 0, deadline_s=float("nan")),
    r"callback: None came": lambda a, _h, _d: a.submit_recvs(64, 1, None),  # type: ignore[arg-type]
    r"callback: 3 came": lambda a, _h, _d: a.alloc_uvm_watcher(3),  # type: ignore[arg-type]
    r"pace_us: 501 came; 0 to 500 microseconds are allowed, or None": lambda a, _h, _d: a.alloc_uvm_watcher(
        pace_us=501
    ),
    r"pace_us: -1 came; 0 to 500": lambda a, _h, _d: a.alloc_uvm_watcher().set_pace(-1),
    r"pace_us: 0.5 came; 0 to 500": lambda a, _h, _d: a.alloc_uvm_watcher(
        pace_us=0.5,  # type: ignore[arg-type]
    ),
    r"offset: -1 came": lambda _a, h, _d: h.read(-1, 3),
    r"memory: -5 came": lambda a, _h, _d: a.reg_mr(-5, 8),
    r"length: -8 came": lambda a, _h, _d: a.reg_mr(bytearray(8), -8),
    r"group: 7 came": lambda a, _h, _d: a.addresses(7),
    r"ordinal: -1 came": lambda _a, _h, _d: pt.DeviceGroup.nvlink(-1),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_number_that_does_not_fit_is_a_value_error(words: str, pair: tuple[pt.Engine, pt.Engine]) -> None:
    a = pair[0]
    handle, desc = a.alloc_mr(64)
    with pytest.raises(ValueError, match=words):
        MISTAKES[words](a, handle, desc)
    assert "putget_transfer_submitted_total 0\n" in a.metrics_text()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and that is inherited: the tests may be such a job."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interrupt_soon() -> Iterator[None]:
    """Ctrl-C within the block, which waits by then; on a busy machine it may come at the block's begin."""
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_wait(pair: tuple[pt.Engine, pt.Engine]) -> None:
    arrived = pair[1].expect_imm_count(1, 1, deadline_s=LONG_S)
    with pytest.raises(KeyboardInterrupt), interrupt_soon():
        arrived.wait(LONG_S)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_wait_for_room() -> None:
    network = pt.SimNetwork(seed=8)
    with (
        pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).max_submissions(1).build() as a,
        pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build() as b,
    ):
        (src, _), (_dst, desc) = a.alloc_mr(8), b.alloc_mr(8)
        a.submit_single_write(8, None, (src, 0), (desc, 0)).wait(LONG_S)
        network.cut(a.main_address(), b.main_address())
        stuck = a.submit_single_write(8, 2, (src, 0), (desc, 0), deadline_s=LONG_S)
        told: list[object] = []
        # The deadline is the bound of this test: with the interrupt unheard, EngineBusy comes instead.
        with pytest.raises(KeyboardInterrupt), interrupt_soon():
            a.submit_single_write(8, 1, (src, 0), (desc, 0), done=told.append, deadline_s=LONG_S)
        # Nothing was submitted, and there is room again once the other one is over.
        stuck.cancel()
        with pytest.raises(pt.TransferFailed):
            stuck.wait(LONG_S)
        _own, own = a.alloc_mr(8)
        a.submit_single_write(8, 3, (src, 0), (own, 0), deadline_s=LONG_S).wait(LONG_S)
        a.expect_imm_count(3, 1, deadline_s=LONG_S).wait(LONG_S)
        assert (b.imm_count(1), told) == (0, [])


FORK = """
import os, sys
import putget_transfer as pt

network = pt.SimNetwork()
engine = pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build()
handle, desc = engine.alloc_mr(8)
before = engine.expect_imm_count(1, 1, deadline_s=60)
child = os.fork()
if child == 0:
    for attempt in (
        lambda: engine.submit_single_write(8, 1, (handle, 0), (desc, 0)),
        lambda: engine.alloc_mr(8),
        lambda: before.wait(),
    ):
        try:
            attempt()
        except pt.EngineError as error:
            assert "fork" in str(error), error
        else:
            raise AssertionError("a fork did something with an engine that has no threads there")
    # Its own engine works, and the old one ends without harm, by name and at exit.
    own = pt.Engine.builder().group(pt.DeviceGroup.sim(pt.SimNetwork(), 1)).build()
    own.expect_imm_count(1, 0).wait(60)
    del handle
    sys.exit(0)
_, status = os.waitpid(child, 0)
engine.submit_single_write(8, 1, (handle, 0), (desc, 0)).wait(60)
before.wait(60)
engine.close()
print("child", os.waitstatus_to_exitcode(status))
"""


def test_a_fork_is_told_that_the_engine_is_not_its_own() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
        env={**os.environ, "RUST_BACKTRACE": "0"},
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "child 0\n", "")


DURING_A_FORK = """
import os, threading

told = threading.Event()
seen = []

def during():
    engine.submit_single_write(8, 1, (handle, 0), (desc, 0), done=lambda error: told.set()).wait(60)
    seen.append(told.wait(0.2))

os.register_at_fork(before=during)  # such functions run in the opposite order: this one behind putget_transfer's
import putget_transfer as pt

engine = pt.Engine.builder().group(pt.DeviceGroup.sim(pt.SimNetwork(), 1)).build()
handle, desc = engine.alloc_mr(8)
child = os.fork()
if child == 0:
    os._exit(0)
_, status = os.waitpid(child, 0)
assert told.wait(60)
engine.close()
print("child", os.waitstatus_to_exitcode(status), "called during the fork", seen)
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="CPython 3.12 mends the mutex in the child")
def test_no_callback_comes_to_the_interpreter_in_the_middle_of_a_fork() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", DURING_A_FORK], capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "child 0 called during the fork [False]\n", "")


INTERRUPTED_FORK = """
import ctypes, functools, os, signal, threading

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs this may ignore it
# Behind putget_transfer's function, and no Python: the handler runs once there is Python to run.
os.register_at_fork(before=functools.partial(ctypes.CDLL(None)["raise"], signal.SIGINT))
import putget_transfer as pt

engine = pt.Engine.builder().group(pt.DeviceGroup.sim(pt.SimNetwork(), 1)).build()
handle, desc = engine.alloc_mr(8)
try:
    child = os.fork()
    if child == 0:
        os._exit(0)
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted")
told = threading.Event()
engine.submit_single_write(8, 1, (handle, 0), (desc, 0), done=lambda error: told.set()).wait(60)
print("called", told.wait(4.5))  # beside a fork that is under way it takes 5 s
engine.close()
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="CPython 3.12 mends the mutex in the child")
def test_callbacks_come_after_an_interrupt_in_the_middle_of_a_fork() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_FORK], capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "interrupted\ncalled True\n", "")


def test_the_metrics_are_what_prometheus_reads(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    (src, _), (_dst, desc) = a.alloc_mr(1 << 20), b.alloc_mr(1 << 20)
    a.submit_single_write(1 << 20, 1, (src, 0), (desc, 0)).wait(LONG_S)
    # The text format, line by line: a metric's HELP and TYPE come before its samples, and counters end in _total.
    kinds: dict[str, str] = {}
    samples: dict[str, float] = {}
    lines = a.metrics_text().splitlines(keepends=True)
    assert all(line.endswith("\n") for line in lines)
    for line in lines:
        if found := re.fullmatch(r"# HELP (\w+) [^\\]+\n", line):
            assert found[1] not in kinds
            helped = found[1]
        elif found := re.fullmatch(r"# TYPE (\w+) (counter|gauge|histogram)\n", line):
            assert found[1] == helped
            kinds[found[1]] = found[2]
        elif kinds[helped] == "histogram":
            found = re.fullmatch(helped + r'(_bucket\{le="(?:[\d.]+|\+Inf)"\}|_sum|_count) ([\d.]+)\n', line)
            assert found is not None, line
            assert helped + found[1] not in samples
            samples[helped + found[1]] = float(found[2])
        else:
            found = re.fullmatch(r'(\w+)(\{nic="\d+"\})? (\d+)\n', line)
            assert found is not None, line
            assert found[1] == helped
            assert (kinds[found[1]] == "counter") == found[1].endswith("_total")
            assert found[1] + (found[2] or "") not in samples
            samples[found[1] + (found[2] or "")] = float(found[3])
    posted = "putget_transfer_word_to_post_seconds"
    assert (samples[posted + '_bucket{le="+Inf"}'], samples[f"{posted}_count"], samples[f"{posted}_sum"]) == (0, 0, 0)
    assert samples["putget_transfer_completed_total"] == 1
    written = [value for name, value in samples.items() if name.startswith("putget_transfer_write_bytes_total{")]
    assert len(written) == 2
    assert sum(written) == 1 << 20


def test_a_wait_inside_a_callback_is_an_error(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    (src, _), (_dst, desc) = a.alloc_mr(64), b.alloc_mr(64)
    told: queue.Queue[object] = queue.Queue()

    def callback(_error: pt.EngineError | None) -> None:
        endless = a.expect_imm_count(1, 1, deadline_s=LONG_S)
        try:
            endless.wait(LONG_S)
        except ValueError as error:
            told.put(str(error))
        endless.cancel()
        # Another engine's end needs nothing of this thread.
        b.expect_imm_count(2, 1, deadline_s=LONG_S).wait(LONG_S)
        told.put("over")

    a.submit_single_write(64, 2, (src, 0), (desc, 0), done=callback)
    assert "inside a callback" in str(told.get(timeout=LONG_S))
    assert told.get(timeout=LONG_S) == "over"
