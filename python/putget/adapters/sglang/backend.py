"""``--moe-a2a-backend putget``: a name of putget's own among SGLang's all-to-all backends.

SGLang's names are closed, so they are widened where SGLang looks them up. For the models, putget is what "flashinfer"
is to them: tokens stay scattered over the ranks, and combine gives whole sums. The name "flashinfer" itself, and every
other one, keeps its meaning; FlashInfer need not be installed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from putget import BackendUnavailable
from putget.adapters.engines import replace_name, require_names
from putget.adapters.rounds import Rounds
from putget.adapters.sglang.dispatcher import MODULE, DispatcherRounds, Sent
from putget.adapters.sglang.overlap import watch_splits

NAME = "putget"
LAYER_MODULE = "sglang.srt.layers.moe.fused_moe_triton.layer"
_UTILS = "sglang.srt.layers.moe.utils"
_ARGUMENTS = "sglang.srt.arg_groups.moe_hook"
_OVERRIDES = "sglang.srt.arg_groups.overrides"
_SERVER_ARGS = "sglang.srt.server_args"
_POOL = "sglang.srt.layers.moe.moe_runner.base"
_STANDARD = "sglang.srt.layers.moe.token_dispatcher.standard"
_OPTIONS = ("moe_a2a_backend", "speculative_moe_a2a_backend")

# Runners that take this rank's own expert numbers, and those that take the numbers of all ranks.
_LOCAL_RUNNERS = ("triton",)
_GLOBAL_RUNNERS = (
    "deep_gemm",
    "flashinfer_cutlass",
    "flashinfer_cutedsl",
    "flashinfer_trtllm",
    "flashinfer_trtllm_routed",
)
RUNNERS = _LOCAL_RUNNERS + _GLOBAL_RUNNERS
# SGLang's methods of quantisation whose runners are among these: bfloat16, FP8 in blocks, NVFP4.
METHODS = (
    "UnquantizedFusedMoEMethod",
    "Fp8MoEMethod",
    "ModelOptNvFp4FusedMoEMethod",
    "ModelOptNvFp4OnlineFusedMoEMethod",
)


class LocalDispatcherRounds(DispatcherRounds):
    """A dispatcher whose runner may take SGLang's standard format: expert ids are numbers on this rank, or -1."""

    @functools.cached_property
    def _standard(self) -> Any:
        """SGLang's module of that format, found once."""
        return importlib.import_module(_STANDARD)

    def _given_to_runner(self, rounds: Rounds, received: Any, scale: torch.Tensor | None, sent: Sent) -> Any:
        if self._runner not in _LOCAL_RUNNERS:
            return super()._given_to_runner(rounds, received, scale, sent)
        num_local = self.num_experts // self.ep_size
        ids = received.topk_ids - self.ep_rank * num_local
        ids.masked_fill_((ids < 0).logical_or_(ids >= num_local), -1)
        return self._standard.StandardDispatchOutput(
            hidden_states=received.payloads[0],
            hidden_states_scale=scale,
            topk_output=self.engine_module.StandardTopKOutput(received.topk_weights, ids, sent.router_logits),
        )


def put_in_place() -> None:
    """Widens SGLang's names by ``putget`` in this process. Idempotent.

    Raises:
        BackendUnavailable: This SGLang does not have what putget looks for; nothing has been changed.
    """
    needed = {
        MODULE: ("BaseDispatcher", "StandardTopKOutput", "FlashinferDispatchOutput"),
        LAYER_MODULE: ("create_moe_dispatcher",),
        _UTILS: ("MoeA2ABackend", "get_moe_a2a_backend"),
        _ARGUMENTS: ("handle_a2a_moe", "resolved_view"),
        _OVERRIDES: ("_A2A_EP_SPANNING_BACKENDS",),
        _SERVER_ARGS: ("ServerArgs",),
        _POOL: ("FusedOpPool",),
        _STANDARD: ("StandardDispatchOutput",),
    }
    try:
        modules = {name: importlib.import_module(name) for name in needed}
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"SGLang: --moe-a2a-backend {NAME} is not there: {error}") from error
    for name, names in needed.items():
        require_names("SGLang", modules[name], names)
    kind = modules[_UTILS].MoeA2ABackend
    for name, thing in (("is_flashinfer", kind), ("get_fused_func", modules[_POOL].FusedOpPool)):
        require_names("SGLang", thing, [name])
    if getattr(kind, "_putget", None) is not None:
        return
    _widen_kinds(kind)
    _widen_options(modules[_SERVER_ARGS].ServerArgs)
    overrides: Any = modules[_OVERRIDES]
    overrides._A2A_EP_SPANNING_BACKENDS |= {NAME}  # expert parallelism is as wide as tensor parallelism
    _widen_runners(modules[_POOL].FusedOpPool)
    watch_splits()
    replace_name(_ARGUMENTS, "handle_a2a_moe", _checked, engine="SGLang")
    replace_name(LAYER_MODULE, "create_moe_dispatcher", _dispatcher_factory, engine="SGLang")


