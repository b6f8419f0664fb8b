"""SGLang's --enable-eplb through putget's landing areas: SGLang's own updater, unmodified."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from putget import BackendUnavailable
from putget.adapters import sglang
from putget.adapters.sglang import mover
from tests.adapters.packages import stand_in
from tests.adapters.sglang.engine import VERSIONS
from tests.adapters.sglang.test_planner import plug_in, start
from tests.adapters.upstream import require_entry_point, upstream
from tests.harness import Rank, fresh_ranks

LAYERS, EXPERTS, EACH, RANKS = 2, 10, 4, 4
SLOTS = EACH * RANKS


def tables(seed: int) -> torch.Tensor:
    """[layers, slots]: every expert somewhere, some of them twice on a rank."""
    rng = np.random.default_rng(seed)
    one = [
        rng.permutation(np.concatenate([np.arange(EXPERTS), rng.integers(0, EXPERTS, SLOTS - EXPERTS)]))
        for _ in range(LAYERS)
    ]
    return torch.from_numpy(np.stack(one))


def experts_of(table: torch.Tensor, layer: int, rank: int) -> list[torch.Tensor]:
    ids = table[layer, rank * EACH : (rank + 1) * EACH].float()
    weights = (ids[:, None] * 100 + layer + torch.zeros(EACH, 70)).to(torch.bfloat16)
    return [weights, ids[:, None] - 0.5 + torch.zeros(EACH, 1)]


def updater(root: Path) -> Any:
    """SGLang's module, with stand-ins for what it asks for."""
    start(root, VERSIONS[1])
    stand_in("einops")
    utils = importlib.import_module("sglang.srt.utils")
    utils.get_bool_env_var = lambda name, default="false": os.environ.get(name, default) == "true"  # type: ignore[attr-defined]
    plug_in(VERSIONS[1])
    return importlib.import_module(mover.MODULE)


def moved(rank: Rank, root: Path) -> tuple[int, list[bool]]:
    """A body: updates with SGLang's canary on; how many went through putget, and whether SGLang's own agree."""
    module = updater(root)
    os.environ["SGLANG_EXPERT_LOCATION_UPDATER_CANARY"] = "true"
    calls = []
    move = mover.LayerMover.move

    def counted(self: Any, *args: Any) -> None:
        calls.append(1)
        move(self, *args)

    mover.LayerMover.move = counted  # type: ignore[method-assign]
    same = []
    table = tables(0)
    weights = {layer: experts_of(table, layer, rank.rank) for layer in range(LAYERS)}
    for seed in (1, 2, 3):
        new = tables(seed)
        old, wanted = (
            SimpleNamespace(physical_to_logical_map_cpu=one, num_local_physical_experts=EACH) for one in (table, new)
        )
        layers = list(range(LAYERS)) if seed != 3 else [1]
        missing = module._update_expert_weights(
            routed_experts_weights_of_layer=weights,
            old_expert_location_metadata=old,
            new_expert_location_metadata=wanted,
            update_layer_ids=layers,
            nnodes=1,
            rank=rank.rank,
        )
        assert missing == {}
        table = torch.stack([new[layer] if layer in layers else table[layer] for layer in range(LAYERS)])
        for layer in range(LAYERS):
            expected = experts_of(table, layer, rank.rank)
            same.append(all(torch.equal(a, b) for a, b in zip(weights[layer], expected, strict=True)))
    before = len(calls)
    odd = {0: [torch.zeros(EACH, 3, dtype=torch.uint8)]}  # rows that are no whole words: SGLang's own way
    os.environ["SGLANG_EXPERT_LOCATION_UPDATER_CANARY"] = "false"
    identical = SimpleNamespace(physical_to_logical_map_cpu=table, num_local_physical_experts=EACH)
    options: dict[str, Any] = {"update_layer_ids": [0], "nnodes": 1, "rank": rank.rank}
    module._update_expert_weights(
        routed_experts_weights_of_layer=odd,
        old_expert_location_metadata=identical,
        new_expert_location_metadata=identical,
        **options,
    )
    assert len(calls) == before
    return before, same


def test_sglang_moves_experts_through_putget() -> None:
    root = upstream(VERSIONS[1])
    require_entry_point("sglang.srt.plugins")
    with fresh_ranks(RANKS) as ranks:
        for calls, same in ranks.call(moved, root).values():
            assert calls == 5
            assert same == [True] * 6


def test_transfers_are_few_and_spread() -> None:
    old, new = [0, 1, 0, 1, 2, 3], [0, 2, 2, 3, 2, 2]
    found = mover.transfers(old, new, 2)
    assert [(one.expert, one.src_slot, one.dst_slot) for one in found] == [(2, 4, 1), (2, 4, 2), (3, 5, 3)]
    spread = mover.transfers([0, 1, 0, 2, 3, 4, 5, 6], [0, 1, 0, 2, 3, 0, 5, 0], 2)
    assert [one.src_slot for one in spread] == [0, 2]
    with pytest.raises(ValueError, match="no slot has expert 7, which slot 0 shall get"):
        mover.transfers([0, 1], [7, 1], 1)


def test_a_mover_that_is_not_known_stays_sglangs_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def update_expert_weights_single_layer(weights_of_nodes: Any) -> None: ...

    with pytest.raises(BackendUnavailable, match="takes weights_of_nodes"):
        mover.mover(update_expert_weights_single_layer)

    def refuse() -> None:
        raise BackendUnavailable("of another version")

    monkeypatch.setattr(sglang, "install_mover", refuse)
    with caplog.at_level(logging.ERROR, "sglang.putget"):
        module: Any = None
        sglang._mover_or_log(module)
    assert "moved by SGLang itself: of another version" in caplog.text
