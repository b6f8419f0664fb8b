"""The Python package's layers: who imports whom, who reads the environment, who loads a shared library.

Every rule is also run on a tree that breaks it, so a rule that no longer bites fails.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.checkout import BENCH, PACKAGE, ROOT, SERVE, python_files

ENVIRONMENT = frozenset({"environ", "environb", "getenv", "putenv", "unsetenv"})
LOADERS = frozenset({"CDLL", "PyDLL", "LibraryLoader", "cdll", "pydll", "dlopen"})


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield the full dotted name of everything that a module imports; relative imports count from putget."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ["putget" if node.level else "", node.module]))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def mentioned_names(tree: ast.AST) -> Iterator[str]:
    """Yield every attribute, and every name imported from a module, wherever it is used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def files_that_mention(package: Path, names: frozenset[str]) -> set[str]:
    return {
        str(path.relative_to(package))
        for path in python_files(package)
        if not names.isdisjoint(mentioned_names(ast.parse(path.read_text())))
    }


def private_imports(package: Path, part: str) -> list[str]:
    """Name the putget modules with a leading underscore that a part imports or reaches through `putget.`."""
    found = []
    for path in python_files(package / part):
        tree = ast.parse(path.read_text())
        reached = {
            f"putget.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "putget"
        }
        for name in {*imported_names(tree), *reached}:
            parts = name.split(".")
            if parts[0] == "putget" and any(part.startswith("_") and not part.startswith("__") for part in parts):
                found.append(f"{path.relative_to(package)}: {name}")
    return found


def third_party_imports(path: Path) -> set[str]:
    roots = {name.split(".")[0] for name in imported_names(ast.parse(path.read_text()))}
    return roots - set(sys.stdlib_module_names)


def lint_imports(python_path: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts on the package in `python_path`.

    -S keeps out the development install, whose import hook would otherwise win over the path.
    """
    path = os.pathsep.join([str(python_path), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    return subprocess.run(
        [sys.executable, "-S", "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def package_copy(tmp_path: Path) -> Path:
    for package in (PACKAGE, BENCH, SERVE):
        shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path / PACKAGE.name


def test_import_contracts_hold() -> None:
    result = lint_imports(PACKAGE.parent)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("alltoall.py", "import putget_bench.cli", "Layers of the package"),
        ("memory/workspace.py", "from putget import alltoall", "Layers of the package"),
        ("experts/store.py", "from putget import balancer", "Layers of the package"),
        ("group/peers.py", "import putget.group.mesh", "Layers of a group"),
        ("_abi.py", "import putget.memory.workspace", "Layers of the package"),
        ("../putget_bench/cli.py", "import putget._abi", "Benchmarks and server use the public modules only"),
        ("../putget_bench/parser.py", "from putget_bench import cli", "No import circles"),
        ("adapters/rounds.py", "import putget.alltoall", "The adapters use what putget exports and nothing else"),
        (
            "adapters/shared.py",
            "import putget.adapters.rounds",
            "Layers of the adapters, whose families never import each other",
        ),
        (
            "adapters/vllm/mover.py",
            "import putget.adapters.flashinfer",
            "Layers of the adapters, whose families never import each other",
        ),
        ("adapters/deep_ep/rounds.py", "import putget.adapters.deep_ep.buffer", "Layers of DeepEP's adapters"),
        ("moe/experts.py", "import putget.moe.layer", "Layers of the mixture-of-experts layer"),
        ("reference.py", "import putget.errors", "The reference knows nothing of the implementation"),
    ],
)
def test_import_contracts_bite(package_copy: Path, module: str, line: str, contract: str) -> None:
    path = package_copy / module
    path.write_text(f"{path.read_text()}\n{line}\n")
    result = lint_imports(package_copy.parent)
    assert result.returncode != 0
    assert f"{contract} BROKEN" in result.stdout


def test_only_config_reads_the_environment(package_copy: Path) -> None:
    assert files_that_mention(PACKAGE, ENVIRONMENT) <= {"config.py"}
    (package_copy / "intruder.py").write_text("import os\nos.environ.get('X')\n")
    assert "intruder.py" in files_that_mention(package_copy, ENVIRONMENT)


def test_only_the_group_reaches_a_communicators_mesh(package_copy: Path) -> None:
    """Other modules say what they have to say by ``Communicator.exchange``."""
    assert {Path(name).parts[0] for name in files_that_mention(PACKAGE, frozenset({"_mesh"}))} == {"group"}
    (package_copy / "intruder.py").write_text("def f(comm):\n    return comm._mesh.exchange\n")
    assert "intruder.py" in files_that_mention(package_copy, frozenset({"_mesh"}))


def test_only_abi_loads_a_library(package_copy: Path) -> None:
    assert files_that_mention(PACKAGE, LOADERS) == {"_abi.py"}
    assert files_that_mention(BENCH, LOADERS) == {"probe_library.py"}
    (package_copy / "intruder.py").write_text("from ctypes import CDLL\n")
    assert "intruder.py" in files_that_mention(package_copy, LOADERS)


def test_reference_imports_torch_only(tmp_path: Path) -> None:
    for name in ("reference.py", "reference_moe.py"):
        assert third_party_imports(PACKAGE / name) == {"torch"}
    intruder = tmp_path / "reference.py"
    intruder.write_text("import torch\nfrom . import errors\n")
    assert third_party_imports(intruder) == {"torch", "putget"}


@pytest.mark.parametrize("part", ["putget_bench", "putget_serve", "putget/adapters"])
def test_parts_import_public_modules_only(package_copy: Path, part: str) -> None:
    assert private_imports(PACKAGE.parent, part) == []
    copy = package_copy.parent
    (copy / part / "intruder.py").write_text("import putget\nfrom putget import _abi\nputget._arguments.x()\n")
    assert sorted(private_imports(copy, part)) == [
        f"{part}/intruder.py: putget._abi",
        f"{part}/intruder.py: putget._arguments",
    ]


def test_adapters_and_public_modules_import_without_a_gpu() -> None:
    """`import putget` alone reaches for no GPU, and pulls in nothing of the command line."""
    code = (
        "import importlib, pkgutil, sys, torch, putget\n"
        "before = set(sys.modules)\n"
        "import putget.adapters\n"
        "for module in pkgutil.walk_packages(putget.adapters.__path__, 'putget.adapters.'):\n"
        "    importlib.import_module(module.name)\n"
        "roots = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "assert roots <= {'putget', 'numpy', *sys.stdlib_module_names}, roots\n"
        "assert not torch.cuda.is_initialized()\n"
        "heavy = {'matplotlib', 'rich', 'jsonschema', 'putget_bench'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
