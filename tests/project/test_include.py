"""The native sources' layers: what each folder includes, where inline assembly may stand, what may not occur at all.

Every rule is also run on a tree that breaks it, so a rule that no longer bites fails.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.project.checkout import NATIVE, ROOT, cpp_files, python_files

MAX_LINES = 500  # of a native file
CXX = shutil.which("c++") or shutil.which("g++")
SCREEN = 76  # lines of a Python function, its docstring apart
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:<([^>]+)>|"([^"]+)")', re.MULTILINE)
ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b\s*(?:volatile|__volatile__)?\s*\(")
MULTICAST = re.compile(r"cuMulticast|CU_MEM_ALLOCATION_COMP_MULTICAST|\bmultimem\.", re.IGNORECASE)
# Headers that the protocol may include: it is compiled for the device too.
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


def crossed_protocol(native: Path) -> Iterator[str]:
    """The round's text knows neither dispatch nor combine, these do not know each other, and none knows of domains."""
    others = {
        "round": ("dispatch", "combine", "domains", "landing"),
        "dispatch": ("combine", "domains", "landing"),
        "combine": ("dispatch", "domains", "landing"),
        "landing": ("dispatch", "combine", "domains"),
    }
    for path in cpp_files(native / "protocol"):
        for name in includes(path):
            if any(f"{other}/" in name for other in others.get(path.parent.name, ())):
                yield f"{path.relative_to(native)} includes {name}"


def broken_includes(native: Path) -> Iterator[str]:
    may_not_include = {
        "protocol": {"cpu", "cuda", "capi", "include", "moe", "probe", "domains"},
        "moe": {"cpu", "cuda", "capi", "include", "probe", "domains"},
        "balancer": {"cpu", "cuda", "capi", "include", "moe", "probe", "domains"},
        "domains": {"cuda", "capi", "moe", "balancer", "probe"},
        "experts": {"cuda", "capi", "moe", "domains", "probe"},
        "cpu": {"cuda", "capi", "probe", "domains"},
        "cuda": {"cpu", "capi", "probe", "domains"},
        "capi": {"probe"},
        # A simulation of domains runs the product's proxies; the kernels of probes stand alone.
        "probe": {"cpu", "protocol", "moe", "balancer", "domains"},
        "probe/domains": {"cpu", "cuda", "moe", "balancer"},
        "": {"cpu", "cuda", "capi", "probe", "domains"},
        "include": {"protocol", "moe", "balancer", "cpu", "cuda", "capi", "probe", "domains"},
    }
    for path in cpp_files(native):
        folder = folder_of(path, native)
        kind = "probe/domains" if path.parent == native / "probe" / "domains" else folder
        for name in includes(path):
            target = included_folder(name, path, native)
            foreign = FOREIGN.search(name) or target in may_not_include.get(kind, set())
            freestanding = name in FREESTANDING or target in {"protocol", "moe"}
            if foreign or (folder in {"protocol", "moe"} and not freestanding):
                yield f"{path.relative_to(native)} includes {name}"


def inline_assembly(native: Path) -> Iterator[str]:
    for path in cpp_files(native):
        name = str(path.relative_to(native))
        if name not in ("cuda/ptx.cuh", "cuda/sm90a/ptx_matrix.cuh") and ASM.search(path.read_text()):
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
        ("capi/a.cpp", '#include "probe/probe.h"'),
        ("probe/a.cu", '#include "protocol/round/signal.h"'),
        ("probe/a.cpp", '#include "domains/proxy.h"'),
        ("probe/domains/a.cpp", '#include "cpu/exec.h"'),
        ("domains/a.cpp", '#include "cuda/exec.cuh"'),
        ("domains/a.cpp", '#include "capi/guard.h"'),
        ("cpu/a.cpp", '#include "domains/proxy.h"'),
    ),
    crossed_protocol: (
        ("protocol/round/a.h", '#include "protocol/dispatch/items.h"'),
        ("protocol/round/a.h", '#include "protocol/combine/combine.h"'),
        ("protocol/dispatch/a.h", '#include "../combine/combine.h"'),
        ("protocol/combine/a.h", '#include "protocol/dispatch/dispatch.h"'),
        ("protocol/combine/a.h", '#include "protocol/domains/parcel.h"'),
        ("protocol/landing/a.h", '#include "protocol/dispatch/items.h"'),
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
    for part in ("round", "dispatch", "combine", "landing"):
        (tmp_path / "protocol" / part).mkdir(parents=True)
    for folder in ("moe", "balancer", "cpu", "cuda", "capi", "include", "probe", "probe/domains", "domains"):
        (tmp_path / folder).mkdir()
    (tmp_path / "include" / "putget.h").touch()
    (tmp_path / "cpu" / "exec.h").write_text('#include "protocol/round/shape.h"\n#include <vector>\n')
    (tmp_path / "cuda" / "ptx.cuh").write_text('asm volatile("fence.sc.sys;");\n')
    (tmp_path / "protocol" / "round" / "shape.h").write_text("#include <cstdint>\n// assembly (none) is here\n")
    assert list(rule(tmp_path)) == []
    (tmp_path / name).write_text(f"{line}\n")
    assert len(list(rule(tmp_path))) == 1


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a body, its docstring apart."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def long_functions(folder: Path) -> dict[str, int]:
    return {
        f"{path.relative_to(folder)}: {node.name}": code_lines(node)
        for path in python_files(folder)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > SCREEN
    }


def test_functions_fit_a_screen(tmp_path: Path) -> None:
    assert long_functions(ROOT / "python") == {}
    (tmp_path / "long.py").write_text("def f():\n" + "    x = 1\n" * (SCREEN + 1))
    assert long_functions(tmp_path) == {"long.py: f": SCREEN + 1}


def test_native_files_are_not_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in cpp_files(NATIVE)}
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def exec_operations(text: str) -> set[str]:
    return set(re.findall(r"\bexec(?:\(\))?\.(?:template )?(\w+)", text))


def test_what_the_protocol_asks_of_a_backend_is_in_one_header() -> None:
    """The compiler holds both backends against it."""
    header = NATIVE / "protocol" / "round" / "exec.h"
    asked = {
        name for path in cpp_files(NATIVE / "protocol") if path != header for name in exec_operations(path.read_text())
    }
    listed = exec_operations(header.read_text())
    assert len(asked) > 40
    assert asked == listed


@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("lost", ["last_to_arrive", "observe", "narrow_to_fp8", "pin"])
def test_a_backend_without_an_operation_does_not_compile(lost: str, tmp_path: Path) -> None:
    assert CXX is not None
    shutil.copytree(NATIVE, tmp_path / "native")
    native = tmp_path / "native"
    exec_header = native / "cpu" / "exec.h"
    source = tmp_path / "check.cpp"
    source.write_text(
        '#include "cpu/exec.h"\n#include "protocol/round/exec.h"\n'
        "static_assert(putget::ExecCheck<putget::cpu::Exec>::kComplete);\n"
    )
    command = [CXX, "-std=c++17", "-fsyntax-only", f"-I{native}", f"-I{native / 'include'}", str(source)]
    subprocess.run(command, check=True)
    exec_header.write_text(re.sub(rf"\b{lost}\(", f"{lost}_lost(", exec_header.read_text()))
    broken = subprocess.run(command, capture_output=True, text=True, check=False)
    assert broken.returncode != 0
    assert re.search(rf"no member named .{lost}\W", broken.stderr), broken.stderr
