"""Where things lie in the checkout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "putget"
BENCH = ROOT / "python" / "putget_bench"
SERVE = ROOT / "python" / "putget_serve"
NATIVE = ROOT / "native"
CPP_SUFFIXES = frozenset({".h", ".cuh", ".cpp", ".cu"})


def pyproject() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def cpp_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix in CPP_SUFFIXES)


def python_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))
