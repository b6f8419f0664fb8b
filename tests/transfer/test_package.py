"""The transfer package: its example, its stub, its wheel."""

from __future__ import annotations

import ast
import ctypes
import inspect
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.project.checkout import ROOT

_native = pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)

putget_transfer = pytest.importorskip("putget_transfer")

TRANSFER = ROOT / "transfer"


def example() -> str:
    found = re.search(r"```python\n(.*?)```", (TRANSFER / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_of_the_readme_runs() -> None:
    subprocess.run([sys.executable, "-c", example()], check=True, timeout=120)


def test_the_library_has_the_functions_of_the_header() -> None:
    header = (TRANSFER / "python/putget_transfer/include/putget_transfer.h").read_text()
    library = ctypes.CDLL(putget_transfer.library())
    declared = set(re.findall(r"\b(pt_\w+)\(", re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)))
    assert len(declared) > 46
    assert [name for name in sorted(declared) if not hasattr(library, name)] == []


def stub_names(tree: ast.Module) -> dict[str, set[str]]:
    """Map each class of the stub to the public names in it; assignments and properties count too."""
    names: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            body = names.setdefault(node.name, set())
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    body.add(item.name)
                elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    body.add(item.target.id)
    return {name: {item for item in body if not item.startswith("_")} for name, body in names.items()}


def test_the_stub_names_what_there_is() -> None:
    stub = stub_names(ast.parse((TRANSFER / "python/putget_transfer/_native.pyi").read_text()))
    classes = {name: item for name, item in vars(_native).items() if inspect.isclass(item)}
    assert classes.keys() == stub.keys()
    for name, item in classes.items():
        # The payload of an exception is set on the instance.
        own = set() if issubclass(item, Exception) else {found for found in vars(item) if not found.startswith("_")}
        assert own == (set() if issubclass(item, Exception) else stub[name]), name


def test_the_stub_has_the_arguments() -> None:
    tree = ast.parse((TRANSFER / "python/putget_transfer/_native.pyi").read_text())
    engine = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Engine")
    checked = 0
    for method in engine.body:
        if isinstance(method, ast.FunctionDef) and method.name.startswith(("submit_", "expect_", "add_", "reg_")):
            arguments = [argument.arg for argument in (*method.args.args, *method.args.kwonlyargs)]
            found = inspect.signature(getattr(_native.Engine, method.name))
            assert list(found.parameters) == arguments, method.name
            checked += 1
    assert checked > 8


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    maturin = Path(sys.executable).parent / "maturin"
    if not maturin.exists():
        pytest.skip("maturin is not installed here")
    result = subprocess.run(
        [ROOT / "scripts/cargo.sh", "with", maturin, "build", "--locked", "--out", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode == 0 and not wheels:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stderr
    [wheel] = wheels
    return wheel


def test_one_wheel_for_every_python(wheel: Path) -> None:
    assert re.fullmatch(r"putget_transfer-[\d.]+-cp310-abi3-\w+\.whl", wheel.name)


def test_the_wheel_works_without_the_rest(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    assert (tmp_path / "putget_transfer/py.typed").exists()
    assert (tmp_path / "putget_transfer/include/putget_transfer.h").exists()
    # -S and an empty path: no torch, no numpy, no putget.
    program = f"{example()}\nimport sys\nassert 'torch' not in sys.modules and 'putget' not in sys.modules\n"
    program += "import ctypes\nimport putget_transfer\n"
    program += "assert ctypes.CDLL(putget_transfer.library()).pt_abi_version() > 0\n"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-S", "-c", program], check=True, timeout=120, env=environment)
