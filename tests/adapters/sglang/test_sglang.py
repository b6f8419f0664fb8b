"""SGLang: its own dispatcher, unmodified, on putget's MoeAlltoAll; and putget's dispatcher in its place."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from putget import BackendUnavailable, ProtocolMisuse, reference
from putget.adapters import sglang
from tests.adapters.layer import Layer, same_bits
from tests.adapters.sglang.engine import VERSIONS, Bypassed, Engine, StandardTopK, load
from tests.adapters.upstream import upstream
from tests.harness import Rank, fresh_ranks

# One rank has no token.
LAYERS = [
    Layer(num_tokens=(3, 0, 8, 1), seed=1),
    Layer(num_tokens=(3, 0, 8, 1), seed=2, recipe="nvfp4"),
    Layer(num_tokens=(1, 0, 0, 0), seed=3, recipe="nvfp4"),
    Layer(num_tokens=(0, 5, 0, 2), seed=4),
]


def prepare(engine: Engine, rank: Rank, layer: Layer, dispatcher: Any) -> StandardTopK:
    """The part of SGLang's scheduler, router and quantisation method that comes before the layer runs."""
    engine.tokens = list(layer.num_tokens)
    engine.recipe = layer.recipe
    engine.names["nvfp4"] = layer.rows(rank.rank)
    scale = torch.ones(1) if layer.recipe == "nvfp4" else None
    dispatcher.set_quant_config({"input_global_scale": scale})
    ids, weights = layer.routes(rank.rank)
    return StandardTopK(weights, ids, torch.zeros(len(ids), layer.num_experts))


def run_experts(layer: Layer, output: Any, rank: Rank) -> Any:
    """A runner's work: reads the flat rows, and writes into moe_output where there is one."""
    assert output.hidden_states.shape[0] == layer.ep_size * max(layer.num_tokens)
    rows = [output.hidden_states]
    if layer.recipe != "bf16":
        scale = output.hidden_states_scale
        rows.append(scale.view(torch.float8_e4m3fn) if layer.recipe == "nvfp4" else scale)
    ids = output.topk_output.topk_ids
    ids = torch.where(ids == layer.num_experts, -1, ids)
    result = layer.experts(tuple(rows), ids, output.topk_output.topk_weights, rank.rank)
    return result if output.moe_output is None else output.moe_output.copy_(result)


def run_layer(engine: Engine, rank: Rank, layer: Layer, dispatcher: Any, bypassed: bool = False) -> torch.Tensor:
    topk = prepare(engine, rank, layer, dispatcher)
    routed: Any = Bypassed(topk) if bypassed else topk
    output = dispatcher.dispatch(layer.hidden(rank.rank), routed)
    rows = run_experts(layer, output, rank)
    combined = dispatcher.combine(engine.module().FlashinferCombineInput(rows))
    assert combined.shape == (layer.num_tokens[rank.rank], layer.hidden_size)
    return combined


def unmodified(rank: Rank, root: Path, version: str) -> list[torch.Tensor]:
    """A body: SGLang's own class; layers share its workspace, and two runners ask for two outputs."""
    engine = load(root, version)
    engine.variable = 2  # times ep_size, as that version counts
    assert engine.module().FlashinferDispatcher.__module__.startswith("sglang.")
    dispatchers = []
    for index, layer in enumerate(LAYERS):
        engine.runner = ("flashinfer_cutlass", "deep_gemm")[index % 2]
        engine.recipe = layer.recipe  # --flashinfer-a2a-dispatch-type
        dispatchers.append(engine.dispatcher(rank, layer))
    combined = []
    for layer, dispatcher in zip(LAYERS, dispatchers, strict=True):
        combined += [run_layer(engine, rank, layer, dispatcher) for _ in range(2)]
    assert dispatchers[0].moe_a2a._rounds.shared is dispatchers[-1].moe_a2a._rounds.shared
    return combined


