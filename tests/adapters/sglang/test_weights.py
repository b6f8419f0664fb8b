"""Weight updates of SGLang: a server with SGLang's rules for update sessions, and schedulers with the plug-in's loader.

tests/engines/test_sglang_weights.py runs SGLang itself.
"""

from __future__ import annotations

import base64
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import numpy as np
import torch

from putget_transfer import weights
from putget_transfer.adapters.options import Options
from putget_transfer.adapters.rendezvous import Rendezvous
from putget_transfer.adapters.sender import Sender
from putget_transfer.adapters.sglang.weights import LOADER, Trainer, TrainerInit, load, worker
from putget_transfer.adapters.sglang.weights.client import HTTPClient, done
from tests.transfer import weights_models as models

TP, DEADLINE_S = 2, 60.0


class Server:
    """Calls of a server, carried out by one scheduler after the other: no call may wait for another scheduler."""

    def __init__(self) -> None:
        self.models = [models.Engine(TP, rank) for rank in range(TP)]
        self.loaders: list[str] | None = [LOADER]
        self.version = "default"
        self.paused = self.open = self.moves = False
        self.flushes = self.calls = 0
        self.refuses = ""

    def __call__(self, path: str, body: dict[str, Any] | None = None) -> Any:
        self.calls += 1
        if path == "/server_info":
            return {"custom_weight_loader": self.loaders, "enable_eplb": self.moves}
        return getattr(self, path[1:])(**(body or {}))

    def pause_generation(self, mode: str) -> None:
        assert mode == "retract"
        self.paused = True

    def continue_generation(self) -> None:
        assert not self.open
        self.paused = False

    def begin_weight_update(self, selector: str) -> dict[str, Any]:
        assert self.paused
        assert not self.open
        self.open = True
        return {"success": True, "message": ""}

    def end_weight_update(self) -> dict[str, Any]:
        assert self.open
        self.open = False
        return {"success": True, "message": ""}

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: list[str],
        load_format: str,
        selector: str,
        flush_cache: bool,
        weight_version: str | None = None,
    ) -> dict[str, Any]:
        assert self.open
        assert (load_format, selector) == (LOADER, "target")
        for model, payload in zip(self.models, serialized_named_tensors, strict=True):
            load(model, pickle.loads(base64.b64decode(payload)))
        self.version = weight_version or self.version
        self.flushes += flush_cache
        return {"success": not self.refuses, "message": self.refuses}

    def versions(self) -> list[list[int]]:
        return [models.version_of(model, range(8)) for model in self.models]

    def workers(self) -> list[worker.Worker]:
        return [worker._workers[model] for model in self.models]


@pytest.fixture
def trainer() -> Iterator[Callable[..., tuple[Trainer, Server, models.Source]]]:
    started: list[tuple[Trainer, Server]] = []

    def make(server: Server | None = None, **options: Any) -> tuple[Trainer, Server, models.Source]:
        server, source = server or Server(), models.Source()
        init = TrainerInit(0, [TP], networks="host", deadline_s=DEADLINE_S, **options)
        started.append((Trainer(init, source, [server]), server))
        return started[-1][0], server, source

    yield make
    for one, server in started:
        one.shutdown()
        for scheduler in server.workers():
            scheduler.shutdown()


Make = Callable[..., tuple[Trainer, Server, models.Source]]


def test_versions_come_into_force_with_their_label(trainer: Make) -> None:
    sender, server, source = trainer()
    for version in (1, 3):
        source.set(version)
        calls = server.calls
        report = sender.send_weights(version)
        assert server.versions() == [[version]] * TP
        assert server.version == str(version)
        assert report.num_bytes == sender.sender.trainer.schedule.num_bytes
        # It landed without a call: what the server was asked for is one session, while it stood still.
        assert server.calls - calls == 5
    assert server.flushes == 2
    assert not server.paused
    with pytest.raises(ValueError, match="3 came; 3 has been sent"):
        sender.send_weights(3)


def test_changes_go_alone(trainer: Make) -> None:
    sender, server, source = trainer(delta_bytes=1 << 16)
    source.set(4)
    whole = sender.send_weights(1)
    with torch.no_grad():
        next(source.parameters()).view(-1)[:3] += 1
    changes = sender.send_weights(2)
    assert changes.num_deltas > 0
    assert changes.num_bytes < whole.num_bytes / 2
    source.set(4)
    assert sender.send_weights(3).num_deltas > 0
    assert server.versions() == [[4]] * TP


