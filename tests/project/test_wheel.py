"""The installed files: the wheel's tag and content, the library's symbols and dependencies, and versions that agree."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import putget
from tests.project.checkout import BENCH, PACKAGE, ROOT, pyproject

ENTRY_POINT_GROUPS = {"console_scripts", "sglang.srt.plugins", "vllm.general_plugins"}
LIBRARIES = {
    PACKAGE / "libputget.so": ("putget.h", "putget_moe.h", "putget_domains.h", "putget_balancer.h"),
    BENCH / "libputget_probe.so": ("putget_probe.h",),
}
# Libraries that every glibc machine has; the driver is looked up at run time, and CUDA's runtime is linked in.
SYSTEM_LIBRARIES = re.compile(
    r"^(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux-[a-z0-9_-]+)\.so\.\d+$"
)


def output(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout


def needed_libraries(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-d", library))


@pytest.fixture(params=LIBRARIES, ids=lambda path: path.name)
def library(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    if not path.exists():
        pytest.skip(f"no {path.name} in python: this is not a development install")
    return path


def test_build_group_repeats_the_build_requirements() -> None:
    project = pyproject()
    assert set(project["build-system"]["requires"]) <= set(project["dependency-groups"]["build"])


def test_versions_agree() -> None:
    assert putget.__version__ == pyproject()["project"]["version"]


def test_library_exports_exactly_the_declared_functions(library: Path) -> None:
    header = "".join((ROOT / "native" / "include" / name).read_text() for name in LIBRARIES[library])
    declared = set(re.findall(r"PUTGET_API\b[^;(]*?\b(putget_\w+)\s*\(", header))
    exported = {line.split()[-1] for line in output("nm", "-D", "--defined-only", library).splitlines()}
    assert declared
    assert exported == declared


def test_library_loads_on_any_machine(library: Path) -> None:
    assert [name for name in needed_libraries(library) if not SYSTEM_LIBRARIES.match(name)] == []
    assert "RUNPATH" not in output("readelf", "-d", library)
    output(sys.executable, "-I", "-S", "-c", f"import ctypes; ctypes.CDLL({str(library)!r})")


def test_wheel_without_cuda(tmp_path: Path) -> None:
    """A machine that cannot build the CUDA part gets a wheel with the CPU part, for every Python 3."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("native", "python", "cmake"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    # The header of the transfer engine, as in the source distribution.
    header = Path("transfer/python/putget_transfer/include")
    shutil.copytree(ROOT / header, source / header)
    for name in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # Libraries that a development build left behind must not end up in the wheel.
    for path in LIBRARIES:
        (source / "python" / path.parent.name / path.name).write_text("stale")

    # The hook that pip calls, without the build isolation that would download the compiler again, and without the time
    # that it takes to optimise: `make build` has compiled this text for speed.
    code = (
        "import sys; from scikit_build_core.build import build_wheel;"
        "build_wheel(sys.argv[1], {'cmake.define.PUTGET_CUDA': 'OFF', 'cmake.build-type': 'Debug'})"
    )
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    build = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "dist"],
        cwd=source,
        env={**os.environ, "PATH": search, "CXXFLAGS": "-O0 -g0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    assert "putget: CPU part only" in build.stdout + build.stderr

    (wheel,) = (tmp_path / "dist").iterdir()
    assert re.fullmatch(rf"putget-{re.escape(putget.__version__)}-py3-none-linux_(x86_64|aarch64)\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    libraries = {f"{path.parent.name}/{path.name}" for path in LIBRARIES}
    assert {*libraries, "putget/py.typed", "putget/alltoall.py", "putget_bench/cli.py"} <= set(names)
    assert not [name for name in names if name.endswith((".cpp", ".cu", ".pyc"))]
    headers = {Path(name).name for name in names if name.endswith(".h")}
    assert headers == {"putget.h", "putget_moe.h", "putget_domains.h", "putget_balancer.h", "putget_transport.h"}
    assert (tmp_path / "installed/putget/include/putget.h").read_text() == (
        ROOT / "native/include/putget.h"
    ).read_text()
    (metadata,) = importlib.metadata.distributions(path=[str(tmp_path / "installed")])
    assert {entry.group for entry in metadata.entry_points} == ENTRY_POINT_GROUPS
    assert all(callable(entry.load()) for entry in metadata.entry_points)
    for installed in libraries:
        path = str(tmp_path / "installed" / installed)
        output(sys.executable, "-I", "-S", "-c", f"import ctypes; ctypes.CDLL({path!r})")
