"""vLLM's own modular kernel, reductions and choice of prepare-and-finalize, with stand-ins for the rest of vLLM."""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.adapters.layer import Layer
from tests.adapters.packages import shell, stand_in
from tests.harness import Rank

FUSED_MOE = "vllm.model_executor.layers.fused_moe"


@dataclass
class Engine:
    """The answers of the stand-ins.

    Attributes:
        tokens: the number of tokens of every rank; None without data parallelism.
        prepared: what quantising this rank's rows gives.
        arrived: rows that were quantised with one scale for all of them.
        communication: what FlashInfer's manager hands out.
        written: where the experts wrote last.
        stream: what stands for the one stream of a CPU.
        config: vLLM's configuration, as far as it is looked at.
    """

    tokens: list[int] | None = None
    prepared: tuple[torch.Tensor, ...] = ()
    arrived: list[torch.Tensor] = field(default_factory=list)
    communication: Any = None
    written: int = 0
    quantised: list[Any] = field(default_factory=list)
    stream: object = field(default_factory=object)
    config: Any = None

    def quantise(self, rows: torch.Tensor, *arguments: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        """Stands for moe_kernel_quantize_input."""
        if arguments[1] is None:
            return rows, None
        if arguments[3] is None and arguments[1] != "nvfp4":
            self.arrived.append(rows)
            scale = rows.abs().amax().float() if arguments[0] is None else arguments[0]
            return (rows.float() / scale).to(arguments[1]), scale.reshape(1)
        assert options["is_scale_swizzled"] is False
        self.quantised.append(arguments[1])
        assert len(rows) == len(self.prepared[0])
        return self.prepared[0], self.prepared[1]

    @property
    def kernel(self) -> Any:
        return importlib.import_module(f"{FUSED_MOE}.modular_kernel")

    @property
    def reductions(self) -> Any:
        return importlib.import_module(f"{FUSED_MOE}.topk_weight_and_reduce")

    def make(
        self,
        layer: Layer,
        backend: str = "flashinfer_nvlink_one_sided",
        dtype: torch.dtype = torch.bfloat16,
        **options: Any,
    ) -> Any:
        """The prepare-and-finalize that vLLM chooses for an --all2all-backend."""
        off = ("deepep_ht", "deepep_ll", "deepep_v2", "mori", "moonep", "nixl_ep", "fi_nvl_two_sided", "ag_rs_all2all")
        moe = SimpleNamespace(
            **{f"use_{name}_kernels": False for name in off},
            use_fi_nvl_one_sided_kernels=backend == "flashinfer_nvlink_one_sided",
            moe_parallel_config=SimpleNamespace(
                use_passthrough_all2all=False, use_all2all_kernels=True, all2all_backend=backend
            ),
            hidden_dim=layer.hidden_size,
            in_dtype=dtype,
            experts_per_token=layer.top_k,
            num_experts=layer.num_experts,
        )
        choose = importlib.import_module(f"{FUSED_MOE}.all2all_utils").maybe_make_prepare_finalize
        manager = SimpleNamespace(world_size=layer.ep_size)
        return choose(moe, SimpleNamespace(quant_dtype=None), all2all_manager=manager, **options)


@dataclass
class MoEConfig:
    """vLLM's FusedMoEConfig, as far as it is looked at."""

    moe_parallel_config: Any

    def __post_init__(self) -> None: ...


def load(root: Path, layer: Layer) -> Engine:
    """Imports vLLM's files; whatever else they import answers as the returned Engine says."""
    engine = Engine()
    sys.path.insert(0, str(root))  # the METADATA, for the version
    shell(root, "vllm", "vllm.model_executor", "vllm.model_executor.layers", FUSED_MOE, f"{FUSED_MOE}.prepare_finalize")
    shell(root, "vllm.v1", "vllm.v1.worker")
    stand_in("vllm.envs", VLLM_PLUGINS=None)
    stand_in("vllm.logger", init_logger=logging.getLogger)
    stand_in("vllm._custom_ops", moe_sum=lambda rows, out: out.copy_(rows.float().sum(1)))
    engine.config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=layer.max_tokens_per_rank),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        parallel_config=SimpleNamespace(nnodes=1, use_ubatching=False, num_ubatches=1),
    )
    stand_in("vllm.config", get_current_vllm_config=lambda: engine.config)
    platform = SimpleNamespace(**{f"is_{name}": lambda: False for name in ("cpu", "cuda", "cuda_alike", "rocm", "xpu")})
    stand_in("vllm.platforms", current_platform=platform)
    _communication(engine)
    _fused_moe(engine)
    scratch = SimpleNamespace(
        get_simultaneous=lambda *specs: [torch.full(shape, float("nan"), dtype=dtype) for shape, dtype in specs]
    )
    stand_in("vllm.v1.worker.workspace", current_workspace_manager=lambda: scratch)
    return engine


def _communication(engine: Engine) -> None:
    world = torch.distributed.group.WORLD

    class Manager:
        """Stands for FlashInferNVLinkOneSidedManager."""

        def initialize(self, **sizes: Any) -> None:
            self.sizes = sizes

        def get_communication(self) -> Any:
            return engine.communication

    device = SimpleNamespace(all2all_manager=Manager())
    group = SimpleNamespace(cpu_group=world, device_communicator=device)
    stand_in("vllm.distributed", get_ep_group=lambda: group, GroupCoordinator=object)
    stand_in("vllm.distributed.device_communicators")
    stand_in("vllm.distributed.device_communicators.all2all", FlashInferNVLinkOneSidedManager=Manager)
    sizes = SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda: engine.tokens)

    def context() -> Any:
        """That of the batch which computes, or of the whole forward."""
        whole = SimpleNamespace(dp_metadata=None if engine.tokens is None else sizes)
        return whole if module._forward_context is None else module._forward_context

    module = stand_in("vllm.forward_context", get_forward_context=context, ForwardContext=object, _forward_context=None)


