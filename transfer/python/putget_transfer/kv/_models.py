"""Geometries of models, for the command line: what a rank holds follows from a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

from putget_transfer.kv._native import Geometry, strides
from putget_transfer.kv._regions import Region


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model's cache.

    Attributes:
        layers: Layers that have keys and values.
        kv_heads: Heads of keys and values; 1 is a latent cache (MLA).
        head_bytes: Bytes of one head's token, for keys or values.
        context_bytes: Bytes that travel beside the pages.
    """

    layers: int
    kv_heads: int
    head_bytes: int
    context_bytes: int = 0


def heads_of(rank: int, tp: int, heads: int) -> tuple[int, int]:
    """Return the heads of a rank: some each, or one of which several ranks have a copy."""
    if tp >= heads:
        head = rank * heads // tp
        return head, head + 1
    return rank * heads // tp, (rank + 1) * heads // tp


def geometry(model: Model, tokens: int, rank: int, tp: int, layout: str, page_tokens: int) -> Geometry:
    """Return the geometry of one of `tp` ranks that has room for so many tokens."""
    heads = heads_of(rank, tp, model.kv_heads)
    held, planes = heads[1] - heads[0], 1 if model.kv_heads == 1 else 2
    pages = -(-tokens // page_tokens)
    content = planes * model.head_bytes
    layers, page, head, token = strides(layout, (model.layers, pages, held, page_tokens, content))
    regions = [
        Region(
            name=f"layer{layer}",
            layer=layer,
            num_pages=pages,
            page_tokens=page_tokens,
            num_heads=model.kv_heads,
            heads=heads,
            head_bytes=model.head_bytes,
            page_stride=page,
            token_stride=token,
            head_stride=head,
            planes=planes,
            plane_stride=model.head_bytes if planes == 2 else 0,
            offset=layer * layers,
        )
        for layer in range(model.layers)
    ]
    memory = [model.layers * pages * held * page_tokens * content]
    return Geometry("plan", regions, memory, rank=rank, context_bytes=model.context_bytes)
