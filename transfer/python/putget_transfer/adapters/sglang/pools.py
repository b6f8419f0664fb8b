"""A cache from the buffers that SGLang describes in `KVArgs`.

SGLang counts in pages. Pages of a request are numbered from the first that the decode server does not have, and the
last page counts as full, so both sides come to the same number of tokens without knowing the prompt's length.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sglang
from sglang.srt.disaggregation.base.conn import StateType

import putget_transfer as pt
from putget_transfer import kv


@dataclass(frozen=True)
class Rank:
    """A rank's part of the model.

    Attributes:
        rank: Its number in the tensor-parallel group of attention.
        ranks: How many there are.
        num_kv_heads: Heads of the whole model; 1 for a latent cache (MLA).
        first_layer: The first layer of this stage of the pipeline.
        device: "cpu" or "cuda:N".
        model: What both sides must have in common.
    """

    rank: int
    ranks: int
    num_kv_heads: int
    first_layer: int
    device: str
    model: str

    @property
    def heads(self) -> tuple[int, int]:
        """The rank's first head, and the last one plus 1. With more ranks than heads, several ranks hold a copy."""
        if self.num_kv_heads == 1 or self.ranks >= self.num_kv_heads:
            head = self.rank * self.num_kv_heads // self.ranks
            return head, head + 1
        return self.rank * self.num_kv_heads // self.ranks, (self.rank + 1) * self.num_kv_heads // self.ranks


def model_of(config: Any, args: Any, device: str) -> str:
    """Return what both sides must have in common: the model, the type of its cache, the metadata, SGLang's version."""
    words = config.hf_config.to_dict()
    for name in ("_name_or_path", "name_or_path", "transformers_version"):
        words.pop(name, None)
    digest = hashlib.sha256(json.dumps(words, sort_keys=True, default=str).encode()).hexdigest()[:16]
    kind, aux = device.partition(":")[0], ",".join(map(str, args.aux_item_lens))
    names = "/".join(words.get("architectures") or ["a model"])
    return (
        f"{names} {digest}, {config.dtype}, cache {args.kv_cache_dtype_str}, pages of {args.page_size}, "
        f"metadata {aux}, sglang {sglang.__version__} on {kind}"
    )


def _layers(args: Any, rank: Rank, latent: bool) -> Iterator[tuple[str, int]]:
    """Yield name and layer of each buffer: keys of all layers, then values; draft layers behind them."""
    buffers = len(args.kv_data_ptrs) - args.num_draft_entries
    planes = ("kv",) if latent else ("k", "v")
    layers = buffers // len(planes)
    ids = list(args.kv_layer_ids or ())
    for index in range(buffers):
        layer = ids[index] if ids else rank.first_layer + index % layers
        yield f"{planes[index // layers]}.{layer}", layer
    last = max(ids[:buffers] or [rank.first_layer + layers - 1])
    for index in range(args.num_draft_entries):
        yield f"draft.{index}", last + 1


def last_layer(args: Any, rank: Rank, *, latent: bool) -> int:
    """Return the number of the last layer of this stage, draft layers apart."""
    return max(layer for name, layer in _layers(args, rank, latent) if not name.startswith("draft"))


