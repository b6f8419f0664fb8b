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


def save_architecture(folder: Path, name: str, config: Any, kind: str | None = None) -> None:
    """FOLDER/NAME is a model of that configuration, with seeded weights. Its architecture is KIND, or NAME."""
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind or name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder / name)


def save_drafts(folder: Path) -> None:
    """A DeepSeek-V3 model with a draft layer: the checkpoint of a model with one more layer, and the drafts' own parts.

    Layers add little to a token's embedding, so that the draft layer, which sees it too, guesses some tokens right.
    """
    from safetensors.torch import load_file, save_file

    config = other_configs()["DeepseekV3"]
    layer, size = config.num_hidden_layers, config.hidden_size
    config.num_hidden_layers += 1
    save_architecture(folder.parent, folder.name, config, "DeepseekV3")
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            weight.mul_(0.1)
    own = {name: torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj"] = torch.cat([torch.eye(size), 0.05 * torch.randn(size, size)], dim=1)
    weights |= {f"model.layers.{layer}.{name}.weight": weight for name, weight in own.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.num_hidden_layers = layer
    config.save_pretrained(folder)


def save_tokenizer(folder: Path) -> None:
    """A token for each printable character, which fit in the models' vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel

    characters = ["<unk>", *map(chr, range(32, 127)), "\n"]
    tokenizer = Tokenizer(WordLevel({text: token for token, text in enumerate(characters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


def save_glm4(folder: Path) -> None:
    """FOLDER becomes a GLM4-MoE model of two layers with a draft layer (multi-token prediction) behind them."""
    import json

    from safetensors.torch import load_file, save_file

    torch.manual_seed(7)
    config = transformers.Glm4MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=3,  # the last becomes the draft layer
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        n_shared_experts=1,
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=3,
        first_k_dense_replace=1,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        use_qk_norm=True,
    )
    model = transformers.Glm4MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # A token says much of the next one: the draft layer, which sees it too, is right at times.
                parameter.normal_(0.0, 0.25 if "embed" in name or "lm_head" in name else 0.1)
    model.save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}))
    weights, size = load_file(folder / "model.safetensors"), config.hidden_size
    draft = {
        "enorm.weight": torch.ones(size),
        "hnorm.weight": torch.ones(size),
        "eh_proj.weight": torch.cat([torch.eye(size), torch.randn(size, size) * 0.02], 1),
        "shared_head.norm.weight": torch.ones(size),
        "shared_head.head.weight": weights["lm_head.weight"].clone(),
        "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
    }
    weights.update({f"model.layers.2.{name}": weight for name, weight in draft.items()})
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
