"""Names of putget's come into an engine's module when it is imported (putget/adapters/engines.py)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from putget.adapters import engines


def test_a_module_that_was_looked_up_before_is_changed_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines ask whether a module exists, and another thread may import it meanwhile."""
    name = "putget_test_of_engines"
    (tmp_path / f"{name}.py").write_text("word = 'theirs'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    changed: list[ModuleType] = []
    engines.when_imported(name, changed.append)
    for _ in range(2):
        assert importlib.util.find_spec(name) is not None
    assert changed == []
    module = importlib.import_module(name)
    del sys.modules[name]
    assert changed == [module]
    importlib.import_module(name)  # once is enough
    del sys.modules[name]
    assert changed == [module]
