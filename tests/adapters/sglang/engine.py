"""SGLang's own dispatcher, base class, environment and plug-in loader, with stand-ins for the rest of SGLang.

Two versions: 0.5.9, and the newest when this was written, which has plug-ins.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from putget.adapters import flashinfer
from tests.adapters.layer import Layer
from tests.adapters.packages import lend, shell, stand_in
from tests.harness import Rank

VERSIONS = ("sglang_0_5_9", "sglang_0_5_23")
DISPATCHERS = "sglang.srt.layers.moe.token_dispatcher"


class StandardTopK(NamedTuple):
    """SGLang's StandardTopKOutput."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


@dataclass
class Bypassed:
    """A top-k output that is materialised when somebody asks."""

    standard: StandardTopK

    def to_standard(self) -> StandardTopK:
        return self.standard


@dataclass
class Runner:
    """A runner backend as SGLang's enumeration has it."""

    value: str

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("is_"):
            raise AttributeError(name)
        return lambda: name == f"is_{self.value}"


@dataclass
class Engine:
    """The answers of the stand-ins.

    Attributes:
        version: which of VERSIONS.
        tokens: the number of tokens of every rank, as data-parallel attention knows it; None without that.
        recipe: what flashinfer_a2a_dispatch_type says.
        runner: the runner's name.
        capacity: tokens a rank, as the newer version computes it.
        server_args: the server arguments of the older version.
        quantised: how often a quantiser was called.
    """

    version: str
    tokens: list[int] | None = None
    recipe: str = "bf16"
    runner: str = "flashinfer_cutlass"
    capacity: int = 8
    variable: int = 8
    extend: bool = False
    speculative: bool = False
    server_args: Any = None
    quantised: int = 0
    names: dict[str, Any] = field(default_factory=dict)

    @property
    def newer(self) -> bool:
        return self.version != VERSIONS[0]

    def runner_backend(self) -> Runner:
        return Runner(self.runner)

    def module(self) -> Any:
        return importlib.import_module(f"{DISPATCHERS}.flashinfer")

    def dispatcher(self, rank: Rank, layer: Layer, kind: Any = None, **options: Any) -> Any:
        """SGLang's FlashinferDispatcher, or what stands in its place, as create_moe_dispatcher makes it."""
        if self.newer:
            options["moe_runner_config"] = SimpleNamespace(runner_backend=self.runner_backend())
        with on_cpu():
            return (kind or self.module().FlashinferDispatcher)(
                group=torch.distributed.group.WORLD,
                router_topk=layer.top_k,
                num_experts=layer.num_experts,
                num_local_experts=layer.num_experts // layer.ep_size,
                hidden_size=layer.hidden_size,
                **options,
            )

    def fp4_quantize(self, x: torch.Tensor, scale: Any, is_sf_swizzled_layout: bool) -> tuple[torch.Tensor, ...]:
        """The NVFP4 bytes that the test has prepared; which rows they belong to does not matter to a dispatcher."""
        assert not is_sf_swizzled_layout
        assert scale is not None
        self.quantised += 1
        codes, scales = (tensor.view(torch.uint8) for tensor in self.names["nvfp4"])
        if len(x) != len(codes):  # the dummy row of SGLang 0.5.9
            return tuple(torch.zeros(len(x), tensor.shape[1], dtype=torch.uint8) for tensor in (codes, scales))
        return codes, scales


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """SGLang 0.5.9 makes its dummy tensors on "cuda"."""

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            options = dict(kwargs or {})
            if options.get("device") == "cuda":
                options["device"] = "cpu"
            return func(*args, **options)

    with Mode():
        yield


class Config(NamedTuple):
    """FlashInfer's MnnvlConfig."""

    comm_backend: Any


def mapping(**sizes: Any) -> SimpleNamespace:
    """FlashInfer's Mapping, as far as it is looked at."""
    return SimpleNamespace(moe_ep_size=sizes["moe_ep_size"], moe_ep_rank=sizes["rank"])


