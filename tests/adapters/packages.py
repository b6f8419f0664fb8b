"""Running single files of a large package: packages without their __init__, and stand-ins for what is not there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def shell(root: Path, *names: str) -> None:
    """Puts packages into sys.modules whose __init__ is not run; their modules are found."""
    for name in names:
        _add(ModuleType(name)).__path__ = [str(root.joinpath(*name.split(".")))]


def stand_in(name: str, **contents: Any) -> ModuleType:
    """Puts a module with these names into sys.modules."""
    module = ModuleType(name)
    module.__dict__.update(contents)
    module.__path__ = []
    return _add(module)


def lend(package: str, module: ModuleType, *names: str) -> None:
    """Gives a shell the names that its __init__ would have taken from a module."""
    for name in names:
        setattr(sys.modules[package], name, getattr(module, name))


def _add(module: ModuleType) -> ModuleType:
    name = module.__name__
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
    return module
