"""SGLang: ``--moe-a2a-backend putget``, with SGLang's plug-in loader and stand-ins for the tables that it widens.

tests/engines runs it in SGLang itself.
"""

from __future__ import annotations

import argparse
import importlib
import os
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from putget import BackendUnavailable
from putget.adapters.sglang import backend
from tests.adapters.layer import Layer, same_bits
from tests.adapters.packages import stand_in
from tests.adapters.sglang.engine import DISPATCHERS, VERSIONS, Engine, StandardTopK, load
from tests.adapters.upstream import require_entry_point, upstream
from tests.harness import Rank, fresh_ranks

SRT = "sglang.srt"
LAYERS = [Layer(num_tokens=(3, 0, 8, 1), seed=5), Layer(num_tokens=(1, 0, 0, 0), seed=6)]


class MoeA2ABackend(Enum):
    """Two of SGLang's backends."""

    NONE = "none"
    FLASHINFER = "flashinfer"

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise ValueError(f"No {cls.__name__} member for value {value}")

    def is_none(self) -> bool:
        return self is MoeA2ABackend.NONE

    def is_flashinfer(self) -> bool:
        return self is MoeA2ABackend.FLASHINFER


class Pool:
    """SGLang's FusedOpPool."""

    @classmethod
    def get_fused_func(cls, dispatch_name: str, runner_name: str) -> str:
        return f"{dispatch_name}, {runner_name}"


class ServerArgs:
    """SGLang's command line."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        for name in ("--moe-a2a-backend", "--speculative-moe-a2a-backend"):
            parser.add_argument(name, choices=["none", "flashinfer"])


class StandardDispatchOutput(NamedTuple):
    """SGLang's."""

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: StandardTopK
    format: str = "standard"


class UnquantizedFusedMoEMethod:
    """SGLang's method of experts that are not quantised."""


def tables(chosen: str) -> SimpleNamespace:
    """Stand-ins for the modules that the backend widens; the returned one counts calls."""
    seen = SimpleNamespace(arguments=None)

    def handle_a2a_moe(server_args: Any) -> None:
        seen.arguments = server_args

    def create_moe_dispatcher(moe_runner_config: Any, quant_method: Any) -> Any:
        return "SGLang's own"

    context = importlib.import_module(f"{SRT}.runtime_context")
    group = SimpleNamespace(device_group=torch.distributed.group.WORLD)
    context.get_parallel = lambda: SimpleNamespace(attn_tp_size=1, tp_group=group)  # type: ignore[attr-defined]
    utils = importlib.import_module(f"{SRT}.layers.moe.utils")
    utils.__dict__.update(MoeA2ABackend=MoeA2ABackend, get_moe_a2a_backend=lambda: MoeA2ABackend(chosen))
    importlib.import_module(f"{SRT}.arg_groups.overrides").__dict__["_A2A_EP_SPANNING_BACKENDS"] = frozenset()
    stand_in(f"{SRT}.arg_groups.moe_hook", handle_a2a_moe=handle_a2a_moe, resolved_view=lambda arguments: arguments)
    stand_in(f"{SRT}.server_args", ServerArgs=ServerArgs)
    stand_in(f"{SRT}.layers.moe.moe_runner")
    stand_in(f"{SRT}.layers.moe.moe_runner.base", FusedOpPool=Pool)
    stand_in(f"{SRT}.layers.moe.fused_moe_triton")
    stand_in(backend.LAYER_MODULE, create_moe_dispatcher=create_moe_dispatcher)
    importlib.import_module(f"{DISPATCHERS}.standard").__dict__["StandardDispatchOutput"] = StandardDispatchOutput
    return seen


def plugged_in(root: Path, chosen: str) -> tuple[Engine, SimpleNamespace]:
    engine = load(root, VERSIONS[1], with_flashinfer=False)
    seen = tables(chosen)
    os.environ["PUTGET_ENGINES"] = "1"
    importlib.import_module(f"{SRT}.plugins").load_plugins()
    return engine, seen


def runner_config(engine: Engine, layer: Layer) -> SimpleNamespace:
    return SimpleNamespace(
        top_k=layer.top_k,
        num_experts=layer.num_experts,
        num_local_experts=layer.num_experts // layer.ep_size,
        hidden_size=layer.hidden_size,
        params_dtype=torch.bfloat16,
        runner_backend=engine.runner_backend(),
        inplace=True,
    )