def _fused_moe(engine: Engine) -> None:
    stand_in("vllm.utils")
    stand_in("vllm.utils.torch_utils", PIN_MEMORY=False, current_stream=lambda: engine.stream)
    stand_in("vllm.utils.flashinfer", nvfp4_block_scale_interleave=lambda scale: scale.clone())
    absent = ("deep_ep", "deep_ep_v2", "moonep", "mori", "nixl_ep")
    stand_in("vllm.utils.import_utils", **{f"has_{name}": lambda: False for name in absent})
    activation = SimpleNamespace(SILU="silu")
    settings = SimpleNamespace(from_configs=lambda *_: None)
    stand_in(
        f"{FUSED_MOE}.activation",
        ApplyMoEActivationConfig=settings,
        MoEActivation=activation,
        apply_moe_activation=None,
    )
    kinds = ("FusedMoEParallelConfig", "FusedMoEQuantConfig", "RoutingMethodType")
    stand_in(f"{FUSED_MOE}.config", FusedMoEConfig=MoEConfig, **dict.fromkeys(kinds, object))
    stand_in(f"{FUSED_MOE}.moe_output", UnfinalizedMoEOutput=type("UnfinalizedMoEOutput", (), {}))
    stand_in(f"{FUSED_MOE}.routed_experts_capturer", RoutedExpertsSink=object)
    stand_in(f"{FUSED_MOE}.runner")
    stand_in(f"{FUSED_MOE}.runner.shared_experts", SharedExperts=object, SharedExpertsOrder=object)
    stand_in(
        f"{FUSED_MOE}.utils",
        _resize_cache=lambda rows, shape: rows.flatten()[: torch.Size(shape).numel()].view(shape),
        moe_kernel_quantize_input=engine.quantise,
    )
    stand_in("vllm.model_executor.layers.quantization")
    stand_in("vllm.model_executor.layers.quantization.utils")
    stand_in("vllm.model_executor.layers.quantization.utils.quant_utils", QuantKey=object)
    stand_in(f"{FUSED_MOE}.experts")
    stand_in(f"{FUSED_MOE}.experts.fused_humming_moe", HummingIndexedExperts=type("HummingIndexedExperts", (), {}))
    # all2all_utils takes these from the package itself.
    prepare = sys.modules[f"{FUSED_MOE}.prepare_finalize"]
    for name in ("naive_dp_ep", "no_dp_ep"):
        setattr(prepare, f"make_moe_prepare_and_finalize_{name}", None)
    prepare.BatchedPrepareAndFinalize = object  # type: ignore[attr-defined]
    two_sided = f"{FUSED_MOE}.prepare_finalize.flashinfer_nvlink_two_sided"
    stand_in(two_sided, FlashInferNVLinkTwoSidedPrepareAndFinalize=object)
    stand_in(f"{FUSED_MOE}.prepare_finalize.passthrough", PassThroughPrepareAndFinalize=object)
    stand_in("flashinfer")
    stand_in("flashinfer.fused_moe", QuantFormat=SimpleNamespace(BF16="BF16"))


def experts_of(
    engine: Engine,
    rank: Rank,
    layer: Layer,
    reduced: bool,
    quant_dtype: Any,
    scales_each_token: bool = True,
    a1_scale: torch.Tensor | None = None,
) -> Any:
    """Fused experts for vLLM's kernel: weighted and reduced ones, or one row for each of a token's experts."""
    kernel = engine.kernel

    class Experts(kernel.FusedMoEExpertsModular):  # type: ignore[misc, name-defined]
        @staticmethod
        def activation_format() -> Any:
            return kernel.FusedMoEActivationFormat.Standard

        def workspace_shapes(self, m: int, n: int, k: int, topk: int, *_: Any) -> Any:
            return (1,), (1,), ((m, layer.hidden_size) if reduced else (m, topk, layer.hidden_size))

        def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
            return torch.bfloat16

        def moe_problem_size(self, a1: Any, w1: Any, w2: Any, topk_ids: Any) -> tuple[int, int, int, int, int]:
            return w1.shape[0], len(a1), w1.shape[1], layer.hidden_size, layer.top_k

        def finalize_weight_and_reduce_impl(self) -> Any:
            kinds = engine.reductions
            return kinds.TopKWeightAndReduceNoOP() if reduced else kinds.TopKWeightAndReduceDelegate()

        def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, **rest: Any) -> None:
            scale = rest["a1q_scale"]
            rows = [hidden_states] + ([] if scale is None else [scale])
            if scale is not None and scale.numel() == 1:
                rows = [(hidden_states.float() * scale).bfloat16()]
            ids, weights = rest["topk_ids"], rest["topk_weights"]
            engine.written = output.data_ptr()
            if reduced:
                output.copy_(layer.experts(tuple(rows), ids, weights, rank.rank))
                return
            for k in range(layer.top_k):
                one = layer.experts(tuple(rows), ids[:, k : k + 1], torch.ones_like(weights[:, :1]), rank.rank)
                output[:, k] = one.nan_to_num()

    Experts.__abstractmethods__ = frozenset()  # the choice between kernels is not asked here
    quant = SimpleNamespace(
        quant_dtype=quant_dtype,
        a1_gscale=None,
        a1_scale=a1_scale,
        a2_scale=None,
        per_act_token_quant=False,
        block_shape=[1, 128] if scales_each_token and quant_dtype is torch.float8_e4m3fn else None,
        mx_alignment=0,
        is_scale_swizzled=False,
    )
    return Experts(SimpleNamespace(moe_parallel_config=None), quant)
