"""Engines end before the interpreter does, because their callbacks need it, and with what refers to them."""

from __future__ import annotations

import atexit
import gc
import weakref

from putget_transfer._native import Engine, collecting

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
