"""vLLM's --enable-eplb on putget's planner: vLLM's own policies' table, and its own moves of weights, unmodified."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from putget import BackendUnavailable
from putget.adapters import vllm
from putget.adapters.vllm import planner
from putget.balancer import Placement
from tests.adapters.packages import shell, stand_in
from tests.adapters.upstream import require_entry_point, upstream
from tests.harness import Rank, fresh_ranks

LAYERS, EXPERTS, SLOTS, RANKS = 2, 16, 24, 4
EPLB = "vllm.distributed.eplb"


def load(root: Path) -> None:
    """Makes vLLM's files of expert load balancing importable; whatever else they import is not asked for anything."""
    sys.path.insert(0, str(root))  # the METADATA, for the version
    shell(root, "vllm", "vllm.distributed")
    stand_in("vllm.config", ParallelConfig=object)
    stand_in("vllm.config.parallel", EPLBPolicyOption=Literal["default"])
    stand_in("vllm.logger", init_logger=logging.getLogger)
    stand_in("vllm.distributed.nixl_utils", NixlWrapper=None)
    stand_in("vllm.distributed.device_communicators")
    stand_in("vllm.distributed.device_communicators.pynccl", PyNcclCommunicator=object)
    stand_in("vllm.distributed.device_communicators.pynccl_wrapper", ncclDataTypeEnum=object)
    groups = {"GroupCoordinator": object, "get_pp_group": None, "is_local_first_rank": lambda: False}
    stand_in("vllm.distributed.parallel_state", **groups)
    stand_in("vllm.distributed.stateless_coordinator", StatelessGroupCoordinator=type("Stateless", (), {}))
    stand_in("vllm.distributed.utils", is_weak_contiguous=None)
    stand_in("vllm.platforms", current_platform=None)
    stand_in("vllm.utils")
    stand_in("vllm.utils.gpu_sync_debug", gpu_sync_allowed=contextlib.nullcontext)
    stand_in("vllm.utils.torch_utils", PIN_MEMORY=False)


def plug_in() -> None:
    os.environ["PUTGET_ENGINES"] = "1"
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="putget")
    for _ in range(2):  # vLLM may call it several times
        entry.load()()


