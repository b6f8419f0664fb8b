"""A transfer engine that is not there, or of another version, is named before there is any network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import putget
from putget.group import networks
from tests.protocol.tags import ROOT

HEADER = ROOT / "transfer" / "python" / "putget_transfer" / "include" / "putget_transfer.h"
CC = shutil.which("cc")


def version() -> int:
    line = next(line for line in HEADER.read_text().splitlines() if line.startswith("#define PT_ABI_VERSION"))
    return int(line.split()[-1])


def refused(monkeypatch: pytest.MonkeyPatch, path: Path) -> str:
    """The error for an engine in this file."""
    monkeypatch.setattr(networks, "engine_library", lambda: str(path))
    with pytest.raises(putget.BackendUnavailable) as raised:
        networks.EngineNetwork(0, 2, "tcp", ("127.0.0.1",), b"secret")
    return str(raised.value)


def library(folder: Path, name: str, code: str, *options: str) -> Path:
    if CC is None:
        pytest.skip("needs a C compiler")
    source, target = folder / f"{name}.c", folder / f"{name}.so"
    source.write_text(code)
    subprocess.run([CC, "-shared", "-fPIC", *options, "-o", target, source], check=True)
    return target


def test_a_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = refused(monkeypatch, tmp_path / "none.so")
    assert words.startswith(f"the transfer engine {tmp_path}/none.so cannot be loaded: ")


def test_another_abi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = library(tmp_path, "other", "int pt_abi_version(void) { return 999; }\n")
    assert refused(monkeypatch, path) == (f"the transfer engine {path} has ABI version 999, needed is {version()}")


def test_a_function_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = library(tmp_path, "old", f"int pt_abi_version(void) {{ return {version()}; }}\n")
    assert refused(monkeypatch, path) == (
        f"the transfer engine {path} has no function pt_last_error: it is of another version"
    )
    nothing = library(tmp_path, "nothing", "int other(void) { return 0; }\n")
    assert "has no function pt_abi_version" in refused(monkeypatch, nothing)


def test_a_package_that_is_not_installed() -> None:
    """`import putget` does not need it."""
    code = (
        "import sys\n"
        "sys.modules['putget_transfer'] = None\n"
        "import putget\n"
        "from putget.group.networks import EngineNetwork\n"
        "try:\n"
        "    EngineNetwork(0, 2, 'tcp', (), b'secret')\n"
        "except putget.BackendUnavailable as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.startswith("a network between processes needs the package putget_transfer: ")
    assert done.stdout.rstrip().endswith("in a checkout of putget: pip install ./transfer")


@pytest.mark.parametrize(
    ("provider", "nics", "words"),
    [
        ("verbs", ("no_such_device",), "verbs"),
        ("tcp", ("203.0.113.77",), "203.0.113.77"),
        ("carrier pigeons", (), "carrier pigeons"),
    ],
)
def test_networks_that_are_not_there(provider: str, nics: tuple[str, ...], words: str) -> None:
    pytest.importorskip("putget_transfer._native", reason="putget_transfer is not built: see `make transfer`")
    with pytest.raises((putget.PutgetError, ValueError), match=words):
        networks.EngineNetwork(0, 2, provider, nics, b"secret")
