"""Calls that the handler of a signal cannot end in their middle.

Python runs handlers in the main thread alone, between any two of its steps, and what a handler raises ends the step
that is under way: bytes that a socket has given would be lost, and the next message begin in the middle of one. So
what moves bytes runs in another thread while the main thread waits for it. That wait may end early, the call does not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

_Result = TypeVar("_Result")

_GRACE_S = 1.0  # a call that is under way ends in this time, or goes on alone

_jobs: SimpleQueue[Callable[[], None]] | None = None


def shielded(call: Callable[[], _Result]) -> _Result:
    """Runs a call to its end, also where a handler raises meanwhile: that is raised afterwards."""
    if threading.current_thread() is not threading.main_thread():
        return call()  # no handler runs here
    results: list[_Result] = []
    errors: list[BaseException] = []
    over = threading.Lock()
    over.acquire()

    def job() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            over.release()

    _queue().put(job)
    try:
        over.acquire()
    except BaseException:
        over.acquire(timeout=_GRACE_S)
        raise
    if errors:
        raise errors[0]
    return results[0]


def _queue() -> SimpleQueue[Callable[[], None]]:
    global _jobs
    if _jobs is None:
        jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=_work, args=(jobs,), name="putget-sockets", daemon=True).start()
        _jobs = jobs
    return _jobs


def _work(jobs: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()


def _forget() -> None:
    """A forked child has no such thread."""
    global _jobs
    _jobs = None


os.register_at_fork(after_in_child=_forget)