def _widen_kinds(kind: Any) -> None:
    """``MoeA2ABackend("putget")``, which answers ``is_flashinfer()`` as "flashinfer" does."""
    member = object.__new__(kind)
    member._name_, member._value_ = NAME.upper(), NAME
    missing, is_flashinfer = kind._missing_, kind.is_flashinfer
    kind._putget = member
    kind._missing_ = classmethod(lambda _, value: member if value == NAME else missing(value))
    kind.is_flashinfer = lambda self: self is member or is_flashinfer(self)


def _widen_options(server_args: Any) -> None:
    """The command line takes the name."""
    original = server_args.add_cli_args

    @functools.wraps(original)
    def add_cli_args(parser: Any, *args: Any, **options: Any) -> Any:
        result = original(parser, *args, **options)
        for action in parser._actions:
            if action.dest in _OPTIONS and NAME not in action.choices:
                action.choices = [*action.choices, NAME]
        return result

    server_args.add_cli_args = staticmethod(add_cli_args)


def _widen_runners(pool: Any) -> None:
    """Runners that are one function: those that SGLang has for its standard format, and for FlashInfer's."""
    original = pool.get_fused_func

    def get_fused_func(_: Any, dispatch_name: str, runner_name: str) -> Any:
        if dispatch_name == NAME:
            dispatch_name = "none" if runner_name in _LOCAL_RUNNERS else "flashinfer"
        return original(dispatch_name, runner_name)

    pool.get_fused_func = classmethod(get_fused_func)


def _checked(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """SGLang's check of its arguments, and putget's behind it."""

    @functools.wraps(original)
    def handle_a2a_moe(server_args: Any) -> None:
        original(server_args)
        view = importlib.import_module(_ARGUMENTS).resolved_view(server_args)
        if view.moe_a2a_backend == NAME:
            check_arguments(view)

    handle_a2a_moe.__module__ = __name__
    return handle_a2a_moe


def check_arguments(view: Any) -> None:
    """Refuses server arguments that putget cannot carry, before a worker is started.

    Raises:
        ValueError: No data-parallel attention, another runner, single-batch overlap; the message names it.
    """
    chosen = f"--moe-a2a-backend {NAME}"
    if view.tp_size > 1 and view.attn_dp_size != view.tp_size:
        raise ValueError(
            f"{chosen}: --attn-dp-size is {view.attn_dp_size} and --tp-size {view.tp_size}, expected equal numbers: "
            "every rank sends tokens of its own"
        )
    if view.moe_runner_backend not in ("auto", *RUNNERS):
        raise ValueError(
            f"{chosen}: --moe-runner-backend is {view.moe_runner_backend!r}, allowed are auto, {', '.join(RUNNERS)}"
        )
    if getattr(view, "enable_single_batch_overlap", False):
        raise ValueError(f"{chosen}: --enable-single-batch-overlap is for DeepEP's backends; leave it out")


def _dispatcher_factory(original: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's ``create_moe_dispatcher``, with putget's dispatcher where putget was chosen."""
    module = importlib.import_module(MODULE)
    namespace = {"engine_module": module, "__doc__": DispatcherRounds.__doc__}
    kind = type("PutgetDispatcher", (LocalDispatcherRounds, module.BaseDispatcher), namespace)
    utils = importlib.import_module(_UTILS)

    @functools.wraps(original)
    def create_moe_dispatcher(moe_runner_config: Any, quant_method: Any) -> Any:
        backend = utils.get_moe_a2a_backend()
        if backend is not utils.MoeA2ABackend._putget:
            return original(moe_runner_config, quant_method)
        check_layer(moe_runner_config, quant_method)
        moe_runner_config.inplace = False  # rows that arrive are the workspace's
        context = importlib.import_module("sglang.srt.runtime_context")
        return kind(
            group=context.get_parallel().tp_group.device_group,
            router_topk=moe_runner_config.top_k,
            num_experts=moe_runner_config.num_experts,
            num_local_experts=moe_runner_config.num_local_experts,
            hidden_size=moe_runner_config.hidden_size,
            params_dtype=moe_runner_config.params_dtype,
            moe_runner_config=moe_runner_config,
        )

    create_moe_dispatcher.__module__ = __name__
    return create_moe_dispatcher


def check_layer(moe_runner_config: Any, quant_method: Any) -> None:
    """Refuses a layer that putget cannot carry, before its weights are loaded.

    Raises:
        ValueError: Another quantisation or runner; the message names it.
    """
    method = type(quant_method).__name__
    if method not in METHODS:
        raise ValueError(
            f"--moe-a2a-backend {NAME}: the experts are quantised by {method}, known are {', '.join(METHODS)}"
        )
    runner = getattr(moe_runner_config.runner_backend, "value", None)
    if runner not in RUNNERS:
        raise ValueError(f"--moe-a2a-backend {NAME}: the experts run on {runner!r}, allowed are {', '.join(RUNNERS)}")