def regions_of(args: Any, rank: Rank, *, latent: bool) -> list[kv.Region]:
    """Return the regions of a rank's buffers, each in a memory of its own.

    Args:
        args: SGLang's `KVArgs`.
        rank: The rank's part of the model.
        latent: Whether tokens have one latent row (MLA) instead of keys and values of heads.

    Raises:
        ValueError: A buffer does not fit its pages and heads; it is named.
    """
    found: list[kv.Region] = []
    names = list(_layers(args, rank, latent))
    for memory, (name, layer) in enumerate(names):
        length, page = args.kv_data_lens[memory], args.kv_item_lens[memory]
        draft = name.startswith("draft")
        # Draft models have heads of their own, so their pages go from a rank to its like.
        heads, num_heads = (rank.heads, rank.num_kv_heads) if not draft else _of_like(rank, latent)
        parts = args.page_size * (heads[1] - heads[0])
        if page == 0 or page % parts or length < page:
            raise ValueError(
                f"{name}: {length} bytes in pages of {page} came; they have {args.page_size} tokens of heads {heads}"
            )
        found.append(
            kv.Region(
                name=name,
                layer=layer,
                num_pages=length // page,
                page_tokens=args.page_size,
                num_heads=num_heads,
                heads=heads,
                head_bytes=page // parts,
                page_stride=page,
                token_stride=page // args.page_size,
                head_stride=page // parts,
                memory=memory,
                # Rows of a latent cache may be packed by page, and nobody needs less than a row.
                whole=latent or draft,
            )
        )
    last = max((region.layer for region in found), default=0)
    found += _states(args, rank, memory=len(names), layer=last + 1)
    return sorted(found, key=lambda region: region.layer)


def _of_like(rank: Rank, latent: bool) -> tuple[tuple[int, int], int]:
    """Return heads and their number where each rank's bytes are for the rank of the same number."""
    return ((0, 1), 1) if latent else ((rank.rank, rank.rank + 1), rank.ranks)


def _states(args: Any, rank: Rank, memory: int, layer: int) -> Iterator[kv.Region]:
    """Yield the regions of states: one row a request.

    Raises:
        ValueError: States of this kind are not moved.
    """
    for group, kind in enumerate(args.state_types, 1):
        if kind != StateType.MAMBA:
            hint = "; --disable-hybrid-swa-memory keeps windows in the full cache" if kind == StateType.SWA else ""
            raise ValueError(f"state_types: {kind.value!r} came; states of 'mamba' are moved{hint}")
        ids = args.state_layer_ids[group - 1] or range(len(args.state_item_lens[group - 1]))
        seen: dict[int, int] = {}
        for own, length, row in zip(ids, args.state_data_lens[group - 1], args.state_item_lens[group - 1], strict=True):
            seen[own] = seen.get(own, -1) + 1
            yield kv.Region(
                name=f"{kind.value}.{own}.{seen[own]}",
                layer=layer,
                num_pages=length // row,
                page_tokens=1,
                num_heads=rank.ranks,
                heads=(rank.rank, rank.rank + 1),
                head_bytes=row,
                page_stride=row,
                token_stride=0,
                head_stride=0,
                memory=memory,
                group=group,
                state=True,
            )
            memory += 1


def cache_of(engine: pt.Engine, args: Any, rank: Rank, *, latent: bool) -> kv.Cache:
    """Register a rank's buffers and describe them.

    Raises:
        ValueError: A buffer does not fit, or is of a kind that is not moved.
    """
    regions = regions_of(args, rank, latent=latent)
    buffers = list(zip(args.kv_data_ptrs, args.kv_data_lens, strict=True))
    for pointers, lengths in zip(args.state_data_ptrs, args.state_data_lens, strict=True):
        buffers += zip(pointers, lengths, strict=True)
    lengths = [length for _, length in buffers]
    context = sum(args.aux_item_lens)
    geometry = kv.Geometry(rank.model, regions, lengths, rank=rank.rank, context_bytes=context)
    handles = [engine.reg_mr(address, length, rank.device)[0] for address, length in buffers]
    return kv.Cache(engine, geometry, handles)


class Metadata:
    """SGLang's metadata buffers in host memory: what of a request goes beside its pages."""

    def __init__(self, args: Any) -> None:
        self.rows: Sequence[tuple[int, int]] = list(zip(args.aux_data_ptrs, args.aux_item_lens, strict=True))

    def read(self, index: int) -> bytes:
        """Return a request's row of all buffers."""
        return b"".join(ctypes.string_at(address + index * length, length) for address, length in self.rows)

    def write(self, index: int, content: bytes) -> None:
        """Fill a request's row of all buffers."""
        at = 0
        for address, length in self.rows:
            ctypes.memmove(address + index * length, content[at : at + length], length)
            at += length
