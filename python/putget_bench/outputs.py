"""Files that a command writes: whether they can be written is found out before the work, not after."""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path

PICTURES = (".png", ".svg", ".pdf")


def check_writable(flag: str, path: str | None, suffixes: tuple[str, ...] = (), needs: str | None = None) -> None:
    """Finds out before a long run, not after, that its result cannot be written. The file stays as it is.

    Args:
        flag: the flag's name, for the message.
        path: the flag's value; None: nothing will be written.
        suffixes: that the path may end in; any if there are none.
        needs: a Python package that writes it.

    Raises:
        ValueError: naming the flag, the path and what is wrong with it.
        ModuleNotFoundError: The package is missing.
    """
    if path is None:
        return
    if suffixes and Path(path).suffix not in suffixes:
        ends = Path(path).suffix
        raise ValueError(f"{flag} must end in {' or '.join(suffixes)}, got {path}: it ends in {ends!r}")
    try:
        _try_to_open(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ValueError(f"{flag} {path}: {_REASONS.get(type(error), reason)}") from error
    if needs is not None:
        importlib.import_module(needs)


_REASONS: dict[type[Exception], str] = {
    IsADirectoryError: "is a directory",
    FileNotFoundError: "its directory does not exist",
}


def _try_to_open(path: str) -> None:
    """Opens a file to append, and closes it. A file that was not there is removed again.

    A pipe without a reader is an error, not a wait.
    """
    target = os.path.realpath(path)
    was_there = os.path.exists(target)
    os.close(os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666))
    if not was_there:
        with contextlib.suppress(FileNotFoundError):  # ranks try the same path, and another one was faster
            os.unlink(target)
