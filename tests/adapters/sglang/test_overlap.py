"""SGLang's two-batch overlap: halves of two batches in turns, as its plans order them.

tests/engines runs it in SGLang itself.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from putget import ProtocolMisuse
from putget.adapters import sglang
from putget.adapters.sglang import overlap
from tests.adapters.layer import Layer, same_bits
from tests.adapters.packages import stand_in
from tests.adapters.sglang.engine import VERSIONS, Engine, StandardTopK, load
from tests.adapters.upstream import upstream
from tests.harness import Rank, fresh_ranks

# The two batches of two forwards: a rank has no request at all, another has none in the first batch.
FORWARDS = [
    (Layer(num_tokens=(3, 0, 5, 0), seed=21), Layer(num_tokens=(2, 0, 3, 1), seed=22)),
    (Layer(num_tokens=(1, 0, 2, 0), seed=23), Layer(num_tokens=(2, 0, 2, 1), seed=24)),
]


class TboForwardBatchPreparer:
    """SGLang's, as far as it is looked at."""

    @classmethod
    def prepare_raw(cls, batch: Any, tbo_children_num_token_non_padded: Any) -> Any:
        return cls, batch, tbo_children_num_token_non_padded


def forward_batch(counts: list[int] | None, mode: str = "extend", **changes: Any) -> SimpleNamespace:
    """SGLang's knowledge of a forward before it splits it."""
    values = {
        "global_num_tokens_cpu": counts,
        "global_num_tokens_padded_cpu": None,
        "original_global_num_tokens_cpu": None,
        "global_forward_mode": SimpleNamespace(is_decode=lambda: mode == "decode"),
    }
    return SimpleNamespace(**{**values, **changes})


def set_overlap(enabled: bool) -> None:
    """--enable-two-batch-overlap."""
    importlib.import_module("sglang.srt.layers.moe.utils").__dict__["is_tbo_enabled"] = lambda: enabled


def overlapping(root: Path) -> Engine:
    """An engine with two-batch overlap."""
    engine = load(root, VERSIONS[1], with_flashinfer=False)
    set_overlap(True)
    stand_in("sglang.srt.batch_overlap")
    module = stand_in(overlap.MODULE, TboForwardBatchPreparer=TboForwardBatchPreparer)
    overlap.watch_splits()
    overlap.watch_splits()  # once is enough
    assert module.TboForwardBatchPreparer.prepare_raw(forward_batch([1]), 2)[2] == 2
    return engine


def dispatcher_of(engine: Engine, rank: Rank, layer: Layer) -> Any:
    kind = sglang.dispatcher_class(engine.module().FlashinferDispatcher)
    dispatcher = engine.dispatcher(rank, layer, kind, params_dtype=torch.bfloat16)
    dispatcher.set_quant_config({})
    return dispatcher


def overlapped(rank: Rank, root: Path) -> list[torch.Tensor]:
    """A body: the order of SGLang's plan for decoding; a batch without a request is filled up."""
    engine = overlapping(root)
    dispatcher = dispatcher_of(engine, rank, FORWARDS[0][0])
    combined = []
    for layers in FORWARDS:
        counts = [first + second for first, second in zip(*(layer.num_tokens for layer in layers), strict=True)]
        TboForwardBatchPreparer.prepare_raw(forward_batch(counts), None)
        most = max(counts)

        def send(index: int, layer: Layer) -> None:
            ids, weights = layer.routes(rank.rank)
            hidden = layer.hidden(rank.rank)
            if rank.rank == 1:
                hidden = hidden.new_ones(2, layer.hidden_size)  # no request, no choice of experts
            topk = StandardTopK(weights, ids, torch.zeros(len(ids), layer.num_experts))
            dispatcher.dispatch_a(hidden_states=hidden, topk_output=topk, tbo_subbatch_index=index)

        def compute(index: int, layer: Layer) -> None:
            output = dispatcher.dispatch_b(tbo_subbatch_index=index)
            assert len(output.hidden_states) == 4 * most  # noqa: B023
            ids = output.topk_output.topk_ids
            ids = torch.where(ids == layer.num_experts, -1, ids)
            rows = layer.experts((output.hidden_states,), ids, output.topk_output.topk_weights, rank.rank)
            given = SimpleNamespace(format="flashinfer", hidden_states=output.moe_output.copy_(rows))
            dispatcher.combine_a(combine_input=given, tbo_subbatch_index=index)

        first, second = layers
        send(0, first)
        send(1, second)
        compute(0, first)
        compute(1, second)
        combined += [dispatcher.combine_b(tbo_subbatch_index=index) for index in (0, 1)]
    return combined


