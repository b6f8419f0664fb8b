"""The last part of `putget demo`: one prompt through `putget serve` on four CPU ranks.

The model is a tiny one that knows a few sentences by heart. It is trained once, in seconds, and kept in the user's
cache.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from putget import BackendUnavailable, PutgetError
from putget.adapters.transformers import require_transformers
from putget_bench.progress import RunProgress

RANKS = 4
TEXT = (
    "putget is the communication layer for mixture-of-experts inference: dispatch puts, combine gets. It moves tokens "
    "between the GPUs of an expert-parallel group with one-sided stores and loads over NVLink. One kernel dispatches, "
    "one combines. No host, no collective library and no atomics between GPUs are on the path. Every wait has a "
    "deadline and says who is missing."
)
PROMPT = "putget is the communication layer for"
_MOST_TOKENS = 48
_MOST_STEPS = 400  # a tenth of it is enough
_PACKAGES = ("transformers", "tokenizers", "fastapi", "uvicorn", "openai")  # of the extra `serve`
_INSTALL = "in a checkout of putget: pip install '.[serve]'"
_PATIENCE_S = 300.0  # beside much other work
_TAIL = 2000  # characters of a log in an error


def run(console: Console) -> int:
    """Serves the prompt, and prints what comes back.

    Returns:
        0, also where the extra `serve` is not installed, which is said; 1 if the text is not the one that was learnt.

    Raises:
        PutgetError: The model could not be trained, or the server does not answer.
    """
    if (reason := why_not()) is not None:
        console.print(f"One prompt through putget serve is left out: {reason}.", soft_wrap=True)
        return 0
    folder = _cache()
    with RunProgress(console, "putget demo", 2) as progress:
        progress.stage("training a tiny model on a few sentences")
        _train(folder)
        progress.advance()
        progress.stage(f"starting putget serve on {RANKS} CPU ranks")
        with _served(folder) as url:
            answer = _complete(url)
        progress.advance()
    console.print(f"\nOne prompt through putget serve on {RANKS} CPU ranks, four of 16 experts on each", style="bold")
    console.print(f"prompt: {PROMPT}", soft_wrap=True)
    console.print(f"answer: {answer}", soft_wrap=True)
    if not answer or not TEXT[len(PROMPT) :].startswith(answer):
        console.print(f"FAILED: the model was taught: {TEXT[len(PROMPT) :]}", soft_wrap=True)
        return 1
    console.print("The model goes on as the text that it was trained on.")
    return 0


def why_not() -> str | None:
    """Packages that are missing, and how to install them; None: nothing is missing."""
    absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        return f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed ({_INSTALL})"
    try:
        require_transformers()
    except BackendUnavailable as error:
        return f"{error} ({_INSTALL})"
    return None


def _cache() -> Path:
    """The folder of the model, which outlives this run."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "putget" / "demo"


def _train(folder: Path) -> None:
    """Trains the model, if it is not there yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / "text.md"
        text.write_text(TEXT)
    except OSError as error:
        raise PutgetError(f"the model has no place: {error}; XDG_CACHE_HOME names another folder") from error
    words = ["qwen3_moe", str(folder / "model"), "--by_heart", str(text), "--prompt", PROMPT]
    command = [sys.executable, "-m", "putget_serve.tiny", *words, "--most_steps", str(_MOST_STEPS)]
    try:
        done = subprocess.run(
            command, env=_environment(), capture_output=True, text=True, check=False, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired as error:
        # These are bytes, also where text is asked for.
        said = ((error.stdout or b"") + (error.stderr or b"")).decode(errors="replace")[-_TAIL:]
        raise PutgetError(f"the tiny model is not trained after {_PATIENCE_S:g} s:\n{said}") from error
    if done.returncode:
        raise PutgetError(f"the tiny model could not be trained:\n{(done.stdout + done.stderr)[-_TAIL:]}")


def _environment() -> dict[str, str]:
    # A folder needs no hub. Threads of torch would spin on the cores of other ranks.
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    """The address of the server, while it runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", str(folder / "model"), "--ep_size", str(RANKS), "--device", "cpu", "--port", str(port)]
    with tempfile.NamedTemporaryFile("w", prefix="putget_demo_") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "putget", *words],
            env={**_environment(), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + _PATIENCE_S
            while f"{RANKS} ranks answer" not in (said := Path(log.name).read_text()):
                if process.poll() is not None:
                    raise PutgetError(f"putget serve ended with {process.returncode}:\n{said[-_TAIL:]}")
                if time.monotonic() > deadline:
                    raise PutgetError(f"putget serve does not answer after {_PATIENCE_S:g} s:\n{said[-_TAIL:]}")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_PATIENCE_S)


def _complete(url: str) -> str:
    """The text that the server gives for the prompt."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": _MOST_TOKENS}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            return str(json.loads(answer.read())["choices"][0]["text"])
    except urllib.error.HTTPError as error:
        raise PutgetError(f"putget serve says {error.code}: {error.read().decode()[-_TAIL:]}") from error
    except OSError as error:
        raise PutgetError(f"putget serve does not answer the prompt: {error}") from error
