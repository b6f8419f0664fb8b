"""putget as a communication of flashinfer.moe_ep, created through FlashInfer's own registry."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from putget.adapters.flashinfer import moe_ep
from tests.adapters.layer import Layer, same_bits
from tests.adapters.packages import lend, shell, stand_in
from tests.adapters.upstream import upstream
from tests.harness import Rank, fresh_ranks

RAGGED = Layer(num_tokens=(3, 0, 8, 1))

LOW_PRECISION = 3  # the layer whose rows come back quantised


def load(root: Path) -> Any:
    """flashinfer.moe_ep with the registry and the configurations, without the kernels."""
    shell(root, "flashinfer", "flashinfer.moe_ep", "flashinfer.moe_ep.core", "flashinfer.moe_ep.core.comm")
    registry = importlib.import_module("flashinfer.moe_ep.core.comm.communication")
    config = importlib.import_module("flashinfer.moe_ep.config")
    names = ["MoEEpCommParams", "MoEEpCommunication", "MoEEpDispatchResult", "register_communication"]
    lend("flashinfer.moe_ep", registry, *names, "create_communication", "available_communication_backends")
    lend("flashinfer.moe_ep", config, "BootstrapConfig")
    return importlib.import_module("flashinfer.moe_ep")


def play(rank: Rank, root: Path, layers: list[Layer]) -> list[torch.Tensor]:
    """A body: layers through the registry; the runtime maximum of this rank differs from the others'."""
    flashinfer = load(root)
    kind = moe_ep.register()
    assert issubclass(kind, flashinfer.MoEEpCommunication)
    assert "putget" in flashinfer.available_communication_backends()
    bootstrap = flashinfer.BootstrapConfig(world_size=rank.size, rank=rank.rank)
    results = []
    for index, layer in enumerate(layers):
        invalid = (-1, layer.num_experts)[index % 2]
        params = flashinfer.MoEEpCommParams(
            num_experts=layer.num_experts,
            top_k=layer.top_k,
            max_tokens_per_rank=layer.max_tokens_per_rank,
            hidden_size=layer.hidden_size,
            invalid_expert_id=invalid,
        )
        low = index == LOW_PRECISION
        config = moe_ep.PutgetConfig(timeout_s=20, device="cpu", use_low_precision_combine=low)
        backend = ("putget", config)[index % 2]
        communication = flashinfer.create_communication(bootstrap, params, backend)
        ids, weights = layer.routes(rank.rank)
        x, x_sf = (*layer.rows(rank.rank), None)[:2]
        most = None if index == 0 else min(max(layer.num_tokens) + rank.rank, 8)
        received = communication.dispatch(x, ids, weights, hidden_states_scale=x_sf, max_tokens_per_rank=most)
        rows = [tensor for tensor in (received.hidden_states, received.hidden_states_scale) if tensor is not None]
        assert {len(tensor) for tensor in rows} == {rank.size * received.tokens_per_rank}
        seen = torch.where(received.topk_ids == invalid, -1, received.topk_ids)
        output = layer.experts(tuple(rows), seen, received.topk_weights, rank.rank)
        if index % 2:
            buffer = communication.get_combine_input_buffer(torch.bfloat16)
            assert communication.get_combine_input_buffer(torch.float32) is None
            output = buffer.copy_(output)
        out = torch.empty(layer.num_tokens[rank.rank], layer.hidden_size, dtype=torch.bfloat16)
        assert communication.combine(output, output=out).data_ptr() == out.data_ptr()
        results.append(out)
        communication.destroy()
    return results


def test_created_through_the_registry() -> None:
    root = upstream("flashinfer")
    recipes = ("bf16", "fp8", "nvfp4", "fp8")
    layers = [replace(RAGGED, recipe=recipe, seed=seed) for seed, recipe in enumerate(recipes)]
    with fresh_ranks(4) as ranks:
        for rank, combined in ranks.call(play, root, layers).items():
            for index, (layer, rows) in enumerate(zip(layers, combined, strict=True)):
                combine_dtype = torch.float8_e4m3fn if index == LOW_PRECISION else None
                assert same_bits(rows, layer.expected(rank, combine_dtype))


def register_with(names: dict[str, Any]) -> None:
    stand_in("flashinfer")
    stand_in("flashinfer.moe_ep", **names)
    moe_ep.register()


def refuse_old_version(rank: Rank) -> str:
    """A body: a FlashInfer without the registry."""
    with pytest.raises(RuntimeError) as caught:
        register_with({"MoEEpCommunication": object})
    return str(caught.value)


def test_an_older_version_is_named() -> None:
    with fresh_ranks(1) as ranks:
        message = ranks.call(refuse_old_version)[0]
    assert "before 0.7.2: flashinfer.moe_ep has no MoEEpDispatchResult, register_communication" in message
