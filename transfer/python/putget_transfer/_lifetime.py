"""Engines end before the interpreter does, because their callbacks need it, and with what refers to them."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
import weakref

from putget_transfer._native import Engine, collecting, forking

_open: weakref.WeakSet[Engine] = weakref.WeakSet()


def remember(engine: Engine) -> None:
    """Close the engine at exit, if it still exists then."""
    if _note not in gc.callbacks:
        gc.callbacks.append(_note)
    _open.add(engine)


def _note(phase: str, _info: object) -> None:
    # An engine that the collector drops does not call what goes with it, and waits for no callback.
    collecting(phase == "start")


@atexit.register
def _close_all() -> None:
    for engine in list(_open):
        engine.close()


if sys.version_info < (3, 12):
    # There a child waits for good if a callback thread comes to the interpreter in the middle of the fork.
    # None of these is a Python function: the handler of a signal would run in it, and what that raises would end it.
    _over = functools.partial(forking, False)
    os.register_at_fork(before=functools.partial(forking, True), after_in_parent=_over, after_in_child=_over)