def test_a_scheduler_that_fails_keeps_all_from_the_version(trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, server, source = trainer()
    source.set(1)
    sender.send_weights(1)
    source.set(2)
    with monkeypatch.context() as patched:
        patched.setattr(server.workers()[1].receiver, "_land", _raises("out of memory"))
        with pytest.raises(weights.UpdateFailed, match="SGLang worker 1: out of memory"):
            sender.send_weights(2)
    assert server.versions() == [[1]] * TP
    assert server.version == "1"
    for version in (3, 4):  # words for the version before stay
        source.set(version)
        sender.send_weights(version)
        assert server.versions() == [[version]] * TP
    assert not [version for version in (1, 2) if sender.rendezvous.has(f"offers/{version}/0")]


def test_a_trainer_that_fails_leaves_the_old_version(trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, server, source = trainer()
    source.set(1)
    sender.send_weights(1)
    source.set(2)
    with monkeypatch.context() as patched:
        patched.setattr(sender.sender.trainer, "_task", _raises("the GPU is lost"))
        with pytest.raises(weights.UpdateFailed, match="the GPU is lost"):
            sender.send_weights(2)
    assert server.versions() == [[1]] * TP
    sender.shutdown()
    # Another trainer goes on.
    sender, _, source = trainer(server)
    source.set(5)
    sender.send_weights(5)
    assert server.versions() == [[5]] * TP


def test_a_version_that_was_not_announced_leaves_the_next_ones_alone(
    trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, server, source = trainer()
    with monkeypatch.context() as patched:
        patched.setattr(sender.rendezvous, "put", _raises("no memory"))
        with pytest.raises(RuntimeError, match="no memory"):
            sender.send_weights(1)
    source.set(2)
    sender.send_weights(np.int64(2))  # type: ignore[arg-type]
    assert server.versions() == [[2]] * TP


def test_a_version_whose_announcement_was_interrupted_is_given_up(
    trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have heard of it: they give it up at once, and the next one is announced behind it."""
    sender, server, source = trainer()
    put = sender.rendezvous.put

    def interrupted(key: str, value: Any) -> None:
        put(key, value)
        if key.startswith("next/"):
            raise KeyboardInterrupt

    source.set(1)
    with monkeypatch.context() as patched:
        patched.setattr(sender.rendezvous, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sender.send_weights(1)
    source.set(2)
    sender.send_weights(2)
    assert server.versions() == [[2]] * TP


def test_no_trainer_rank_takes_an_interrupted_version_for_sent() -> None:
    store = Rendezvous.open("127.0.0.1", 0, holds=True, timeout_s=DEADLINE_S)
    store.put("offers/1/0", {})

    def interrupted(*_arguments: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    def published(version: int, _deadline_s: float, **_options: Any) -> weights.Report:
        return weights.Report(version, 1)

    senders = [Sender("SGLang", rank, 2, 1, store, Options(networks="host").engine("cpu")) for rank in range(2)]
    for sender, publish in zip(senders, (interrupted, published), strict=True):
        sender.trainer = SimpleNamespace(publish=publish)
    end = time.monotonic() + DEADLINE_S
    with pytest.raises(KeyboardInterrupt):
        senders[0].send(1, end)
    with pytest.raises(weights.UpdateFailed, match="trainer rank 0: KeyboardInterrupt"):
        senders[1].send(1, end)
    for sender in senders:
        sender.close()


def test_a_version_that_may_be_in_force_is_told_so(trainer: Make) -> None:
    sender, server, source = trainer()
    source.set(1)
    server.refuses = "the cache was not flushed"
    with pytest.raises(weights.UpdateFailed, match=r"version 1 is not known to be in force.*not flushed"):
        sender.send_weights(1)
    assert not server.paused


def test_a_label_never_names_a_version_that_has_not_landed(trainer: Make) -> None:
    sender, server, source = trainer()
    source.set(1)
    sender.send_weights(1)
    server.pause_generation("retract")
    server.begin_weight_update("target")
    message = torch.frombuffer(bytearray(b'{"call": "commit", "version": 2}'), dtype=torch.uint8)
    with pytest.raises(weights.UpdateFailed, match="version 2 was decided; None has landed"):
        load(server.models[0], [(worker.MESSAGE, message)])
    assert server.versions() == [[1]] * TP


def test_mistakes_are_named() -> None:
    server = Server()
    server.loaders = None
    with pytest.raises(ValueError, match=f"start it with {LOADER}"):
        Trainer(TrainerInit(0, [TP]), {}, [server])
    moving = Server()
    moving.moves = True
    with pytest.raises(ValueError, match="--enable-eplb; SGLang would move experts"):
        Trainer(TrainerInit(0, [TP]), {}, [moving])
    for init, clients, words in (
        (TrainerInit(3, [TP]), [], "rank 3 of 1"),
        (TrainerInit(0, [0]), [server], r"tp_sizes \[0\] came"),
        (TrainerInit(0, [TP], num_trainers=2), [server], "master_port 0 came"),
        (TrainerInit(0, [TP]), [], "0 came; tp_sizes has 1"),
    ):
        with pytest.raises(ValueError, match=words):
            Trainer(init, {}, clients)
    with pytest.raises(ValueError, match=r"'q.weight' came; a trainer of putget sends 'putget'"):
        load(server.models[0], [("q.weight", torch.zeros(1))])


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
        b"HTTP/1.1 500 Oh\r\nContent-Length: 100\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnope",
        b"what\r\n\r\n",
    ],
)
def test_a_server_that_breaks_off_is_named(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listens:

        def serve() -> None:
            connection, _ = listens.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        serving = threading.Thread(target=serve)
        serving.start()
        url = f"http://127.0.0.1:{listens.getsockname()[1]}"
        with pytest.raises(weights.UpdateFailed, match=f"{url}/begin_weight_update|/begin_weight_update: 'nope' came"):
            done(HTTPClient(url, timeout_s=DEADLINE_S), "/begin_weight_update", {})
        serving.join()


def test_parameters_that_do_not_fit_are_named_and_the_server_goes_on() -> None:
    server = Server()
    with pytest.raises(weights.UpdateFailed, match=r"SGLang worker 0: 'head\.weight'"):
        Trainer(TrainerInit(0, [TP], networks="host", deadline_s=DEADLINE_S), {"head.weight": torch.zeros(8)}, [server])
    assert not server.paused
    assert not server.open


def _raises(text: str) -> Callable[..., None]:
    def fails(*_arguments: Any) -> None:
        raise RuntimeError(text)

    return fails
