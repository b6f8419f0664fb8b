"""The native sources' layers: what each folder includes, where inline assembly may stand, what may not occur at all.

Every rule is also run on a tree that breaks it, so a rule that no longer bites fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.project.checkout import NATIVE, ROOT, cpp_files, python_files

MAX_LINES = 500
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:<([^>]+)>|"([^"]+)")', re.MULTILINE)
ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b\s*(?:volatile|__volatile__)?\s*\(")
MULTICAST = re.compile(r"cuMulticast|CU_MEM_ALLOCATION_COMP_MULTICAST|\bmultimem\.", re.IGNORECASE)
# What the protocol may include: it is compiled for the device too.
FREESTANDING = frozenset({"cstdint", "cstddef"})
FOREIGN = re.compile(r"^(torch|ATen|c10|caffe2|pybind11|nanobind)/|^Python\.h$|^pybind11|^torch")


def includes(path: Path) -> list[str]:
    return [angled or quoted for angled, quoted in INCLUDE.findall(path.read_text())]


def folder_of(path: Path, native: Path) -> str:
    parts = path.relative_to(native).parts
    return parts[0] if len(parts) > 1 else ""


def included_folder(name: str, path: Path, native: Path) -> str:
    """Name the folder of native that a quoted include resolves to; empty for a system header."""
    for base in (path.parent, native):
        candidate = (base / name).resolve()
        if candidate.is_relative_to(native.resolve()) and candidate.exists():
            return folder_of(candidate, native.resolve())
    return name.split("/")[0] if "/" in name else ""


def broken_includes(native: Path) -> Iterator[str]:
    may_not_include = {
        "protocol": {"cpu", "cuda", "capi", "include", "moe"},
        "moe": {"cpu", "cuda", "capi", "include"},
        "balancer": {"cpu", "cuda", "capi", "include", "moe"},
        "cpu": {"cuda", "capi"},
        "cuda": {"cpu", "capi"},
        "": {"cpu", "cuda", "capi"},
        "include": {"protocol", "moe", "balancer", "cpu", "cuda", "capi"},
    }
    for path in cpp_files(native):
        folder = folder_of(path, native)
        for name in includes(path):
            target = included_folder(name, path, native)
            foreign = FOREIGN.search(name) or target in may_not_include.get(folder, set())
            freestanding = name in FREESTANDING or target in {"protocol", "moe"}
            if foreign or (folder in {"protocol", "moe"} and not freestanding):
                yield f"{path.relative_to(native)} includes {name}"


def inline_assembly(native: Path) -> Iterator[str]:
    for path in cpp_files(native):
        name = str(path.relative_to(native))
        if name != "cuda/ptx.cuh" and ASM.search(path.read_text()):
            yield name


def multicast(native: Path) -> Iterator[str]:
    """Multicast objects can put all GPUs of a machine out of service, so nothing here makes one."""
    for path in cpp_files(native):
        if MULTICAST.search(path.read_text()):
            yield str(path.relative_to(native))


RULES: dict[Callable[[Path], Iterator[str]], tuple[tuple[str, str], ...]] = {
    broken_includes: (
        ("protocol/a.h", "#include <vector>"),
        ("protocol/a.h", '#include "putget.h"'),
        ("protocol/a.h", '#include "../cpu/exec.h"'),
        ("protocol/a.h", "#include <cuda_runtime.h>"),
        ("protocol/a.h", '#include "moe/plan.h"'),
        ("moe/a.h", "#include <cmath>"),
        ("moe/a.h", '#include "cuda/exec.cuh"'),
        ("balancer/a.h", '#include "cpu/exec.h"'),
        ("cpu/a.cpp", '#include "cuda/exec.cuh"'),
        ("cuda/a.cu", '  #  include "../cpu/exec.h"'),
        ("cuda/a.cu", "#include <torch/extension.h>"),
        ("capi/a.cpp", "#include <Python.h>"),
        ("cpu/a.cpp", '#include "capi/validate.h"'),
    ),
    inline_assembly: (
        ("cuda/a.cuh", 'asm volatile("bar.sync 0;");'),
        ("cpu/a.cpp", '__asm__("pause");'),
    ),
    multicast: (("cuda/a.cpp", "cuMulticastCreate(&h, &p);"),),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_native_sources_keep_the_rule(rule: Callable[[Path], Iterator[str]]) -> None:
    assert cpp_files(NATIVE)
    assert list(rule(NATIVE)) == []


@pytest.mark.parametrize(
    ("rule", "name", "line"),
    [(rule, name, line) for rule, cases in RULES.items() for name, line in cases],
)
def test_rule_bites(tmp_path: Path, rule: Callable[[Path], Iterator[str]], name: str, line: str) -> None:
    for folder in ("protocol", "moe", "balancer", "cpu", "cuda", "capi", "include"):
        (tmp_path / folder).mkdir()
    (tmp_path / "include" / "putget.h").touch()
    (tmp_path / "cpu" / "exec.h").write_text('#include "protocol/shape.h"\n#include <vector>\n')
    (tmp_path / "cuda" / "ptx.cuh").write_text('asm volatile("fence.sc.sys;");\n')
    (tmp_path / "protocol" / "shape.h").write_text("#include <cstdint>\n// assembly (none) is here\n")
    assert list(rule(tmp_path)) == []
    (tmp_path / name).write_text(f"{line}\n")
    assert len(list(rule(tmp_path))) == 1


def test_no_file_is_too_long() -> None:
    folders = [ROOT / name for name in ("native", "python", "tests", "scripts", "cmake")]
    files = [path for folder in folders for path in (*python_files(folder), *cpp_files(folder))]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}
