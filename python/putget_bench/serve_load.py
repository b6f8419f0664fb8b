"""Load for `putget serve-bench`: aiperf in processes of its own, and what each request saw.

aiperf is NVIDIA's load generator for servers of language models. It draws the arrivals and the lengths, and writes a
line for each request. It has a hundred dependencies, so it may be installed apart: the program is what is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from putget import BackendUnavailable, PutgetError

_START_S = 180.0  # until aiperf's processes are there, and its results are written
_SAID = 1500  # characters of its output in an error
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class Load:
    """Requests to one server.

    Attributes:
        url: The server.
        model: Its name there.
        tokenizer: A folder, or a name on a hub.
        rate: Requests a second, at random times; None: ``concurrency`` counts.
        concurrency: Requests under way; one that ends makes room for the next one. None: ``rate`` counts.
        requests: How many.
        prompt_tokens: Mean.
        prompt_stddev: Standard deviation of these.
        output_tokens: Mean.
        output_stddev: Standard deviation of these.
        streams: Whether answers come token by token.
        timeout_s: Deadline of a request in seconds.
        seed: Of arrivals, lengths and prompts.
    """

    url: str
    model: str
    tokenizer: str
    rate: float | None
    concurrency: int | None
    requests: int
    prompt_tokens: int
    prompt_stddev: int
    output_tokens: int
    output_stddev: int
    streams: bool
    timeout_s: float
    seed: int

    @property
    def limit_s(self) -> float:
        """Time that all requests may take, the start of aiperf included."""
        if self.rate is not None:
            return _START_S + self.timeout_s + 2 * self.requests / self.rate
        assert self.concurrency is not None
        return _START_S + self.timeout_s * -(-self.requests // self.concurrency)

    def words(self) -> list[str]:
        """The flags of ``aiperf profile``."""
        arrivals = ["--concurrency", str(self.concurrency)]
        if self.rate is not None:
            arrivals = ["--request-rate", f"{self.rate:g}", "--request-rate-mode", "poisson"]
        streams = ["--streaming"] if self.streams else []
        tokenizer = str(Path(self.tokenizer).resolve()) if Path(self.tokenizer).is_dir() else self.tokenizer
        return [
            *("--url", self.url, "--model", self.model, "--tokenizer", tokenizer),
            *("--endpoint-type", "completions", "--use-server-token-count", *streams),
            *("--isl", str(self.prompt_tokens), "--isl-stddev", str(self.prompt_stddev)),
            *("--osl", str(self.output_tokens), "--osl-stddev", str(self.output_stddev)),
            *("--request-count", str(self.requests), *arrivals, "--random-seed", str(self.seed)),
            *("--request-timeout-seconds", f"{self.timeout_s:g}"),
            *("--ui", "none", "--export-level", "records", "--no-gpu-telemetry", "--no-server-metrics"),
        ]


def find_aiperf() -> str:
    """The program, beside this Python or on the PATH.

    Raises:
        BackendUnavailable: It is not there.
    """
    beside = Path(sys.executable).parent
    found = shutil.which("aiperf", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise BackendUnavailable(
            "serve-bench needs the program aiperf: in a checkout of putget, pip install '.[serve-bench]'; or install "
            "aiperf into an environment of its own, and put its bin folder on the PATH"
        )
    return str(Path(found).absolute())


def run(aiperf: str, load: Load) -> tuple[list[dict[str, Any]], str]:
    """Sends the requests.

    Args:
        aiperf: The program.
        load: The requests.

    Returns:
        aiperf's record of each request, in the order of their ends, and aiperf's version.

    Raises:
        PutgetError: aiperf failed, did not end, or told of another number of requests.
    """
    with tempfile.TemporaryDirectory(prefix="putget_load_") as folder:
        out, log = Path(folder) / "out", Path(folder) / "log"
        command = [aiperf, "profile", *load.words(), "--artifact-dir", str(out)]
        with log.open("w") as file, _started(command, file, folder, Path(load.tokenizer).is_dir()) as process:
            try:
                code: int | None = process.wait(load.limit_s)
            except subprocess.TimeoutExpired:
                code = None
        records = list(_read(out / "profile_export.jsonl"))
        if len(records) != load.requests:
            ended = f"did not end in {load.limit_s:g} s" if code is None else f"ended with code {code}"
            raise PutgetError(
                f"aiperf {ended} and told of {len(records)} of {load.requests} requests:\n{log.read_text()[-_SAID:]}"
            )
        summary = out / "profile_export_aiperf.json"
        version = json.loads(summary.read_text())["aiperf_version"] if summary.is_file() else "unknown"
        return records, version


@contextlib.contextmanager
def _started(command: list[str], log: Any, folder: str, is_local: bool) -> Iterator[subprocess.Popen[bytes]]:
    """aiperf's processes, which have all ended behind it. Their temporary files go to the folder."""
    environment = {**os.environ, "TMPDIR": folder}
    if is_local:  # aiperf 0.13 takes a folder for a name on a hub if it is told to stay offline
        environment = {name: value for name, value in environment.items() if name not in _OFFLINE}
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        for line in path.read_text().splitlines():
            yield json.loads(line)
