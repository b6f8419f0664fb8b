"""The tiny random models of these tests: python -m tests.engines.models FOLDER NUM_EXPERTS."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def model_config(num_experts: int) -> Any:
    return transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=num_experts,
        num_experts_per_tok=3,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=None,
    )


def save_model(folder: Path, num_experts: int) -> None:
    """The same weights for every run, large enough that tokens differ."""
    torch.manual_seed(num_experts)
    model = transformers.Qwen3MoeForCausalLM(model_config(num_experts))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder)


if __name__ == "__main__":
    save_model(Path(sys.argv[1]), int(sys.argv[2]))
