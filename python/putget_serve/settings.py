"""Settings of ``putget serve``, checked before a process starts."""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CLI = "transformers.cli.serving"
# The parts of transformers' app.
APP_MODULES = tuple(
    f"{_CLI}.{name}"
    for name in ("chat_completion", "completion", "response", "systemone", "transcription", "server", "utils")
)
_INSTALL = "in a checkout of putget: pip install '.[serve]'"
_MOST_PORT = 65535


@dataclass(frozen=True)
class Settings:
    """One server.

    Attributes:
        path: Folder of the model and its tokenizer.
        ep_size: Ranks.
        device: "cpu" or "cuda".
        host: Address to listen at.
        port: Port to listen at, the same for all ranks.
        dtype: Of the weights: "auto", or torch's name.
        max_tokens_per_rank: Most tokens of a rank in one pass.
        cache_tokens: Tokens in a rank's KV cache; None: what transformers finds room for.
        stream_interval: A stream tells its first token, then every so many, and its end.
        num_slots: Expert slots of all ranks together; None: as many as ``putget.adapters.transformers.spread`` gives.
        balance: "off", "static" or "online", as there.
        timeout_s: Deadline of a wait for another rank in a pass, in seconds.
        setup_timeout_s: Deadline of the start in seconds.
    """

    path: str
    ep_size: int
    device: str
    host: str
    port: int
    dtype: str
    max_tokens_per_rank: int
    cache_tokens: int | None
    stream_interval: int
    num_slots: int | None
    balance: str
    timeout_s: float
    setup_timeout_s: float

    def check(self) -> None:
        """Raises an error where something is wrong that can be known before ranks start.

        Raises:
            ValueError: A setting is wrong, or the port is taken.
            BackendUnavailable: transformers is not installed, or in a version that is not known.
        """
        if not (Path(self.path) / "config.json").is_file():
            raise ValueError(f"PATH is {self.path!r}, expected a folder with config.json, weights and a tokenizer")
        if not 1 <= self.port <= _MOST_PORT:
            raise ValueError(f"--port is {self.port}, expected 1 to {_MOST_PORT}")
        if self.device == "cuda":
            self._check_gpus()
        if self.num_slots is not None and self.num_slots % self.ep_size:
            raise ValueError(f"--num_slots is {self.num_slots}, expected a multiple of --ep_size, {self.ep_size}")
        _check_transformers()
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                taken.bind((self.host, self.port))
            except OSError as error:
                raise ValueError(f"--host {self.host} --port {self.port}: {error.strerror}") from error

    def _check_gpus(self) -> None:
        import torch

        count = torch.cuda.device_count()
        if count < self.ep_size:
            raise ValueError(f"--ep_size is {self.ep_size}, this machine has {count} GPUs: --device cpu runs anywhere")
        if self.num_slots is not None or self.balance != "off":
            raise ValueError("--num_slots and --balance are for --device cpu: leave them out on GPUs")


def _check_transformers() -> None:
    from putget import BackendUnavailable

    try:
        importlib.import_module("putget.adapters.transformers").require_transformers()
    except BackendUnavailable as error:
        raise BackendUnavailable(f"{error}: {_INSTALL}") from error


@contextlib.contextmanager
def claimed(host: str, port: int) -> Iterator[None]:
    """Inside of it no other server of this machine takes the port.

    Ranks open it once their weights are there, and share it. So would two servers that start at once, each of which
    finds it free: clients would get the answers of one or the other.

    Raises:
        ValueError: Another server has taken it.
    """
    address = socket.gethostbyname(host)  # of one address, whatever its name
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claim:
        try:
            claim.bind(f"\0putget serve {address} {port}")  # the kernel forgets the name with this process
        except OSError as error:
            raise ValueError(f"--host {host} --port {port}: another putget serve has taken it") from error
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket on a port that other ranks listen on too: the kernel shares out connections."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((host, port))
    sock.listen(1024)
    return sock