def layers_of_the_own_name(rank: Rank, root: Path) -> list[torch.Tensor]:
    """A body: a runner that takes this rank's expert numbers, and one that takes those of all."""
    engine, _ = plugged_in(root, "putget")
    combined = []
    for layer, engine.runner in zip(LAYERS, ("triton", "deep_gemm"), strict=True):
        config = runner_config(engine, layer)
        make = importlib.import_module(backend.LAYER_MODULE).create_moe_dispatcher
        dispatcher = make(config, quant_method=UnquantizedFusedMoEMethod())
        assert not config.inplace  # rows that arrive are the workspace's
        engine.tokens = list(layer.num_tokens)
        ids, weights = layer.routes(rank.rank)
        topk = StandardTopK(weights, ids, torch.zeros(len(ids), layer.num_experts))
        output = dispatcher.dispatch(hidden_states=layer.hidden(rank.rank), topk_output=topk)
        arrived = output.topk_output.topk_ids
        if engine.runner == "triton":
            assert type(output) is StandardDispatchOutput
            assert arrived.max() < config.num_local_experts
            arrived = torch.where(arrived < 0, -1, arrived + rank.rank * config.num_local_experts)
        rows = layer.experts((output.hidden_states,), arrived, output.topk_output.topk_weights, rank.rank)
        form = "standard" if engine.runner == "triton" else "flashinfer"
        combined.append(dispatcher.combine(combine_input=SimpleNamespace(format=form, hidden_states=rows)))
    return combined


def test_layers_of_the_own_name() -> None:
    root = upstream(VERSIONS[1])
    require_entry_point("sglang.srt.plugins")
    with fresh_ranks(4) as ranks:
        for rank, combined in ranks.call(layers_of_the_own_name, root).items():
            for layer, rows in zip(LAYERS, combined, strict=True):
                assert same_bits(rows, layer.expected(rank)), (rank, layer)


def other_names(rank: Rank, root: Path) -> None:
    """A body: what the plug-in adds, and that everything else is as it was."""
    engine, seen = plugged_in(root, "flashinfer")
    backend.put_in_place()  # once is enough
    own = MoeA2ABackend("putget")
    assert own is MoeA2ABackend("putget")
    assert own.is_flashinfer()
    assert not own.is_none()
    assert [member.value for member in MoeA2ABackend] == ["none", "flashinfer"]
    with pytest.raises(ValueError, match="No MoeA2ABackend member for value other"):
        MoeA2ABackend("other")
    make = importlib.import_module(backend.LAYER_MODULE).create_moe_dispatcher
    assert make(runner_config(engine, LAYERS[0]), None) == "SGLang's own"
    assert engine.module().FlashinferDispatcher.__module__.startswith("sglang.")
    assert Pool.get_fused_func("putget", "triton") == "none, triton"
    assert Pool.get_fused_func("putget", "flashinfer_cutlass") == "flashinfer, flashinfer_cutlass"
    assert Pool.get_fused_func("deepep", "triton") == "deepep, triton"
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert parser.parse_args(["--moe-a2a-backend", "putget"]).moe_a2a_backend == "putget"
    hook = importlib.import_module(f"{SRT}.arg_groups.moe_hook")
    given = SimpleNamespace(moe_a2a_backend="flashinfer", tp_size=2, attn_dp_size=1)
    hook.handle_a2a_moe(given)
    assert seen.arguments is given
    given.moe_a2a_backend = "putget"
    with pytest.raises(ValueError, match="--attn-dp-size is 1 and --tp-size 2"):
        hook.handle_a2a_moe(given)


def test_other_names_keep_their_meaning() -> None:
    root = upstream(VERSIONS[1])
    require_entry_point("sglang.srt.plugins")
    with fresh_ranks(1) as ranks:
        ranks.call(other_names, root)


GOOD = {"nnodes": 2, "tp_size": 4, "attn_dp_size": 4, "moe_runner_backend": "triton"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_dp_size": 2}, "--attn-dp-size is 2 and --tp-size 4, expected equal numbers"),
        ({"moe_runner_backend": "marlin"}, "--moe-runner-backend is 'marlin', allowed are auto, triton, deep_gemm"),
        ({"enable_single_batch_overlap": True}, "--enable-single-batch-overlap is for DeepEP's backends"),
    ],
)
def test_arguments_that_putget_cannot_carry_are_refused(changes: dict[str, Any], named: str) -> None:
    backend.check_arguments(SimpleNamespace(**GOOD))
    with pytest.raises(ValueError, match=named):
        backend.check_arguments(SimpleNamespace(**{**GOOD, **changes}))


def test_layers_that_putget_cannot_carry_are_refused() -> None:
    config = SimpleNamespace(runner_backend=SimpleNamespace(value="marlin"))
    with pytest.raises(ValueError, match="the experts run on 'marlin', allowed are triton, deep_gemm"):
        backend.check_layer(config, UnquantizedFusedMoEMethod())
    with pytest.raises(ValueError, match="quantised by SimpleNamespace, known are UnquantizedFusedMoEMethod"):
        backend.check_layer(config, SimpleNamespace())


def test_an_sglang_without_these_tables_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="--moe-a2a-backend putget is not there: No module named 'sglang'"):
        backend.put_in_place()
