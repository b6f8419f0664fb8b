"""Functions that vLLM lacks for expert parallelism on the CPUs of one memory node.

Its CPU experts take the ids of this rank's experts and know no expert map. Its server gives each rank of data
parallelism a memory node of its own, and ends where there are fewer.

vLLM calls ``patch`` in each of its processes (stubs/putget_tests.dist-info names it as a plug-in).
"""

from __future__ import annotations

from typing import Any


def patch() -> None:
    _patch_experts()
    _patch_memory_nodes()


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
