"""Variables of the environment: wrong values are refused by name."""

from __future__ import annotations

import pytest

from putget import config


@pytest.mark.parametrize(("value", "seconds"), [(None, 30.0), ("", 30.0), ("5", 5.0), ("0.5", 0.5)])
def test_an_engines_deadline(value: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PUTGET_ENGINE_TIMEOUT_S", raising=False)
    if value is not None:
        monkeypatch.setenv("PUTGET_ENGINE_TIMEOUT_S", value)
    assert config.engine_timeout_s() == seconds


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf"])
def test_a_deadline_that_is_none_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUTGET_ENGINE_TIMEOUT_S", value)
    with pytest.raises(ValueError, match=f"PUTGET_ENGINE_TIMEOUT_S is '{value}'"):
        config.engine_timeout_s()
