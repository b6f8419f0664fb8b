"""Messages between the two halves of the connector, and the words of `kv_transfer_params`.

| key | who sets it | meaning |
| --- | --- | --- |
| `do_remote_decode` | router, at the prefill server | another server decodes this request |
| `do_remote_prefill` | router or prefill server, at the decode server | another server computes its prompt |
| `transfer_id` | router or prefill server | the request's name on both sides |
| `putget_sources` | prefill server, in its answer | its ranks, for `Decoder.sources`: text in base 64 |
| `putget_describe` | router, at the prefill server | answer with `putget_sources`; nothing is kept for a decoder |
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

Blocks = tuple[list[int], ...]
"""For each of the cache's groups the blocks of a request, from its beginning on."""


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A prefill rank, as `Prefiller.source` describes it."""

    source: bytes


@dataclass
class Work:
    """The part of one request that a forward step computes."""

    name: str
    tokens: int
    """Tokens that are computed when the step is over."""
    blocks: Blocks


@dataclass
class Ask:
    """A request whose prompt another server computes."""

    request_id: str
    name: str
    sources: tuple[str, ...]
    tokens: int
    first_token: int
    blocks: Blocks
    waits: bool = True
    """Whether the request waits for it. If not, the prefill server is only told that its pages are free."""


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """The message of the scheduler's half to the workers' for one step."""

    work: list[Work] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Names of prefills whose blocks are taken away."""
    finished: list[tuple[str, str]] = field(default_factory=list)
    """Ids and names of prefills whose blocks wait for decoders."""
    aborted: list[tuple[str | None, str]] = field(default_factory=list)
    """The same of prefills that have failed. No id: it has no blocks."""
    asks: list[Ask] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    """Ids of requests that are given up while they wait."""
    renewed: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    """Names and sources of requests that are still to ask."""


@dataclass(frozen=True)
class Remote:
    """A request's prefill on another server."""

    name: str
    sources: tuple[str, ...]


def remote_of(params: dict[str, Any] | None) -> Remote | None:
    """Return where a request's prompt is computed, if another server does.

    Raises:
        ValueError: The router left something out.
    """
    if not params or not params.get("do_remote_prefill"):
        return None
    name, sources = params.get("transfer_id"), params.get("putget_sources")
    if not isinstance(name, str) or not name:
        raise ValueError(f"kv_transfer_params: transfer_id {name!r} came; a request's name is needed")
    if not isinstance(sources, (list, tuple)) or not sources or not all(isinstance(one, str) for one in sources):
        raise ValueError(f"kv_transfer_params: putget_sources {sources!r} came; a prefill server's answer has them")
    return Remote(name, tuple(sources))


def text_of(source: bytes) -> str:
    """Return a source as text for `putget_sources`."""
    return base64.b64encode(source).decode()


def source_of(text: str) -> bytes:
    """Return what `text_of` was given.

    Raises:
        ValueError: It is not such text.
    """
    return base64.b64decode(text, validate=True)
