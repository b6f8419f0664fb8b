"""Settings of ``putget serve`` that are wrong are refused before a process starts."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from putget import BackendUnavailable
from putget_serve import ranks
from putget_serve.settings import Settings, claimed, listen
from tests.engines.prompts import free_port

Make = Callable[..., Settings]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Settings that are right, but for those given."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.24.0")
    (tmp_path / "config.json").write_text("{}")
    right = Settings(
        path=str(tmp_path),
        ep_size=2,
        device="cpu",
        host="127.0.0.1",
        port=free_port(),
        dtype="auto",
        max_tokens_per_rank=8,
        cache_tokens=None,
        stream_interval=1,
        num_slots=None,
        balance="off",
        timeout_s=1.0,
        setup_timeout_s=1.0,
    )
    return lambda **wrong: dataclasses.replace(right, **wrong)


def test_right_settings_pass_and_leave_the_port_free(make: Make) -> None:
    for settings in (make(), make(num_slots=4, balance="online")):
        settings.check()
        listen(settings.host, settings.port).close()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"path": "no/such/folder"}, "PATH is 'no/such/folder', expected a folder with config.json"),
        ({"port": 0}, "--port is 0, expected 1 to 65535"),
        ({"port": 70000}, "--port is 70000, expected 1 to 65535"),
        ({"host": "192.0.2.1"}, "--host 192.0.2.1 --port"),
        ({"num_slots": 5}, "--num_slots is 5, expected a multiple of --ep_size, 2"),
        ({"device": "cuda", "ep_size": 3}, "--ep_size is 3, this machine has 2 GPUs: --device cpu runs anywhere"),
        ({"device": "cuda", "balance": "online"}, "--num_slots and --balance are for --device cpu"),
        ({"device": "cuda", "num_slots": 4}, "--num_slots and --balance are for --device cpu"),
    ],
)
def test_wrong_settings_are_named(make: Make, wrong: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=re.escape(text)):
        make(**wrong).check()


def test_a_port_that_is_taken_is_named(make: Make) -> None:
    """By a server that listens as ranks do, and by one whose ranks do not listen yet."""
    settings = make()
    with (
        listen(settings.host, settings.port),
        pytest.raises(ValueError, match=rf"--host 127.0.0.1 --port {settings.port}: Address already in use"),
    ):
        settings.check()
    with (
        claimed(settings.host, settings.port),
        pytest.raises(ValueError, match=f"--port {settings.port}: another putget serve has taken it"),
    ):
        ranks.serve(settings)
    with claimed(settings.host, settings.port):
        pass


@pytest.mark.parametrize("version", ["5.22.1", "6.0"])
def test_another_transformers_is_named(make: Make, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(BackendUnavailable, match=f"transformers is installed in version {version}; .* from 5.23"):
        make().check()


def test_without_transformers_the_message_says_how_to_install_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(BackendUnavailable, match=r"not installed .*: in a checkout .* pip install '\.\[serve\]'"):
        make().check()
