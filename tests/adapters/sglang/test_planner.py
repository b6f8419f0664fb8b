"""SGLang's --enable-eplb on putget's planner: SGLang's own metadata, unmodified, made from putget's plans."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from putget import BackendUnavailable
from putget.adapters import sglang
from putget.adapters.sglang import backend, planner
from putget.balancer import Placement
from tests.adapters.packages import stand_in
from tests.adapters.sglang.engine import VERSIONS, load
from tests.adapters.upstream import require_entry_point, upstream
from tests.harness import Rank, fresh_ranks

LAYERS, EXPERTS, SLOTS, RANKS, NODES, GROUPS = 3, 32, 40, 8, 2, 4
LOCATION = "sglang.srt.eplb.expert_location"


def counts(seed: int) -> torch.Tensor:
    """Tokens [steps, layers, experts] with a few hot experts."""
    generator = torch.Generator().manual_seed(seed)
    hot = 1.0 / torch.arange(1, EXPERTS + 1) ** 0.8
    likely = torch.stack([hot[torch.randperm(EXPERTS, generator=generator)] for _ in range(LAYERS)])
    return torch.poisson(5000 * likely.expand(4, -1, -1), generator=generator).to(torch.int32)


def start(root: Path, version: str) -> Callable[[torch.Tensor, str], Any]:
    """Imports SGLang's files, and gives its init_by_eplb for counts and a choice of --eplb-algorithm."""
    engine = load(root, version)
    srt = "sglang.srt"
    sizes = SimpleNamespace(num_layers=LAYERS, num_logical_experts=EXPERTS, num_groups=GROUPS)
    model = SimpleNamespace(get_model_config_for_expert_location=lambda config: sizes)
    stand_in(f"{srt}.model_loader", get_model_architecture=lambda config: (model, ""))
    stand_in(f"{srt}.elastic_ep")
    manager = SimpleNamespace(instance=lambda: None, healthy_rank_state=lambda: torch.ones(RANKS, dtype=torch.int32))
    stand_in(f"{srt}.elastic_ep.elastic_ep", ElasticEPStateManager=manager)
    args = SimpleNamespace(
        ep_size=RANKS, nnodes=NODES, ep_num_redundant_experts=SLOTS - EXPERTS, device="cpu", ep_dispatch_algorithm=None
    )
    if engine.newer:
        parallel = SimpleNamespace(nnodes=NODES, ep_size=RANKS, elastic_ep_initial_size=None, attn_tp_size=1)
        resources = SimpleNamespace(expert_location_metadata=None)
        context = importlib.import_module(f"{srt}.runtime_context")
        context.get_device = lambda: SimpleNamespace(device="cpu")  # type: ignore[attr-defined]
        context.get_exec = lambda: SimpleNamespace(moe=args)  # type: ignore[attr-defined]
        context.get_parallel = lambda: parallel  # type: ignore[attr-defined]
        context.get_resources = lambda: resources  # type: ignore[attr-defined]

    def init_by_eplb(count: torch.Tensor, algorithm: str) -> Any:
        args.eplb_algorithm = algorithm
        metadata = importlib.import_module(LOCATION).ExpertLocationMetadata
        config = SimpleNamespace(hf_config=None)
        return metadata.init_by_eplb(config, count) if engine.newer else metadata.init_by_eplb(args, config, count)

    return init_by_eplb


def plug_in(version: str) -> None:
    """As a user does, by SGLang's plug-in loader where it has one."""
    os.environ["PUTGET_ENGINES"] = "1"
    if version != VERSIONS[0]:
        importlib.import_module("sglang.srt.plugins").load_plugins()
        return
    sglang.install_planner()


def placement_of(metadata: Any, num_live: int = SLOTS) -> Placement:
    """The metadata's placement, after its tables were held against each other."""
    plan = Placement.of(metadata.physical_to_logical_map_cpu, EXPERTS)
    table = metadata.logical_to_all_physical_map_cpu
    assert table.shape == (LAYERS, EXPERTS, SLOTS)
    for layer in range(LAYERS):
        listed = table[layer][table[layer] >= 0]
        assert len(listed) == num_live == len(set(listed.tolist()))
        for expert in range(EXPERTS):
            slots = [slot for slot in table[layer, expert].tolist() if slot >= 0]
            assert slots
            assert all(plan.physical_to_logical[layer, slot] == expert for slot in slots)
    return plan