@pytest.mark.parametrize("version", VERSIONS)
def test_own_dispatcher_runs_unmodified(version: str) -> None:
    root = upstream(version)
    with fresh_ranks(4) as ranks:
        for rank, combined in ranks.call(unmodified, root, version).items():
            for index, layer in enumerate(LAYERS):
                for rows in combined[2 * index : 2 * index + 2]:
                    assert same_bits(rows, layer.expected(rank)), (rank, layer)


def plugged_in(rank: Rank, root: Path, version: str) -> list[torch.Tensor]:
    """A body: putget's dispatcher under the name "flashinfer"; several runners and recipes."""
    engine = load(root, version)
    engine.capacity = engine.variable = 8
    importlib.import_module("sglang.srt.layers.moe.token_dispatcher.flashinfer")
    sglang.install()
    kind = engine.module().FlashinferDispatcher
    assert kind.__name__ == "PutgetDispatcher"
    assert issubclass(kind, engine.module().BaseDispatcher)
    combined = []
    for index, layer in enumerate(LAYERS):
        engine.runner = ("flashinfer_cutlass", "deep_gemm", "flashinfer_trtllm_routed", "triton")[index]
        dispatcher = engine.dispatcher(rank, layer)
        assert dispatcher.max_num_tokens == 8
        calls = engine.quantised
        combined.append(run_layer(engine, rank, layer, dispatcher, bypassed=index == 1))
        if layer.num_tokens[rank.rank] == 0:
            assert engine.quantised == calls  # no kernel for no rows
            received = dispatcher._batches[0].all_to_all.target_ranks
            assert received.shape[0] == 0  # and no dummy row
    return combined


@pytest.mark.parametrize("version", VERSIONS)
def test_dispatcher_of_putget(version: str) -> None:
    root = upstream(version)
    with fresh_ranks(4) as ranks:
        for rank, combined in ranks.call(plugged_in, root, version).items():
            for layer, rows in zip(LAYERS, combined, strict=True):
                assert same_bits(rows, layer.expected(rank)), (rank, layer)


def hooks_and_recipes(rank: Rank, root: Path) -> list[torch.Tensor]:
    """A body: SGLang's hooks around putget's dispatcher, and rows by an explicit recipe, which return in FP8."""
    engine = load(root, VERSIONS[1])
    layer = LAYERS[1]
    original = engine.module().FlashinferDispatcher
    kind = sglang.dispatcher_class(original, recipe="nvfp4", low_precision_combine=True)
    dispatcher = engine.dispatcher(rank, layer, kind)
    seen: list[str] = []
    dispatcher.register_pre_dispatch_hook(lambda *_: seen.append("dispatch"))
    dispatcher.register_post_combine_hook(lambda *_: seen.append("combine"))
    topk = prepare(engine, rank, layer, dispatcher)
    engine.recipe = "bf16"
    output = dispatcher.dispatch(hidden_states=layer.hidden(rank.rank), topk_output=topk)
    rows = run_experts(layer, output, rank)
    combined = [dispatcher.combine(combine_input=engine.module().FlashinferCombineInput(rows))]
    assert seen == ["dispatch", "combine"]
    assert output.output_dtype == torch.bfloat16
    return combined


def test_hooks_and_an_explicit_recipe() -> None:
    root = upstream(VERSIONS[1])
    with fresh_ranks(4) as ranks:
        for rank, combined in ranks.call(hooks_and_recipes, root).items():
            assert same_bits(combined[0], LAYERS[1].expected(rank, torch.float8_e4m3fn))


