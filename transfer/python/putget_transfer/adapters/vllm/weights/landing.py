"""Where a version lands in a worker of vLLM, and how it moves into the model.

vLLM repacks the weights of some layers after it has loaded them: for kernels of a CPU, and for most quantised ones. A
version lands in such a layer's tensors as the checkpoint fills them, outside of the model. When it moves, vLLM's own
processing runs again over a copy of them, and the result is copied into the tensors that kernels know, as vLLM's
layer-wise reload does it. All other layers take the bytes as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise, meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors
from vllm.platforms import current_platform

from putget_transfer.weights import Entry, Slots, record
from putget_transfer.weights._rollout import Copies

PLAIN_ON_GPUS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""They repack for CPUs only."""


def repacks(layer: Any) -> bool:
    """Say whether vLLM changes a layer's weights after it has loaded them."""
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase) or is_deferred_attention_layer(layer):
        return False
    if type(method).process_weights_after_loading is QuantizeMethodBase.process_weights_after_loading:
        return False
    return not (type(method) in PLAIN_ON_GPUS and current_platform.is_cuda_alike())


class Landing:
    """The memory of one worker's model that versions land in.

    Attributes:
        slots: What was recorded, with that memory.
        num_repacked: Layers that vLLM repacks.
        num_in_place: Other memory, which takes bytes as they are.
    """

    def __init__(self, model: Any, model_config: Any, entries: Iterable[Entry], *, commit: str) -> None:
        """Record the model's slots.

        Args:
            model: vLLM's model, loaded.
            model_config: vLLM's configuration of it.
            entries: The checkpoint's tensors.
            commit: "swap": nothing lands in the model itself; "paused": what is not repacked does.

        Raises:
            ValueError: Parameters that cannot be recorded; they are named.
        """
        self.model, self.model_config = model, model_config
        self.repacked = [layer for layer in model.modules() if repacks(layer)]
        self.loads: dict[Any, dict[str, Any]] = {}
        with torch.no_grad():
            with self._displaced():
                recorded = record(model, entries, ignored=self._ignored())
            apart = {load.untyped_storage()._cdata for loads in self.loads.values() for load in loads.values()}
            self.live = recorded.tensors
            inside = [tensor.untyped_storage()._cdata not in apart for tensor in self.live]
            self.copies = [
                torch.empty_like(tensor) if is_inside and commit == "swap" else None
                for tensor, is_inside in zip(self.live, inside, strict=True)
            ]
        lands = [tensor if copy is None else copy for tensor, copy in zip(self.live, self.copies, strict=True)]
        self.slots = Slots(list(recorded), recorded.memory, lands)
        self.moves = Copies(self.slots)
        self.num_repacked, self.num_in_place = len(self.repacked), sum(inside)

    def _ignored(self) -> list[str]:
        """Name what no checkpoint has: scales that attention keeps beside its cache."""
        return [
            f"{prefix}.{name}"
            for prefix, layer in self.model.named_modules()
            if is_deferred_attention_layer(layer)
            for name in (*layer._parameters, *layer._buffers)
        ]

    @contextlib.contextmanager
    def _displaced(self) -> Iterator[None]:
        """Give repacked layers the tensors that the checkpoint fills, which this object keeps, for some time."""
        shared: dict[Any, Any] = {}
        begun = []
        try:
            for layer in self.repacked:
                begun.append(layer)
                kernel = _displace(layer)
                displaced = get_layer_tensors(layer)
                self.loads[layer] = {
                    name: self._load(layer, name, load, kernel.get(name), shared)
                    for name, load in displaced.items()
                    if load is not kernel.get(name)
                }
            yield
        finally:
            for layer in begun:
                info = layerwise.get_layerwise_info(layer)
                layerwise._place_kernel_tensors(layer, info)
                info.reset()

    def _load(self, layer: Any, name: str, load: Any, own: Any, shared: dict[Any, Any]) -> Any:
        """Fill a displaced tensor where no checkpoint does so, and return it."""
        load.data.zero_()  # padding
        if own is None or not own.numel() or own.shape != load.shape:
            return load
        if name in layer._buffers:
            load.copy_(own)
            return load
        # Layers that share a parameter (tied embeddings) share what lands for it.
        common = shared.setdefault((own.untyped_storage()._cdata, own.storage_offset()), load)
        setattr(layer, name, common)
        return common

    def move(self) -> None:
        """Bring the version that has landed into the model."""
        with torch.no_grad():
            self.moves.copy(self.copies, self.live)
            for layer in self.repacked:
                self._process(layer)
            for layer in self.model.modules():
                if is_deferred_attention_layer(layer):
                    layer.process_weights_after_loading(self.model_config.dtype)
        if current_platform.is_cuda_alike():
            torch.accelerator.synchronize()

    def _process(self, layer: Any) -> None:
        """Repack a layer, as vLLM's layer-wise reload does it."""
        _displace(layer)
        info = layerwise.get_layerwise_info(layer)
        tensors = get_layer_tensors(layer)
        for name, load in self.loads[layer].items():
            tensors[name].data.copy_(load)
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            del layer._already_called_process_weights_after_loading
        layer.quant_method.process_weights_after_loading(layer)
        _pack_again(layer)
        if hasattr(layer, "update_param_tp_status"):
            layer.update_param_tp_status()
        layerwise._copy_and_restore_kernel_tensors(layer, info)
        info.reset()


def _displace(layer: Any) -> dict[str, Any]:
    """Give a layer new tensors, as the checkpoint fills them; return those that it had."""
    info = layerwise.get_layerwise_info(layer)
    info.kernel_tensors = get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    meta.restore_layer_on_meta(layer, info)
    meta.materialize_layer(layer, info)
    parameters, buffers = info.kernel_tensors
    return {**parameters, **buffers}


def _pack_again(layer: Any) -> None:
    """Have experts of a CPU pack once more: vLLM 0.33 does so at the first load only."""
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    if current_platform.is_cpu() and kernel is not None:
        kernel.fused_experts.process_weights_after_loading(layer)
