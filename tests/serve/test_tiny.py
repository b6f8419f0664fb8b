"""The trainer of tiny models refuses mistakes; tests/engines/test_serve.py trains, as a soak."""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from putget_serve.tiny import train


def test_a_kind_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kind is 'llama', expected one of qwen3_moe, gpt_oss, deepseek_v3"):
        train("llama", tmp_path / "model", Path(__file__))
    assert list(tmp_path.iterdir()) == []


def test_texts_that_are_not_there_are_named(tmp_path: Path) -> None:
    for by_heart, texts in ((tmp_path / "no.md", []), (Path(__file__), [tmp_path / "no.md"])):
        with pytest.raises(ValueError, match=r"no\.md is no file"):
            train("qwen3_moe", tmp_path / "model", by_heart, texts)
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_of_another_text_and_no_steps_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.md").write_text("some words")
    with pytest.raises(ValueError, match=r"prompt 'no such words of it' is not in .*text\.md"):
        train("qwen3_moe", tmp_path / "model", tmp_path / "text.md", prompt="no such words of it")
    with pytest.raises(ValueError, match="most_steps is 0, expected 1 or more"):
        train("qwen3_moe", tmp_path / "model", tmp_path / "text.md", most_steps=0)
    assert [path.name for path in tmp_path.iterdir()] == ["text.md"]


@pytest.mark.parametrize("goes_on", [True, None, False])
def test_a_model_that_does_not_go_on_is_trained_again(
    goes_on: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TrainingBegan(Exception):
        pass

    def import_module(_: str) -> None:
        raise TrainingBegan

    monkeypatch.setattr(hashlib, "sha256", lambda _: SimpleNamespace(hexdigest=lambda: "the same"))
    monkeypatch.setattr(importlib, "import_module", import_module)
    (tmp_path / "text.md").write_text("some words")
    found = {"digest": "the same", "goes_on": goes_on}
    (tmp_path / "trained.json").write_text(json.dumps(found))
    if goes_on is False:
        with pytest.raises(TrainingBegan):
            train("qwen3_moe", tmp_path, tmp_path / "text.md", prompt="some")
    else:
        assert train("qwen3_moe", tmp_path, tmp_path / "text.md", prompt="some") == found