def planned(_: Rank, root: Path, version: str) -> None:
    """A body: plans of both, the second on top of the placement in force, and an algorithm that stays SGLang's."""
    init_by_eplb = start(root, version)
    load_of = counts(0).sum(0).numpy()
    names = ("deepseek", "deepseek_hierarchical", "deepseek_vec", "auto")
    theirs = {name: placement_of(init_by_eplb(counts(0), name)) for name in names}
    plug_in(version)
    for name in names:
        metadata = init_by_eplb(counts(0), name)
        plan = placement_of(metadata)
        if name == "deepseek_vec":
            assert plan == theirs[name]
            continue
        assert metadata.logical_to_all_physical_map.dtype == metadata.physical_to_logical_map.dtype == torch.int64
        better = plan.imbalance(load_of, RANKS) - theirs[name].imbalance(load_of, RANKS)
        assert (better <= 1e-9).all(), name
        assert (better < -0.001).any(), name  # it is another planner
        if name != "deepseek":
            nodes = np.arange(SLOTS) // (SLOTS // NODES)
            groups = plan.physical_to_logical // (EXPERTS // GROUPS)
            homes = [{int(node) for node in nodes[groups[layer] == 1]} for layer in range(LAYERS)]
            assert all(len(home) == 1 for home in homes)
    module = importlib.import_module(LOCATION)
    metadata = init_by_eplb(counts(0), "deepseek")
    fresh = placement_of(init_by_eplb(counts(1), "deepseek"))
    module.set_global_expert_location_metadata(metadata)
    kept = placement_of(init_by_eplb(counts(1), "deepseek"))
    before = placement_of(metadata)
    assert kept.moves_from(before, RANKS).sum() < fresh.moves_from(before, RANKS).sum()


@pytest.mark.parametrize("version", VERSIONS)
def test_plans_stand_in_sglangs_metadata(version: str) -> None:
    root = upstream(version)
    if version != VERSIONS[0]:
        require_entry_point("sglang.srt.plugins")
    with fresh_ranks(1) as ranks:
        ranks.call(planned, root, version)


def with_a_dead_rank(_: Rank, root: Path) -> None:
    """A body: elastic expert parallelism has lost a rank; the slots of that rank are in no expert's list."""
    init_by_eplb = start(root, VERSIONS[1])
    plug_in(VERSIONS[1])
    module = importlib.import_module(LOCATION)
    elastic: Any = importlib.import_module("sglang.srt.elastic_ep.elastic_ep")
    module.set_global_expert_location_metadata(init_by_eplb(counts(0), "elasticity_aware"))
    active = torch.ones(RANKS, dtype=torch.int32)
    active[3] = 0
    elastic.ElasticEPStateManager.instance = lambda: SimpleNamespace(active_ranks=active)
    for name in ("elasticity_aware", "elasticity_aware_hierarchical"):
        metadata = init_by_eplb(counts(0), name)
        each = SLOTS // RANKS
        plan = placement_of(metadata, num_live=SLOTS - each)
        assert (plan.physical_to_logical[:, 3 * each : 4 * each] == 0).all()
        table = metadata.logical_to_all_physical_map_cpu
        assert not ((table >= 3 * each) & (table < 4 * each)).any()
    # Other algorithms do not ask who lives, as SGLang's own do not.
    placement_of(init_by_eplb(counts(0), "deepseek"))


def test_slots_of_a_dead_rank_are_in_no_list() -> None:
    root = upstream(VERSIONS[1])
    require_entry_point("sglang.srt.plugins")
    with fresh_ranks(1) as ranks:
        ranks.call(with_a_dead_rank, root)


def unknown_signature(_: Rank, root: Path) -> str:
    """A body: SGLang's rebalance_experts takes one argument more; the plug-in logs it, and carries the rest."""
    start(root, VERSIONS[1])
    own: Any = importlib.import_module(planner.MODULE)

    def rebalance_experts(tokens_per_expert: Any, weights_of_ranks: Any) -> None: ...

    own.rebalance_experts = rebalance_experts
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang.putget").addHandler(handler)
    widened: list[bool] = []
    backend.put_in_place = lambda: widened.append(True)
    plug_in(VERSIONS[1])
    assert own.rebalance_experts is rebalance_experts
    assert widened == [True]
    with pytest.raises(BackendUnavailable, match="takes weights_of_ranks, which putget does not know"):
        sglang.install_planner()
    return "\n".join(said)


def test_a_planner_that_is_not_known_stays_sglangs_own() -> None:
    root = upstream(VERSIONS[1])
    require_entry_point("sglang.srt.plugins")
    with fresh_ranks(1) as ranks:
        said = ranks.call(unknown_signature, root)[0]
    assert "stays SGLang's own: SGLang: rebalance_experts" in said
    assert "takes weights_of_ranks" in said


def test_groups_that_do_not_divide_are_named() -> None:
    replaced = planner.planner(lambda tokens_per_expert: None)
    algorithm = SimpleNamespace(name="deepseek_hierarchical")
    for groups in (None, 3):
        with pytest.raises(ValueError, match=f"deepseek_hierarchical: the model has {groups} groups .* for 2 nodes"):
            replaced(counts(0), SLOTS, SLOTS // RANKS, groups, 2, algorithm)


def test_versions_that_are_not_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    with pytest.raises(BackendUnavailable, match=r"version 1.0; .*knows SGLang from 0.5.9 to before 1"):
        sglang.install_planner()
