"""Engines end before the interpreter does, because their callbacks need it."""

from __future__ import annotations

import atexit
import weakref

from putget_transfer._native import Engine

_open: weakref.WeakSet[Engine] = weakref.WeakSet()


def remember(engine: Engine) -> None:
    """Close the engine at exit, if it still exists then."""
    _open.add(engine)


@atexit.register
def _close_all() -> None:
    for engine in list(_open):
        engine.close()
