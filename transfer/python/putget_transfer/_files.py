"""Files that the command lines read and write."""

from __future__ import annotations

import argparse
from pathlib import Path


def check_places(options: argparse.Namespace, *names: str) -> None:
    """Refuse files that cannot be written, before minutes of work are spent on what they are to hold.

    Raises:
        ValueError: The folder of a file does not exist, or the file is a folder itself.
    """
    for name in names:
        path: Path | None = getattr(options, name)
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{name}: {path} came; its folder does not exist")
        if path is not None and path.is_dir():
            raise ValueError(f"{name}: {path} came; it is a folder, a file is needed")
