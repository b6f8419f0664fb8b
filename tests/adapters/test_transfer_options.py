"""Options of the transfer engine's adapters: what a user writes wrong is named, before anything starts."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
from putget_transfer.adapters.options import VARIABLE, Options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_requests", 1.5),
        ("max_requests", 0),
        ("max_requests", 2**32),
        ("segment_tokens", 0.5),
        ("segment_tokens", True),
        ("segment_tokens", 2**64),
        ("lease_s", math.nan),
        ("lease_s", "30"),
        ("address", 5),
    ],
)
def test_values_that_do_not_fit_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"kv_connector_extra_config: {name} "):
        Options.of({name: value})


def test_values_that_fit_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"max_requests": 7, "segment_tokens": 6.4e1, "lease_s": 3, "networks": "tcp, host"}'
    monkeypatch.setenv(VARIABLE, text)
    found = Options.from_environment()
    assert isinstance(found.segment_tokens, int)
    assert (found.max_requests, found.segment_tokens, found.lease_s) == (7, 64, 3)
    assert found.words("cpu") == ["tcp", "host"]