def mxfp8_rows(rank: Rank, root: Path) -> None:
    """A body: SGLang asks for MXFP8; every row and scale arrives as the quantiser gave it."""
    engine = load(root, VERSIONS[1])
    layer = LAYERS[0]
    dispatcher = engine.dispatcher(rank, layer, sglang.dispatcher_class(engine.module().FlashinferDispatcher))

    def quantised(src: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = layer.hidden(src).to(torch.float8_e4m3fn)
        return codes, torch.full((len(codes), layer.hidden_size // 32), src + 1, dtype=torch.uint8)

    def quantise(x: torch.Tensor, swizzled: bool) -> tuple[torch.Tensor, torch.Tensor]:
        assert not swizzled
        codes, scales = quantised(rank.rank)
        return codes, scales.flatten()

    sys.modules["flashinfer"].mxfp8_quantize = quantise  # type: ignore[attr-defined]
    topk = prepare(engine, rank, layer, dispatcher)
    engine.recipe = "mxfp8"
    dispatcher.set_quant_config({"use_mxfp8": True})
    output = dispatcher.dispatch(layer.hidden(rank.rank), topk)
    sent = [reference.Sent(*layer.routes(src), quantised(src)) for src in range(layer.ep_size)]
    table = reference.default_expert_to_rank(layer.num_experts, layer.ep_size)
    expected = reference.dispatch(sent, table, max_rows=layer.max_tokens_per_rank)[1][rank.rank]
    for rows, arrived in zip((output.hidden_states, output.hidden_states_scale), expected.payloads, strict=True):
        for src, count in enumerate(expected.num_tokens.tolist()):
            assert same_bits(rows.view(-1, layer.ep_size, rows.shape[-1])[:count, src], arrived[src, :count])
    dispatcher.release()


def test_mxfp8_rows() -> None:
    root = upstream(VERSIONS[1])
    with fresh_ranks(4) as ranks:
        ranks.call(mxfp8_rows, root)


def workspaces(rank: Rank, root: Path) -> list[tuple[int, int]]:
    """A body: capacity and symmetric bytes by the server arguments of the older version."""
    engine = load(root, VERSIONS[0])
    sglang.install()
    sizes = []
    arguments = {
        "chunked_prefill_size": 24,
        "max_prefill_tokens": 96,
        "cuda_graph_max_bs": 10,
        "max_running_requests": 50,
        "speculative_num_draft_tokens": None,
    }
    for variable, changes in (
        (0, {}),
        (0, {"chunked_prefill_size": -1}),
        (0, {"speculative_num_draft_tokens": 4}),
        (0, {"cuda_graph_max_bs": None}),
        (5, {}),
    ):
        engine.variable = variable
        engine.server_args = SimpleNamespace(**{**arguments, **changes})
        dispatcher = engine.dispatcher(rank, LAYERS[0])
        sizes.append((dispatcher.max_num_tokens, dispatcher._batches[0].shared.num_bytes))
    return sizes


def test_capacity_comes_from_the_server_arguments_and_counts_ranks_once() -> None:
    root = upstream(VERSIONS[0])
    with fresh_ranks(4) as ranks:
        for sizes in ranks.call(workspaces, root).values():
            assert [tokens for tokens, _ in sizes] == [24, 96, 40, 50, 5]
            rows = 2 * LAYERS[0].hidden_size
            for tokens, num_bytes in sizes:
                regions = 4 * tokens * (2 * rows + 400)  # three fifths of it, beside the flags
                assert 4 * tokens * 2 * rows <= num_bytes < regions * 5 // 3 + 65536


def refuse(rank: Rank, root: Path) -> list[str]:
    """A body: wrong input; the messages."""
    engine = load(root, VERSIONS[1], with_flashinfer=False)
    layer = Layer(num_tokens=(2, 2))
    kind = sglang.dispatcher_class(engine.module().FlashinferDispatcher)
    dispatcher = engine.dispatcher(rank, layer, kind)
    topk = prepare(engine, rank, layer, dispatcher)
    hidden = layer.hidden(rank.rank)
    messages = []

    def expect(error: type[Exception], call: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(error) as caught:
            call(*args, **options)
        messages.append(str(caught.value))

    combine_input = engine.module().FlashinferCombineInput
    rows = torch.zeros(4, layer.hidden_size, dtype=torch.bfloat16)
    expect(ProtocolMisuse, dispatcher.combine, combine_input(rows))
    expect(ValueError, dispatcher.dispatch, hidden, object())
    engine.tokens = [2, 1000]
    expect(ValueError, dispatcher.dispatch, hidden, topk)
    engine.tokens = [1, 1]
    expect(ValueError, dispatcher.dispatch, hidden, topk)
    engine.tokens = [2, 2]
    expect(ValueError, dispatcher.dispatch, hidden[:, :8].contiguous()[:1], topk)
    dispatcher.set_quant_config({"input_global_scale": 1.0})
    engine.recipe = "nvfp4"
    expect(BackendUnavailable, dispatcher.dispatch, hidden, topk)
    engine.recipe = "bf16"
    dispatcher.set_quant_config({})
    dispatcher.dispatch(hidden, topk)
    expect(ProtocolMisuse, dispatcher.dispatch, hidden, topk)
    expect(ValueError, dispatcher.combine, combine_input(rows[:3]))
    expect(ValueError, dispatcher.combine, SimpleNamespace(format="deepep_ll", hidden_states=rows))
    dispatcher.release()
    expect(ValueError, kind, torch.distributed.group.WORLD, 2)
    expect(ValueError, sglang.install, recipe="int8")
    return messages


def test_wrong_calls_name_what_is_wrong() -> None:
    root = upstream(VERSIONS[1])
    named = [
        "no dispatch of this layer",
        "topk_output is a object, expected one with topk_ids",
        "a rank sends 1000 tokens, the workspace is sized for 8: raise SGLANG_FLASHINFER_NUM_MAX",
        "hidden_states has 2 tokens, SGLang announced at most 1 a rank",
        "hidden_states has shape [1, 8], expected 2 rows",
        "fp4_quantize is not there: FlashInfer is not installed",
        "has not been combined yet",
        "combine_input.hidden_states has shape [3, 256], expected [4, 256]",
        "combine_input has format 'deepep_ll', supported are 'flashinfer' and 'standard'",
        "num_experts is None and hidden_size None, expected both",
        "recipe is 'int8', allowed are None, 'bf16'",
    ]
    with fresh_ranks(2) as ranks:
        for messages in ranks.call(refuse, root).values():
            assert len(messages) == len(named)
            for message, part in zip(messages, named, strict=True):
                assert part in message


@pytest.mark.parametrize("version", ["0.5.8", "1.0rc1", "1.0"])
def test_versions_that_are_not_known_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUTGET_ENGINES", "1")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    for call in (sglang.install, sglang.plugin):
        with pytest.raises(BackendUnavailable, match=f"version {version}; .*knows SGLang from 0.5.9 to before 1"):
            call()


@pytest.mark.parametrize("version", ["0.5.9", "0.5.9.post1", "0.5.23", "0.5.10rc0"])
def test_versions_that_are_known(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert sglang.require_sglang() == version


def test_an_engine_that_is_not_installed_is_named() -> None:
    with pytest.raises(BackendUnavailable, match="SGLang is not installed"):
        sglang.install()


@pytest.mark.parametrize("value", [None, "", "0"])
def test_an_installed_putget_changes_nothing(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PUTGET_ENGINES", raising=False)
    if value is not None:
        monkeypatch.setenv("PUTGET_ENGINES", value)
    sglang.plugin()  # there is no SGLang here: anything but nothing raises


def test_other_values_of_the_switch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUTGET_ENGINES", "yes")
    with pytest.raises(ValueError, match="PUTGET_ENGINES is 'yes', allowed are 0 and 1"):
        sglang.plugin()


def test_rows_that_no_runner_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="recipe is 'fp8', allowed are None, 'bf16', 'nvfp4' and 'mxfp8'"):
        sglang.install(recipe="fp8")