def loads(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    hot = 1.0 / torch.arange(1, EXPERTS + 1) ** 0.8
    likely = torch.stack([hot[torch.randperm(EXPERTS, generator=generator)] for _ in range(LAYERS)])
    return torch.poisson(5000 * likely, generator=generator).to(torch.int32)


def placement_of(table: torch.Tensor) -> Placement:
    assert table.shape == (LAYERS, SLOTS)
    assert table.dtype == torch.int64
    assert table.device.type == "cpu"
    return Placement.of(table, EXPERTS)


def planned(_: Rank, root: Path) -> None:
    """A body: by the entry point, before vLLM's modules are imported."""
    load(root)
    plug_in()
    policies = importlib.import_module(f"{EPLB}.policy")
    kind, theirs = policies.EPLB_POLICIES["default"], policies.DefaultEplbPolicy
    assert kind.__name__ == "PutgetEplbPolicy"
    assert issubclass(kind, policies.AbstractEplbPolicy)
    assert kind() is not None  # nothing abstract is left
    assert theirs.__module__.startswith("vllm.")
    for groups, nodes in ((1, 1), (4, 2), (3, 2)):
        sizes = (SLOTS, groups, nodes, RANKS)
        ours = placement_of(kind.rebalance_experts(loads(0), *sizes))
        gain = ours.imbalance(loads(0), RANKS) - placement_of(theirs.rebalance_experts(loads(0), *sizes)).imbalance(
            loads(0), RANKS
        )
        assert (gain <= 1e-9).all()
    assert (ours.imbalance(loads(0), RANKS) < 1.05).all()
    before = torch.from_numpy(ours.physical_to_logical).long()
    fresh = placement_of(kind.rebalance_experts(loads(1), SLOTS, 1, 1, RANKS))
    kept = placement_of(kind.rebalance_experts(loads(1), SLOTS, 1, 1, RANKS, before))
    assert kept.moves_from(ours, RANKS).sum() < fresh.moves_from(ours, RANKS).sum()
    # Elastic expert parallelism: fewer ranks than before, so there is nothing to keep.
    fewer = kind.rebalance_experts(loads(1), SLOTS * 3 // 4, 1, 1, RANKS - 1, before)
    assert fewer.shape == (LAYERS, SLOTS * 3 // 4)
    with pytest.raises(ValueError, match="num_replicas 12 is less than num_experts 16"):
        kind.rebalance_experts(loads(1), 12, 1, 1, RANKS, before)


def test_the_default_policy_is_putgets() -> None:
    root = upstream("vllm")
    require_entry_point("vllm.general_plugins")
    with fresh_ranks(1) as ranks:
        ranks.call(planned, root)


def moved(rank: Rank, root: Path) -> None:
    """A body: vLLM moves the weights as the plan says, twice; then each slot has the expert that the plan names."""
    load(root)
    plug_in()
    policy = importlib.import_module(f"{EPLB}.policy").EPLB_POLICIES["default"]
    execute = importlib.import_module(f"{EPLB}.rebalance_execute")
    group = torch.distributed.group.WORLD
    communicator = importlib.import_module(f"{EPLB}.eplb_communicator").TorchDistNcclEplbCommunicator(group)
    each = SLOTS // RANKS
    mine = slice(rank.rank * each, (rank.rank + 1) * each)
    table = (torch.arange(SLOTS) % EXPERTS).repeat(LAYERS, 1)

    def experts_of(table: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = table[layer, mine].float()
        return ids[:, None] * 100 + layer + torch.zeros(each, 5), ids[:, None] - 0.5 + torch.zeros(each, 1)

    weights = [[tensor.clone() for tensor in experts_of(table, layer)] for layer in range(LAYERS)]
    buffers = [torch.empty_like(tensor) for tensor in weights[0]]
    for seed in (0, 1):
        new = policy.rebalance_experts(loads(seed), SLOTS, 1, 1, RANKS, table)
        execute.rearrange_expert_weights_inplace(table, new, weights, buffers, group, communicator)
        table = new
        for layer in range(LAYERS):
            for tensor, expected in zip(weights[layer], experts_of(table, layer), strict=True):
                assert torch.equal(tensor, expected), (rank.rank, layer)


def test_vllm_moves_what_the_plan_says() -> None:
    root = upstream("vllm")
    require_entry_point("vllm.general_plugins")
    with fresh_ranks(RANKS) as ranks:
        ranks.call(moved, root)


class Abstract:
    """Stands for vLLM's AbstractEplbPolicy."""


class Known(Abstract):
    @classmethod
    def rebalance_experts(cls, weight: Any, num_replicas: Any) -> None: ...


class Unknown(Abstract):
    @classmethod
    def rebalance_experts(cls, weight: Any, weight_of_ranks: Any) -> None: ...


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"EPLB_POLICIES": {"default": Known}}, "has no AbstractEplbPolicy"),
    ({"EPLB_POLICIES": {"other": Known}, "AbstractEplbPolicy": Abstract}, "has no 'default', but other"),
    ({"EPLB_POLICIES": {"default": Unknown}, "AbstractEplbPolicy": Abstract}, "takes weight_of_ranks"),
]


@pytest.mark.parametrize(("names", "message"), UNKNOWN)
def test_a_policy_that_is_not_known_stays_vllms_own(
    names: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = ModuleType(planner.MODULE)
    vars(module).update(names)
    before = dict(names["EPLB_POLICIES"])
    monkeypatch.setitem(sys.modules, planner.MODULE, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.0")
    with pytest.raises(BackendUnavailable, match=message):
        vllm.install_planner()
    monkeypatch.setenv("PUTGET_ENGINES", "1")
    monkeypatch.setattr(vllm, "use", lambda: None)
    with caplog.at_level(logging.ERROR, "vllm.putget"):
        vllm.plugin()
    assert "stays vLLM's own: vLLM: " in caplog.text
    assert message in caplog.text
    assert names["EPLB_POLICIES"] == before


def test_an_abstract_method_that_is_not_known_is_named() -> None:
    import abc

    class Wider(abc.ABC):
        @classmethod
        @abc.abstractmethod
        def rebalance_experts(cls, weight: Any) -> None: ...

        @classmethod
        @abc.abstractmethod
        def rebalance_nodes(cls) -> None: ...

    module: Any = SimpleNamespace(__name__="policy", AbstractEplbPolicy=Wider, EPLB_POLICIES={"default": Known})
    with pytest.raises(BackendUnavailable, match="has rebalance_nodes, which putget does not know"):
        planner.policy_class(module)


def test_nothing_changes_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(planner.MODULE)
    vars(module).update(EPLB_POLICIES={"default": Known}, AbstractEplbPolicy=Abstract)
    monkeypatch.setitem(sys.modules, planner.MODULE, module)
    monkeypatch.delenv("PUTGET_ENGINES", raising=False)
    vllm.plugin()
    assert vars(module)["EPLB_POLICIES"] == {"default": Known}


def test_versions_that_are_not_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    with pytest.raises(BackendUnavailable, match=r"version 1.0; .*knows vLLM from 0.33 to before 1"):
        vllm.install_planner()
