"""The demo's last part without transformers; tests/engines/test_serve.py has it serve."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from putget import PutgetError
from putget_bench import demo_serve
from putget_bench.progress import make_console

ROOT = Path(__file__).parents[2]


def printed(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of the part, and its output in one line."""
    code = demo_serve.run(make_console())
    return code, " ".join(capsys.readouterr().out.split())


def test_the_text_is_that_of_the_readme() -> None:
    readme = " ".join((ROOT / "README.md").read_text().replace("**", "").split())
    assert demo_serve.TEXT in readme
    assert demo_serve.TEXT.startswith(demo_serve.PROMPT)


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        (["fastapi"], "fastapi is not installed"),
        (["transformers", "tokenizers"], "transformers and tokenizers are not installed"),
    ],
)
def test_without_the_extra_it_says_what_to_install_and_starts_nothing(
    absent: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else object())
    for name in ("run", "Popen"):
        monkeypatch.setattr(subprocess, name, lambda *_, **__: pytest.fail("a process was started"))
    install = "in a checkout of putget: pip install '.[serve]'"
    assert printed(capsys) == (0, f"One prompt through putget serve is left out: {words} ({install}).")


@pytest.mark.parametrize(("answer", "code"), [(" mixture-of-experts inference:", 0), (" something else", 1), ("", 1)])
def test_another_text_is_a_failure(
    answer: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    @contextlib.contextmanager
    def served(folder: Path) -> Iterator[str]:
        assert folder == tmp_path / "putget" / "demo"
        yield "an address"

    stand_ins: dict[str, Any] = {"_train": lambda _: None, "_served": served, "_complete": lambda _: answer}
    for name, stand_in in {"why_not": lambda: None, **stand_ins}.items():
        monkeypatch.setattr(demo_serve, name, stand_in)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    got, out = printed(capsys)
    assert (got, "FAILED" in out) == (code, bool(code))
    assert " ".join(f"answer: {answer}".split()) in out


def test_a_server_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    words = r"(?s)putget serve ended with 2:.*expected a folder with config\.json"
    with pytest.raises(PutgetError, match=words), demo_serve._served(tmp_path):
        pytest.fail("there is no model")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PutgetError, match=r"the model has no place: .*XDG_CACHE_HOME names another folder"):
        demo_serve._train(tmp_path / "file" / "demo")


def test_a_training_without_end_is_given_up_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = tmp_path / "python"
    endless.write_text("#!/bin/sh\necho step 5\nexec sleep 60\n")
    endless.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(endless))
    monkeypatch.setattr(demo_serve, "_PATIENCE_S", 8.0)  # the program has to begin within it
    with pytest.raises(PutgetError, match=r"the tiny model is not trained after 8 s:\nstep 5"):
        demo_serve._train(tmp_path / "demo")


def test_a_server_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('4 ranks answer', flush=True)"

    def popen(_: list[str], **options: Any) -> subprocess.Popen[str]:
        started.append(real([sys.executable, "-c", f"{program}; time.sleep(60)"], **options))
        return started[0]

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    with demo_serve._served(tmp_path):
        monkeypatch.setattr(demo_serve, "_PATIENCE_S", 1.0)
    assert started[0].returncode == -signal.SIGKILL
