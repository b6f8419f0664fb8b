"""vLLM's dual-batch overlap: its own threads and its own modular kernel, with the rounds of two batches in turns."""

from __future__ import annotations

import contextlib
import importlib
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from putget import ProtocolMisuse
from putget.adapters import vllm
from tests.adapters.layer import Layer, same_bits
from tests.adapters.upstream import upstream
from tests.adapters.vllm.engine import Engine, experts_of, load
from tests.harness import Rank, fresh_ranks

BACKEND = "allgather_reducescatter"
# The two batches of three forwards: of unequal sizes, and without a token on some ranks.
FORWARDS = [
    (Layer(num_tokens=(3, 0, 8, 1), seed=31), Layer(num_tokens=(2, 5, 0, 1), seed=32)),
    (Layer(num_tokens=(0, 1, 0, 0), seed=33), Layer(num_tokens=(8, 8, 8, 8), seed=34)),
    (Layer(num_tokens=(3, 0, 8, 1), seed=31), Layer(num_tokens=(2, 5, 0, 1), seed=32)),
]


def overlapping(root: Path, layer: Layer = FORWARDS[0][0]) -> tuple[Engine, Any]:
    """An engine with dual-batch overlap, and the prepare-and-finalize that it makes."""
    engine = load(root, layer)
    engine.config.parallel_config = SimpleNamespace(nnodes=1, use_ubatching=True, num_ubatches=2)
    vllm.use()
    return engine, engine.make(layer, BACKEND)


def run_layer(engine: Engine, rank: Rank, layer: Layer, prepare_finalize: Any) -> torch.Tensor:
    """A layer through vLLM's FusedMoEKernel."""
    kernel = engine.kernel.FusedMoEKernel(prepare_finalize, experts_of(engine, rank, layer, True, None))
    ids, weights = layer.routes(rank.rank)
    w1 = torch.zeros(layer.num_experts // layer.ep_size, 1, layer.hidden_size)
    rows: torch.Tensor = kernel.impl.apply(
        layer.hidden(rank.rank),
        w1,
        w1,
        ids,
        weights,
        global_num_experts=layer.num_experts,
        expert_map=layer.expert_map(rank.rank),
    )
    return rows


def contexts_of(engine: Engine, layers: tuple[Layer, Layer]) -> list[Any]:
    """vLLM's contexts of two batches, as its make_ubatch_contexts gives them."""
    module = importlib.import_module("vllm.v1.worker.ubatching")
    module._CURRENT_CONTEXTS[:] = [None, None]
    events = [threading.Event() for _ in layers]
    ready = threading.Barrier(len(layers) + 1)

    def of(index: int, layer: Layer) -> Any:
        sizes = SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda: list(layer.num_tokens))
        return module.UBatchContext(
            id=index,
            comm_stream=engine.stream,
            compute_stream=engine.stream,
            forward_context=SimpleNamespace(dp_metadata=sizes),
            ready_barrier=ready,
            cpu_wait_event=events[index],
            cpu_signal_event=events[1 - index],
            gpu_comm_done_event=None,
            gpu_compute_done_event=None,
        )

    return [of(index, layer) for index, layer in enumerate(layers)]


def overlapped(rank: Rank, root: Path) -> tuple[list[torch.Tensor], list[str]]:
    """A body: each forward in vLLM's two threads; the outputs, and the halves in the order of their calls."""
    engine, prepare_finalize = overlapping(root)
    assert prepare_finalize.supports_async()
    halves: list[str] = []
    outputs: list[torch.Tensor] = []
    for layers in FORWARDS:
        contexts = contexts_of(engine, layers)
        found: dict[int, torch.Tensor] = {}

        def work(index: int, context: Any, layer: Layer) -> None:
            with context:
                found[index] = run_layer(engine, rank, layer, prepare_finalize)  # noqa: B023

        threads = [
            threading.Thread(target=work, args=(index, context, layer))
            for index, (context, layer) in enumerate(zip(contexts, layers, strict=True))
        ]
        with calls(prepare_finalize, halves):
            for thread in threads:
                thread.start()
            contexts[0].ready_barrier.wait()
            contexts[0].cpu_wait_event.set()
            for thread in threads:
                thread.join()
        module = importlib.import_module("vllm.forward_context")
        module._forward_context = None  # type: ignore[attr-defined]
        outputs += [found[0], found[1]]
    return outputs, halves


@contextlib.contextmanager
def calls(prepare_finalize: Any, halves: list[str]) -> Any:
    """Notes the halves of both batches."""
    undo = []
    for index, rounds in enumerate(prepare_finalize._batches):
        for name in ("dispatch_start", "dispatch_finish", "combine_start", "combine_finish"):
            original = getattr(rounds, name)

            def noted(*args: Any, _call: Any = original, _said: str = f"{name} {index}", **options: Any) -> Any:
                halves.append(_said)
                return _call(*args, **options)

            setattr(rounds, name, noted)
            undo.append((rounds, name))
    yield
    for rounds, name in undo:
        delattr(rounds, name)