def load(root: Path, version: str, with_flashinfer: bool = True) -> Engine:
    """Imports the files of a version; whatever else they import answers as the returned Engine says."""
    engine = Engine(version)
    sys.path.insert(0, str(root))  # the METADATA, for the version
    srt = "sglang.srt"
    shell(root, "sglang", srt, f"{srt}.layers", f"{srt}.layers.moe", DISPATCHERS, f"{srt}.speculative")
    base = importlib.import_module(f"{DISPATCHERS}.base")
    names = ("BaseDispatcher", "CombineInput", "CombineInputFormat", "DispatchOutput", "DispatchOutputFormat")
    lend(DISPATCHERS, base, *names)
    if with_flashinfer:
        _flashinfer(engine)
    if not engine.newer:
        stand_in(f"{srt}.debug_utils")
        stand_in(f"{srt}.debug_utils.cuda_coredump")
    checker = SimpleNamespace(format_is_bypassed=lambda output: isinstance(output, Bypassed))
    stand_in(f"{srt}.layers.moe.topk", StandardTopKOutput=StandardTopK, TopKOutput=object, TopKOutputChecker=checker)
    stand_in(
        f"{srt}.layers.dp_attention",
        get_dp_global_num_tokens=lambda: engine.tokens,
        get_is_extend_in_batch=lambda: engine.extend,
        is_dp_attention_enabled=lambda: True,
    )
    utils = {"is_flashinfer_available": lambda: False, "get_int_env_var": lambda name, default: engine.variable}
    stand_in(f"{srt}.utils", **utils)
    (_newer if engine.newer else _older)(engine, srt)
    return engine


def _flashinfer(engine: Engine) -> None:
    stand_in("flashinfer", fp4_quantize=engine.fp4_quantize, nvfp4_block_scale_interleave=lambda scale: scale.clone())
    stand_in(
        "flashinfer.comm",
        MoeAlltoAll=flashinfer.MoeAlltoAll,
        moe_a2a_get_workspace_size_per_rank=flashinfer.moe_a2a_get_workspace_size_per_rank,
    )
    stand_in("flashinfer.comm.mapping", Mapping=mapping)
    stand_in("flashinfer.comm.mnnvl", MnnvlConfig=Config)


def _older(engine: Engine, srt: str) -> None:
    stand_in(f"{srt}.layers.moe.utils", get_moe_runner_backend=engine.runner_backend)
    engine.server_args = SimpleNamespace(speculative_algorithm=None)
    stand_in(f"{srt}.server_args", get_global_server_args=lambda: engine.server_args)


def _newer(engine: Engine, srt: str) -> None:
    stand_in("sglang.kernels")
    stand_in("sglang.kernels.kernel_api_logging", debug_kernel_api=lambda call: call)
    stand_in(f"{srt}.arg_groups")
    stand_in(
        f"{srt}.arg_groups.overrides",
        flashinfer_a2a_max_dispatch_tokens_per_rank=lambda prefill: max(prefill, engine.capacity),
    )
    stand_in(
        f"{srt}.runtime_context",
        get_flags=lambda: SimpleNamespace(moe=SimpleNamespace(speculative_context=engine.speculative)),
        get_forward=lambda: SimpleNamespace(sp_active=False),
        get_parallel=lambda: SimpleNamespace(attn_tp_size=1),
        get_spec=lambda: SimpleNamespace(speculative_algorithm=None),
        max_prefill_buffer_tokens=lambda: 0,
    )
    algorithm = SimpleNamespace(from_string=lambda name: SimpleNamespace(is_eagle=lambda: False))
    stand_in(f"{srt}.speculative.spec_info", SpeculativeAlgorithm=algorithm)
    stand_in(f"{srt}.layers.quantization")
    stand_in(f"{srt}.layers.quantization.fp4_utils", fp4_quantize=engine.fp4_quantize)

    class Standard:
        """SGLang's StandardDispatcher, which the newer version makes for prefill and decode does not call."""

        def __init__(self, config: Any) -> None:
            self.config = config

        def set_quant_config(self, quant_config: dict[str, Any]) -> None:
            self.quant_config = quant_config

    kinds = {"StandardDispatcher": Standard, "StandardCombineInput": object, "StandardDispatchOutput": object}
    stand_in(f"{DISPATCHERS}.standard", **kinds)
    dispatch_type = type("FlashinferA2ADispatchType", (), {})
    for name in ("BF16", "NVFP4", "MXFP8"):
        setattr(dispatch_type, name, SimpleNamespace(value=name.lower()))
    stand_in(
        f"{srt}.layers.moe.utils",
        FlashinferA2ADispatchType=dispatch_type,
        get_flashinfer_a2a_dispatch_type=lambda: getattr(dispatch_type, engine.recipe.upper()),
    )
