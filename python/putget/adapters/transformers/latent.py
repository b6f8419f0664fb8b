"""A paged cache for multi-head latent attention (DeepSeek-V3), which transformers' continuous batching does not have.

A token's entry is its compressed latents: ``kv_lora_rank`` elements, and ``qk_rope_head_dim`` behind them. The cache of
transformers keeps two rows of equal size for each token, its key and its value. Here the first row has the first half
of the entry, and the second row the other half, so pages, blocks and shared prefixes stay as they are.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn import functional


def has_latents(config: Any) -> bool:
    """Whether a model's attention caches latents."""
    return isinstance(getattr(config, "kv_lora_rank", None), int)


def latent_cache(base: Any) -> Any:
    """A subclass of transformers' ``PagedAttentionCache`` for models with latents; others get ``base`` itself."""

    class LatentCache(base):  # type: ignore[misc]
        """Pages of latents."""

        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(_sizes_of(config), *args, **options)

        def update(
            self, latents: torch.Tensor, rotated: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Writes a pass's entries, and returns those of all tokens that its requests have.

            Args:
                latents: [1, 1, num_tokens, kv_lora_rank].
                rotated: [1, 1, num_tokens, qk_rope_head_dim].
                layer_idx: The layer.
                kwargs: As transformers has them.

            Returns:
                The same for ``num_tokens`` and those before.
            """
            sizes = (latents.shape[-1], rotated.shape[-1])
            entries = torch.cat((latents, rotated), dim=-1)
            halves = functional.pad(entries, (0, sum(sizes) % 2)).chunk(2, dim=-1)
            entries = torch.cat(super().update(*halves, layer_idx, kwargs), dim=-1)
            return entries[..., : sizes[0]], entries[..., sizes[0] : sum(sizes)]

    def make(config: Any, *args: Any, **options: Any) -> Any:
        return (LatentCache if has_latents(config) else base)(config, *args, **options)

    return make


def _sizes_of(config: Any) -> Any:
    """A configuration whose one head of a key is half an entry; transformers' estimate of memory stays the same."""
    sizes = copy.copy(config)
    query = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    sizes.num_key_value_heads = 1
    sizes.head_dim = -(-(config.kv_lora_rank + config.qk_rope_head_dim) // 2)
    sizes.num_attention_heads = -(-query // sizes.head_dim)
    return sizes
