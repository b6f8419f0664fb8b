"""Threads that begin together give the library one function, which lives on; see alltoall/test_interrupts.py, too."""

from __future__ import annotations

import ctypes
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from putget import _abi
from putget.memory import signals


def test_threads_that_begin_together_give_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=30)
    given: list[int | None] = []

    def give(check: object) -> None:
        both.wait()  # neither thread has returned from listen()
        given.append(ctypes.cast(check, ctypes.c_void_p).value)  # type: ignore[arg-type]

    monkeypatch.setattr(_abi, "library", lambda: SimpleNamespace(putget_set_interrupt_check=give))
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(signals.listen) for _ in range(2)]:
            done.result(30)
    gc.collect()
    assert len(given) == 2
    assert given[0] is not None
    assert given[0] == given[1]
    assert ctypes.CFUNCTYPE(ctypes.c_int)(given[0])() == 0  # nobody has let it go
