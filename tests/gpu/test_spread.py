"""A spread model of transformers on a GPU: one rank, with continuous batching in transformers' own CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import putget
from putget.adapters import transformers as putget_transformers

PROMPTS = [[3, 17, 41, 5, 96, 2], [77], [9, 8, 7, 6, 5, 4, 3, 2, 1], [5, 5, 5, 2]]
NEW_TOKENS = 12


def model_on_gpu(dtype: torch.dtype) -> Any:
    """A seeded model; the test skips where transformers is not installed, or not one that putget knows."""
    transformers = pytest.importorskip("transformers")
    try:
        putget_transformers.require_transformers()
    except putget.BackendUnavailable as error:
        pytest.skip(str(error))
    config = transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=10,
        num_experts_per_tok=3,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(10)
    model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    return model.to("cuda", dtype).eval()


def generated(model: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        with torch.no_grad():
            output = model.generate(torch.tensor([prompt], device="cuda"), max_new_tokens=NEW_TOKENS, do_sample=False)
        found.append(output[0].tolist()[len(prompt) :])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_spread_model_says_what_it_says_alone(graphs: bool) -> None:
    transformers = pytest.importorskip("transformers")
    # torch's grouped products of float32 are read by the host: transformers cannot capture them.
    model = model_on_gpu(torch.bfloat16 if graphs else torch.float32)
    expected = generated(model)
    (comm,) = putget.Communicator.local(1)
    with comm:
        spread = putget_transformers.spread(model, comm, max_tokens_per_rank=64)
        with spread.together():
            assert generated(model) == expected
        config = transformers.ContinuousBatchingConfig(num_blocks=16, page_size=32, use_cuda_graph=graphs)
        manager = putget_transformers.batching_manager(model, spread, continuous_batching_config=config)
        if graphs:
            manager.warmup()
        manager.start()
        requests = [manager.add_request(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
        found: dict[str, list[int]] = {}
        while len(found) < len(requests) and manager.is_running():
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                assert result.error is None
                found[result.request_id] = result.generated_tokens
        manager.stop()
        assert [found[number] for number in requests] == expected
        spread.end()
