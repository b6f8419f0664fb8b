"""A cache from the tensors that vLLM registers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import vllm
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

import putget_transfer as pt
from putget_transfer import kv


def heads_of(rank: int, ranks: int, heads: int) -> tuple[int, int]:
    """Return the heads of a tensor-parallel rank: some each, or one of which several ranks have a copy."""
    if ranks >= heads:
        head = rank * heads // ranks
        return head, head + 1
    return rank * heads // ranks, (rank + 1) * heads // ranks


def model_of(config: Any, device: str) -> str:
    """Return what both sides must have in common: the model, the type of its cache, vLLM's version."""
    model = config.model_config
    words = model.hf_config.to_dict()
    for name in ("_name_or_path", "name_or_path", "transformers_version"):
        words.pop(name, None)
    digest = hashlib.sha256(json.dumps(words, sort_keys=True, default=str).encode()).hexdigest()[:16]
    kind = device.partition(":")[0]
    cache = config.cache_config.cache_dtype
    return f"{model.architecture} {digest}, {model.dtype}, cache {cache}, vllm {vllm.__version__} on {kind}"


def layer_of(name: str, tensor: Any, spec: Any, place: tuple[int, int], heads: tuple[int, int]) -> tuple[kv.Layer, int]:
    """Return one layer's description and the pages that one of vLLM's blocks has.

    Args:
        name: The layer's name, for errors.
        tensor: The layer's cache: blocks, heads, tokens and content, in any order of strides.
        spec: What vLLM says of it.
        place: Its group, and the heads of the whole model.
        heads: The rank's first head, and the last one plus 1.

    Raises:
        ValueError: Caches of this kind are not moved.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.kv_cache_specs[name]
    if type(spec).__name__ not in ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"):
        known = "FullAttentionSpec, MLAAttentionSpec and SlidingWindowSpec"
        raise ValueError(f"{name}: {type(spec).__name__} came; caches of {known} are moved")
    if isinstance(spec, MLAAttentionSpec):
        place, heads = (place[0], 1), (0, 1)
    letters = "BNC" if tensor.dim() == 3 else "BHNC"
    tokens = tensor.shape[letters.index("N")]
    if tokens == 0 or spec.block_size % tokens:
        raise ValueError(f"{name}: blocks of {spec.block_size} tokens came in pages of {tokens}; they must divide")
    window = None
    if isinstance(spec, SlidingWindowSpec):
        # The last token is computed by the decode server: it needs so many before it.
        window = spec.num_retained_tokens
    layer = kv.Layer(
        tensor,
        layout=letters,
        window=window,
        group=place[0],
        num_heads=place[1],
        heads=heads,
        # Kernels on CPUs have orders of their own inside of a page.
        whole=tensor.device.type == "cpu",
        page_tokens=tokens,
    )
    return layer, spec.block_size // tokens


class Layers:
    """The cache of a rank, as vLLM and as `putget_transfer.kv` have it."""

    def __init__(self, engine: pt.Engine, config: Any, kv_cache_config: Any, tensors: Mapping[str, Any], rank: int):
        """Register tensors and describe them.

        Raises:
            ValueError: A layer's cache is of a kind that is not moved.
        """
        groups = kv_cache_config.transfer_group_index_by_layer
        names = sorted((name for name in tensors if name in groups), key=lambda name: (extract_layer_index(name), name))
        if not names:
            raise ValueError(f"kv_caches: {list(tensors)} came; none of them is to be moved")
        ranks = config.parallel_config.tensor_parallel_size
        total = config.model_config.get_total_num_kv_heads()
        layers: dict[str, kv.Layer] = {}
        self.split: dict[int, int] = {}
        self.page_tokens: dict[int, int] = {}
        for name in names:
            group = groups[name]
            spec = kv_cache_config.transfer_groups[group].kv_cache_spec
            heads = heads_of(rank, ranks, total)
            layers[name], self.split[group] = layer_of(name, tensors[name], spec, (group, total), heads)
            self.page_tokens[group] = spec.block_size // self.split[group]
        self.index = {name: index for index, name in enumerate(names)}
        device = str(next(iter(tensors.values())).device)
        self.cache = kv.KvCache(
            engine,
            layers,
            layout="BHNC",
            page_tokens=1,
            num_kv_heads=total,
            packed=False,
            model=model_of(config, device),
            rank=rank,
        )

    def pages(self, blocks: tuple[list[int], ...]) -> list[list[int]]:
        """Return the pages of vLLM's blocks, for each group."""
        found = []
        for group, own in enumerate(blocks):
            split = self.split.get(group, 1)
            found.append(own if split == 1 else [block * split + part for block in own for part in range(split)])
        return found

    def wanted(self, blocks: tuple[list[int], ...], first_token: int, tokens: int) -> list[list[int]]:
        """Return those of a request's pages that tokens from `first_token` to `tokens` need."""
        counts = self.cache.geometry.num_pages(first_token, tokens)
        if not any(counts):
            return [[] for _ in counts]
        found = []
        for group, own in enumerate(self.pages(blocks)):
            end = -(-tokens // self.page_tokens[group])
            found.append(own[max(end - counts[group], 0) : end])
        return found
