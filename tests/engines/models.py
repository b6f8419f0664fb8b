"""The tiny random models of these tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers


def model_config(num_experts: int, head_dim: int = 32) -> Any:
    return transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=head_dim,
        num_experts=num_experts,
        num_experts_per_tok=3,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=None,
    )


def save_model(folder: Path, num_experts: int, head_dim: int = 32) -> None:
    """The same weights for every run, large enough that tokens differ."""
    torch.manual_seed(num_experts)
    model = transformers.Qwen3MoeForCausalLM(model_config(num_experts, head_dim))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder)


def save_models(folder: Path, num_experts: Collection[str], head_dim: int = 32) -> None:
    """FOLDER/N has N experts. A process of its own saves them, because others are forked from this one."""
    saver = multiprocessing.get_context("fork").Process(
        target=lambda: [save_model(folder / count, int(count), head_dim) for count in num_experts]
    )
    saver.start()
    saver.join()
    if saver.exitcode:
        raise SystemExit(f"the models of {num_experts} experts were not saved: {saver.exitcode}")


def other_configs() -> dict[str, Any]:
    """Two more architectures, by name: experts with biases and transposed weights, and shared ones behind groups."""
    common: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return {
        "GptOss": transformers.GptOssConfig(
            **common, intermediate_size=32, num_key_value_heads=2, head_dim=32, num_local_experts=8, sliding_window=16
        ),
        "DeepseekV3": transformers.DeepseekV3Config(
            **common,
            intermediate_size=128,
            moe_intermediate_size=32,
            num_key_value_heads=4,
            n_shared_experts=1,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
        ),
    }


def save_architecture(folder: Path, name: str, config: Any) -> None:
    """FOLDER/NAME is a model of that configuration, with seeded weights."""
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder / name)


def save_tokenizer(folder: Path) -> None:
    """A token for each printable character, which fit in the models' vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel

    characters = ["<unk>", *map(chr, range(32, 127)), "\n"]
    tokenizer = Tokenizer(WordLevel({text: token for token, text in enumerate(characters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
