"""Signals while native code waits: their handlers run then, and what one raises ends the wait."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator

from putget import _abi

_raised: list[BaseException] = []


def _answers() -> Generator[int, None, None]:
    """Runs the handlers of signals that have come, each time it is resumed: 1 where one raised, else 0.

    A generator, because the interpreter may run handlers as soon as Python code goes on: here that is inside of
    ``try``, in a function it would be before.
    """
    answer = 0
    while True:
        try:
            while True:
                yield answer
                answer = 0
                ctypes.pythonapi.PyErr_CheckSignals()
        except GeneratorExit:
            raise
        except BaseException as error:
            _raised.append(error)
            answer = 1


_answering = _answers()
next(_answering)
# Made once, as the module is imported: ranks that are threads begin together, and of two functions the library might
# have the one that nobody keeps.
_check = _abi.INTERRUPT_CHECK(_answering.__next__)


def listen() -> None:
    """Lets waits on CPU ask for signals, from now on."""
    _abi.library().putget_set_interrupt_check(_check)


def take_raised() -> BaseException | None:
    """The exception that a handler has raised while this thread waited."""
    if not _raised or threading.current_thread() is not threading.main_thread():
        return None
    return _raised.pop()
