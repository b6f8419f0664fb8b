"""vLLM's --enable-eplb through putget's landing areas: vLLM's own code of moving, unmodified."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from putget import BackendUnavailable
from putget.adapters.vllm import mover
from tests.adapters.upstream import require_entry_point, upstream
from tests.adapters.vllm.test_planner import EPLB, EXPERTS, LAYERS, RANKS, SLOTS, load, loads, plug_in
from tests.harness import Rank, fresh_ranks

EACH = SLOTS // RANKS


def experts_of(table: torch.Tensor, layer: int, rank: int) -> list[torch.Tensor]:
    """The tensors of a rank's slots: weights, and scales whose rows are no multiple of 16 bytes."""
    ids = table[layer, rank * EACH : (rank + 1) * EACH].float()
    weights = (ids[:, None] * 100 + layer + torch.zeros(EACH, 70)).to(torch.bfloat16)
    return [weights, ids[:, None] - 0.5 + torch.zeros(EACH, 1)]


def moved(rank: Rank, root: Path) -> list[str]:
    """A body: vLLM moves the weights as the plan says, in one go, and a layer at a time in batches of its own."""
    load(root)
    plug_in()
    state_imports = importlib.import_module(f"{EPLB}.eplb_communicator")
    policy = importlib.import_module(f"{EPLB}.policy").EPLB_POLICIES["default"]
    execute = importlib.import_module(f"{EPLB}.rebalance_execute")
    group = torch.distributed.group.WORLD
    coordinator = SimpleNamespace(cpu_group=group, device_group=group)
    table = (torch.arange(SLOTS) % EXPERTS).repeat(LAYERS, 1)
    weights = [experts_of(table, layer, rank.rank) for layer in range(LAYERS)]
    buffers = [torch.empty_like(tensor) for tensor in weights[0]]
    communicator = state_imports.create_eplb_communicator(coordinator, "torch_nccl", weights, buffers)
    assert isinstance(communicator, state_imports.EplbCommunicator)
    communicator.set_stream(None)
    for seed in range(4):
        new = policy.rebalance_experts(loads(seed), SLOTS, 1, 1, RANKS, table)
        if seed < 2:
            execute.rearrange_expert_weights_inplace(table, new, weights, buffers, group, communicator)
        else:  # as the asynchronous worker does
            for layer in range(LAYERS):
                old_indices, new_indices = table[layer].numpy(), new[layer].numpy()
                metadata = execute.move_to_buffer(
                    EACH,
                    old_indices,
                    new_indices,
                    weights[layer],
                    buffers,
                    None,
                    rank.rank,
                    communicator,
                    layer,
                    enable_migration_batching=seed == 3,
                )
                execute.move_from_buffer(weights[layer], buffers, metadata, new_indices, rank.rank)
        assert not np.array_equal(table, new)
        table = new
        for layer in range(LAYERS):
            for tensor, expected in zip(weights[layer], experts_of(table, layer, rank.rank), strict=True):
                assert torch.equal(tensor, expected), (rank.rank, seed, layer)
    kind = type(communicator).__name__
    odd = [[torch.zeros(EACH, 3, dtype=torch.uint8)]]  # rows that are no whole words
    theirs = state_imports.create_eplb_communicator(coordinator, "torch_nccl", odd, odd[0])
    return [kind, type(theirs).__name__]


def test_vllm_moves_experts_through_putget() -> None:
    root = upstream("vllm")
    require_entry_point("vllm.general_plugins")
    with fresh_ranks(RANKS) as ranks:
        for names in ranks.call(moved, root).values():
            assert names == ["PutgetEplbCommunicator", "TorchDistNcclEplbCommunicator"]


class Base:
    """Stands for vLLM's EplbCommunicator."""

    __abstractmethods__ = frozenset({"add_send", "add_recv", "execute", "add_reduce"})


def test_a_communicator_that_is_not_known_stays_vllms_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BackendUnavailable, match="has add_reduce, which putget does not know"):
        mover.communicator_class(SimpleNamespace(EplbCommunicator=Base))
    from putget.adapters import vllm

    def refuse() -> None:
        raise BackendUnavailable("of another version")

    monkeypatch.setattr(vllm, "install_mover", refuse)
    with caplog.at_level(logging.ERROR, "vllm.putget"):
        module: Any = None
        vllm._mover_or_log(module)
    assert "moved by vLLM's own communicator: of another version" in caplog.text