def test_in_the_modular_kernel() -> None:
    root = upstream("vllm")
    layers = [layer for pair in FORWARDS for layer in pair]
    with fresh_ranks(4) as ranks:
        for rank, (outputs, halves) in ranks.call(overlapped, root).items():
            for layer, rows in zip(layers, outputs, strict=True):
                assert same_bits(rows, layer.expected(rank)), (rank, layer)
            one = halves[:8]
            assert halves == one * len(FORWARDS)
            # The first batch's rows have left when the second one dispatches, and so for the rows that come back.
            assert one.index("dispatch_start 0") < one.index("dispatch_start 1") < one.index("combine_start 0")
            assert one.index("combine_start 0") < one.index("dispatch_finish 1") < one.index("combine_finish 0")


def alone(rank: Rank, root: Path) -> list[torch.Tensor]:
    """A body: a forward that vLLM does not split runs the halves of the first batch, one after the other."""
    engine, prepare_finalize = overlapping(root)
    outputs = []
    for layers in FORWARDS:
        engine.tokens = list(layers[0].num_tokens)
        outputs.append(run_layer(engine, rank, layers[0], prepare_finalize))
    engine.config.parallel_config = SimpleNamespace(nnodes=1, use_ubatching=False, num_ubatches=1)
    assert not engine.make(FORWARDS[0][0], BACKEND).supports_async()
    return outputs


def test_a_forward_that_is_not_split() -> None:
    with fresh_ranks(4) as ranks:
        for rank, outputs in ranks.call(alone, upstream("vllm")).items():
            for layers, rows in zip(FORWARDS, outputs, strict=True):
                assert same_bits(rows, layers[0].expected(rank)), (rank, layers[0])


def misuse(rank: Rank, root: Path) -> None:
    """A body: halves twice, without the other, or in a batch that there is not."""
    layer = Layer(num_tokens=(2, 2))
    engine, mine = overlapping(root, layer)
    engine.tokens = list(layer.num_tokens)
    ids, weights = layer.routes(rank.rank)
    hidden = layer.hidden(rank.rank)
    arguments = (hidden, weights, ids, layer.num_experts, layer.expert_map(rank.rank), False)
    plain, reduced = SimpleNamespace(quant_dtype=None), engine.reductions.TopKWeightAndReduceNoOP()
    out = torch.empty_like(hidden)
    with pytest.raises(ProtocolMisuse, match="finalize: no dispatch of this layer"):
        mine.finalize_async(out, hidden, weights, ids, False, reduced)
    hook, receiver = mine.prepare_async(*arguments, plain)
    with pytest.raises(ProtocolMisuse, match="has not been combined yet"):
        mine.prepare_async(*arguments, plain)
    hook()
    hook()  # once is enough
    rows, scales, nothing, here, weights_here = receiver()
    assert scales is None
    assert nothing is None
    with pytest.raises(ValueError, match=r"fused_expert_output has shape \[2, 256\], expected \[4, 256\]"):
        mine.finalize_async(out, hidden, weights, ids, False, reduced)
    given = layer.experts((rows,), here, weights_here, rank.rank)
    _, receiver = mine.finalize_async(out, given, weights_here, here, False, reduced)
    receiver()  # without its hook
    assert same_bits(out, layer.expected(rank.rank))
    ubatching = importlib.import_module("vllm.v1.worker.ubatching")
    ubatching.dbo_current_ubatch_id = lambda: 2  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="vLLM is in batch 2 of a forward, this object is for 2"):
        mine.prepare_async(*arguments, plain)


def test_wrong_calls_name_what_is_wrong() -> None:
    with fresh_ranks(2) as ranks:
        ranks.call(misuse, upstream("vllm"))


class VllmConfig:
    """vLLM's, with its check of who may overlap."""

    def __init__(self, backend: str, use_ubatching: bool) -> None:
        self.parallel_config = SimpleNamespace(all2all_backend=backend, use_ubatching=use_ubatching)
        self.__post_init__()

    def __post_init__(self) -> None:
        allowed = ("deepep_low_latency", "deepep_high_throughput", "nixl_ep")
        parallel = self.parallel_config
        assert not parallel.use_ubatching or parallel.all2all_backend in allowed, parallel.all2all_backend


def test_vllm_takes_overlap_with_its_default_backend() -> None:
    kind = type("VllmConfig", (VllmConfig,), {})
    module = ModuleType(vllm.ENGINE_CONFIG_MODULE)
    module.VllmConfig = kind  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match=BACKEND):
        kind(BACKEND, True)
    for _ in range(2):
        vllm.allow_overlap(module)
    assert kind(BACKEND, True).parallel_config.all2all_backend == BACKEND
    assert kind("deepep_low_latency", True).parallel_config.all2all_backend == "deepep_low_latency"
    assert kind(BACKEND, False).parallel_config.all2all_backend == BACKEND
    with pytest.raises(AssertionError, match="naive"):
        kind("naive", True)
