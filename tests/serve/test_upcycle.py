"""Mistakes of the copy of a dense model; tests/engines/test_serve.py compares its text, as a soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from putget_serve import upcycle


@pytest.mark.parametrize("source", ["llama", "no/such.gguf", "email"])
def test_a_source_without_a_model_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=f"{source} is no GGUF file, no folder and no installed package"):
        upcycle._find(source)


def test_files_folders_and_packages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it was imported')")
    (package / "a.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    expected = (str(package), {"gguf_file": "a.gguf"})
    assert upcycle._find(str(package / "a.gguf")) == upcycle._find("some_model") == expected
    assert upcycle._find(str(package)) == (str(package), {})


@pytest.mark.parametrize("top_k", [0, 5])
def test_more_experts_of_a_token_than_there_are_are_refused(top_k: int) -> None:
    with pytest.raises(ValueError, match=f"top_k is {top_k}, num_experts 4"):
        upcycle.upcycle(None, 4, top_k)