def test_halves_of_two_batches_in_turns() -> None:
    root = upstream(VERSIONS[1])
    layers = [layer for pair in FORWARDS for layer in pair]
    with fresh_ranks(4) as ranks:
        for rank, combined in ranks.call(overlapped, root).items():
            for layer, rows in zip(layers, combined, strict=True):
                if rank == 1:
                    assert not rows.any()
                    assert rows.shape == (2, layer.hidden_size)
                else:
                    assert same_bits(rows, layer.expected(rank)), (rank, layer)


@pytest.mark.parametrize(
    ("batch", "most"),
    [
        (forward_batch([6, 0, 11]), 11),
        (forward_batch([6, 6], global_num_tokens_padded_cpu=[8, 8]), 8),
        (forward_batch(None), None),
        (forward_batch([7, 5], global_forward_mode=None), 7),
        # Requests are halved: 4 and 3 of seven. A rank with 5, filled up to 7, has 2 and 5.
        (forward_batch([7, 7], mode="decode"), 4),
        (forward_batch([7, 7], mode="decode", original_global_num_tokens_cpu=[7, 5]), 5),
        (forward_batch([7, 7], mode="decode", original_global_num_tokens_cpu=[7, 0]), 7),
    ],
)
def test_the_most_tokens_of_one_batch(batch: Any, most: int | None) -> None:
    assert overlap._most_of(batch) == most


def refuse(rank: Rank, root: Path) -> list[str]:
    """A body: wrong calls; the messages."""
    engine = overlapping(root)
    layer = Layer(num_tokens=(2, 2))
    dispatcher = dispatcher_of(engine, rank, layer)
    ids, weights = layer.routes(rank.rank)
    topk = StandardTopK(weights, ids, torch.zeros(len(ids), layer.num_experts))
    given = (layer.hidden(rank.rank), topk)
    messages = []

    def expect(error: type[Exception], call: Any, *args: Any) -> None:
        with pytest.raises(error) as caught:
            call(*args)
        messages.append(str(caught.value))

    expect(ValueError, dispatcher.dispatch_a, *given, 2)
    expect(ValueError, dispatcher.dispatch_a, *given, -1)
    expect(ProtocolMisuse, dispatcher.dispatch_b, 1)
    TboForwardBatchPreparer.prepare_raw(forward_batch([1, 1]), None)
    expect(ValueError, dispatcher.dispatch_a, *given, 1)
    TboForwardBatchPreparer.prepare_raw(
        forward_batch(None), None
    )  # nothing is known: slots for as many as there may be
    dispatcher.dispatch_a(*given, 1)
    expect(ProtocolMisuse, dispatcher.dispatch_a, *given, 1)
    expect(ProtocolMisuse, dispatcher.dispatch_b, 0)
    dispatcher.release()  # also between the halves
    assert len(dispatcher.dispatch(*given, 1).hidden_states) == 2 * dispatcher.max_num_tokens
    dispatcher.release()
    set_overlap(False)
    expect(ValueError, dispatcher_of(engine, rank, layer).dispatch_a, *given, 1)
    return messages


def test_wrong_calls_name_what_is_wrong() -> None:
    root = upstream(VERSIONS[1])
    named = [
        "tbo_subbatch_index is 2, allowed are 0 to 1",
        "tbo_subbatch_index is -1, allowed are 0 to 1",
        "dispatch_b of batch 1: no dispatch_a came before it",
        "hidden_states has 2 tokens, SGLang announced at most 1 a rank",
        "has not been combined yet",
        "dispatch_b of batch 0: no dispatch_a came before it",
        "tbo_subbatch_index is 1, allowed are 0 to 0: two batches overlap with --enable-two-batch-overlap",
    ]
    with fresh_ranks(2) as ranks:
        for messages in ranks.call(refuse, root).values():
            assert len(messages) == len(named)
            for message, part in zip(messages, named, strict=True):
                assert part in message
