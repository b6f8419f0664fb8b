"""How a trainer reaches a server of SGLang."""

from __future__ import annotations

import base64
import http.client
import json
import pickle
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, Protocol

from putget_transfer.adapters.sglang.weights import LOADER
from putget_transfer.adapters.sglang.weights.worker import MESSAGE
from putget_transfer.weights import UpdateFailed


class Client(Protocol):
    """A server's endpoints by their paths."""

    def __call__(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Call an endpoint, with a body by POST; return its JSON."""


class HTTPClient:
    """A server's endpoints over HTTP."""

    def __init__(self, url: str, *, timeout_s: float = 300.0, headers: dict[str, str] | None = None) -> None:
        """Take the server's address, as "http://10.0.0.9:30000", and headers such as an API key."""
        self.url, self.timeout_s, self.headers = url.rstrip("/"), timeout_s, headers or {}

    def __call__(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Call an endpoint.

        Raises:
            UpdateFailed: It does not answer, or answers with an error, which is named.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.headers}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise UpdateFailed(f"{self.url}{path}: {error.code} {_said(error)}") from error
        except (OSError, http.client.HTTPException) as error:
            raise UpdateFailed(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        try:
            return json.loads(text)
        except ValueError:
            return text.decode(errors="replace")


def _said(error: urllib.error.HTTPError) -> str:
    """Return what a server says with an error, as far as it came."""
    try:
        return error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as broken:
        return f"{error.reason}; its words broke off: {broken}"


def called(client: Client, calls: Sequence[dict[str, Any]], **options: Any) -> None:
    """Carry out a call in all schedulers of a server: in an update session, by the loader.

    Args:
        client: The server.
        calls: One for each tensor-parallel rank.
        options: Fields of SGLang's request.

    Raises:
        UpdateFailed: SGLang refuses it.
    """
    import torch

    payloads = []
    for call in calls:
        message = torch.frombuffer(bytearray(json.dumps(call).encode()), dtype=torch.uint8)
        payloads.append(base64.b64encode(pickle.dumps([(MESSAGE, message)])).decode())
    done(client, "/begin_weight_update", {"selector": "target"})
    try:
        body = {"serialized_named_tensors": payloads, "load_format": LOADER, "selector": "target", **options}
        done(client, "/update_weights_from_tensor", body)
    finally:
        done(client, "/end_weight_update", {})


def done(client: Client, path: str, body: dict[str, Any]) -> None:
    """Call an endpoint that says whether it succeeded."""
    answer = client(path, body)
    if not isinstance(answer, dict) or "success" not in answer:
        raise UpdateFailed(f"{path}: {answer!r:.200} came; an object that says whether it succeeded is needed")
    if not answer["success"]:
        raise UpdateFailed(f"{path}: {answer.get('message')}")
