"""Functions that vLLM lacks for expert parallelism on the CPUs of one memory node.

Its CPU experts take the ids of this rank's experts and know no expert map. Its server gives each rank of data
parallelism a memory node of its own, and ends where there are fewer. It balances experts on GPUs alone: its
configuration refuses others, its CPU model runner does not tell the balancer of its models, and events have no times.

vLLM calls ``patch`` in each of its processes (stubs/putget_tests.dist-info names it as a plug-in).
"""

from __future__ import annotations

from typing import Any


def patch() -> None:
    _patch_experts()
    _patch_memory_nodes()
    _patch_balancer()


def _patch_memory_nodes() -> None:
    from vllm.utils import cpu_resource_utils

    own = cpu_resource_utils.get_visible_memory_node
    if own.__module__ != __name__:
        cpu_resource_utils.get_visible_memory_node = lambda assigned_node_ids=None: own()


def _patch_experts() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    own = CPUUnquantizedExperts.apply

    def apply(self: Any, *args: Any, **options: Any) -> Any:
        import inspect

        call = inspect.signature(own).bind(self, *args, **options)
        given = call.arguments
        if given["expert_map"] is not None:
            ids = given["topk_ids"]
            local = given["expert_map"][ids.clamp(min=0).long()].to(ids.dtype)
            nobody = (ids < 0) | (local < 0)
            given["topk_ids"] = local.masked_fill(nobody, 0)
            given["topk_weights"] = given["topk_weights"].masked_fill(nobody, 0.0)
        return own(*call.args, **call.kwargs)

    if own.__module__ != __name__:
        CPUUnquantizedExperts.apply = apply


def _patch_balancer() -> None:
    import torch
    from vllm.config import parallel
    from vllm.distributed.eplb import eplb_state
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    own = CPUModelRunner.load_model
    if own.__module__ == __name__:
        return

    def load_model(self: Any, *args: Any, **options: Any) -> None:
        own(self, *args, **options)
        if self.parallel_config.enable_eplb:
            _register(self, gpu_model_runner)

    CPUModelRunner.load_model = load_model
    # Names in these modules alone: elsewhere an XPU would be looked for, and events would have no times.
    parallel.current_platform = _Instead(parallel.current_platform, is_xpu=lambda: True)
    eplb_state.torch = _Instead(torch, Event=_Event)


class _Instead:
    """A module or an object with some attributes replaced."""

    def __init__(self, own: Any, **others: Any) -> None:
        self.__dict__.update(others, _own=own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_own"], name)


class _Event:
    """An event of a device that does everything at once."""

    def __init__(self, **options: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


def _register(runner: Any, gpu_model_runner: Any) -> None:
    """Tells the balancer of the model and of its draft layers, as vLLM's runner for GPUs does."""
    runner.eplb_state = gpu_model_runner.EplbState(runner.parallel_config, runner.device)
    drafter = getattr(getattr(runner, "drafter", None), "model", None)
    draft = None if drafter is None else gpu_model_runner.get_mixture_of_experts_model(drafter)
    if gpu_model_runner.draft_model_supports_eplb(runner.speculative_config, draft):
        config = runner.speculative_config.draft_model_config
        runner.eplb_state.add_model(draft, config, model_name=gpu_model_runner.eplb_draft_model_name(config))
        runner.drafter.set_eplb_state(runner.eplb_state)
    runner._moe_model = gpu_model_runner.get_mixture_of_experts_model(runner.model)
    runner.eplb_state.add_model(runner._moe_model, runner.model_config)
