"""The four-payload form: recipes, ragged ranks, workspace output, layers that share memory, and what is refused."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import putget
from putget.adapters import shared, tensorrt_llm
from putget.adapters.tensorrt_llm import FourPayloadAllToAll
from tests.adapters.conftest import RANKS, Place
from tests.adapters.layer import Layer, same_bits
from tests.harness import Rank, RankError, fresh_ranks, run_ranks

RAGGED = Layer(num_tokens=(3, 0, 8, 1))


def four_payload(rank: Rank, layer: Layer, **options: Any) -> FourPayloadAllToAll:
    return FourPayloadAllToAll(
        rank.comm,
        layer.num_experts,
        layer.top_k,
        layer.max_tokens_per_rank,
        hidden_size=layer.hidden_size,
        device=rank.device,
        **{"timeout_s": 20, "warmup_timeout_s": 20, **options},
    )


def test_arguments_are_those_of_the_published_class() -> None:
    theirs = [
        "mapping",
        "num_slots",
        "top_k",
        "max_num_tokens_per_rank",
        "payload_in_workspace",
        "hidden_size",
        "dtype",
        "num_experts",
        "use_low_precision_combine",
        "ep_group_health",
        "alltoall_watchdog_timeout_s",
        "alltoall_watchdog_poll_interval_s",
        "alltoall_watchdog_on_timeout",
    ]
    assert list(inspect.signature(FourPayloadAllToAll).parameters)[: len(theirs)] == theirs


def missing(rank: Rank) -> str:
    """A body: rank 1 does not come to the second round; the watchdog's time counts."""
    layer = replace(RAGGED, num_tokens=(2, 2))
    a2a = four_payload(rank, layer, alltoall_watchdog_timeout_s=0.3)
    run_layer(rank, a2a, layer, False, True)
    text = ""
    if rank.rank == 0:
        with pytest.raises(putget.PeerTimeout) as caught:
            run_layer(rank, a2a, layer, False, True)
        text = str(caught.value)
    rank.meet()
    shared.close_shared(rank.comm)
    return text


def test_a_missing_rank_is_named_after_the_watchdog_s_time() -> None:
    text, _ = run_ranks(2, missing)
    assert "0.3 s" in text


def run_layer(rank: Rank, a2a: FourPayloadAllToAll, layer: Layer, in_workspace: bool, counts: bool) -> torch.Tensor:
    """One round as an engine makes it; returns the combined rows."""
    ids, weights = (tensor.to(rank.device) for tensor in layer.routes(rank.rank))
    rows = [tensor.to(rank.device) for tensor in layer.rows(rank.rank)]
    x, x_sf = (*rows, None)[:2]
    got = a2a.dispatch(x, x_sf, ids, weights, all_rank_num_tokens=list(layer.num_tokens) if counts else None)
    most = max(*layer.num_tokens, 1) if counts else layer.max_tokens_per_rank
    assert all(t is None or (t.shape[0] == layer.ep_size * most and t.is_contiguous()) for t in got), got
    received = tuple(tensor for tensor in got[:2] if tensor is not None)
    assert [t.dtype for t in received] == [t.dtype for t in rows]
    output = layer.experts(received, got[2], got[3], rank.rank)
    if in_workspace:
        buffer = a2a.get_combine_payload_tensor_in_workspace(most, layer.hidden_size, torch.bfloat16)
        buffer.copy_(output)
        output = buffer
    return a2a.combine(output).cpu()


def play(rank: Rank, layers: list[Layer]) -> list[torch.Tensor]:
    """A body: all layers, one after the other, each twice and each time in another way."""
    objects = [four_payload(rank, layer) for layer in layers]
    results = []
    for in_workspace, counts in ((False, True), (True, False)):
        results += [run_layer(rank, a2a, x, in_workspace, counts) for a2a, x in zip(objects, layers, strict=True)]
    shared.close_shared(rank.comm)
    return results


def test_recipes_and_ragged_ranks(place: Place) -> None:
    layers = [replace(RAGGED, recipe=recipe, seed=seed) for seed, recipe in enumerate(("bf16", "fp8", "nvfp4"))]
    layers += [replace(RAGGED, num_tokens=(0, 0, 0, 0)), replace(RAGGED, num_tokens=(0, 0, 1, 0), no_expert=1.1)]
    layers = [place.fit(layer) for layer in layers]
    results = place.run(play, layers)
    for rank, combined in enumerate(results):
        for index, layer in enumerate([*layers, *layers]):
            assert same_bits(combined[index], layer.expected(rank)), (rank, layer)


def low_precision(rank: Rank, layers: list[Layer]) -> list[torch.Tensor]:
    """A body: rows that come back quantised, beside a layer whose rows do not."""
    kinds = [four_payload(rank, layer, use_low_precision_combine=low) for layer in layers for low in (True, False)]
    results = [run_layer(rank, kinds[2 * i + low], x, low == 0, True) for i, x in enumerate(layers) for low in (0, 1)]
    shared.close_shared(rank.comm)
    return results


def test_low_precision_combine(place: Place) -> None:
    layers = [place.fit(replace(RAGGED, recipe=recipe, seed=seed)) for seed, recipe in enumerate(("bf16", "fp8"))]
    for rank, combined in enumerate(place.run(low_precision, layers)):
        for index, layer in enumerate(layers):
            plain, low = layer.expected(rank), layer.expected(rank, torch.float8_e4m3fn)
            assert same_bits(combined[2 * index], low)
            assert same_bits(combined[2 * index + 1], plain)
            assert not len(plain) or not same_bits(low, plain)


def share_memory(rank: Rank) -> list[int]:
    """A body: where the rows of two layers of one size, and of a third of another, arrive."""
    layers = [RAGGED, RAGGED, replace(RAGGED, hidden_size=512)]
    places = []
    for layer in layers:
        a2a = four_payload(rank, layer)
        x, *_ = a2a.dispatch(*layer.rows(rank.rank), None, *layer.routes(rank.rank))
        places.append(x.data_ptr())
        a2a.reset_state()
    shared.close_shared(rank.comm)
    return places


def test_layers_of_one_size_share_a_workspace() -> None:
    for first, second, third in run_ranks(RANKS, share_memory):
        assert first == second != third


def refuse(rank: Rank) -> list[str]:
    """A body: wrong calls; each message, and a right round afterwards."""
    layer = replace(RAGGED, num_tokens=(2, 2))
    a2a = four_payload(rank, layer)
    ids, weights = layer.routes(rank.rank)
    (x,) = layer.rows(rank.rank)
    rows = torch.zeros(8, layer.hidden_size, dtype=torch.bfloat16)
    messages = []

    def expect(kind: type[Exception], call: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(kind) as caught:
            call(*args, **options)
        messages.append(str(caught.value))

    expect(putget.ProtocolMisuse, a2a.combine, rows)
    expect(ValueError, a2a.dispatch, x[:1], None, ids, weights)
    expect(ValueError, a2a.dispatch, x.T, None, ids, weights)
    expect(ValueError, a2a.dispatch, x, x[:, ::2], ids, weights)
    expect(ValueError, a2a.dispatch, x, None, None, weights)
    expect(ValueError, a2a.dispatch, x, None, ids[0], weights)
    expect(ValueError, a2a.dispatch, x, None, ids, weights, active_rank_mask=1)
    a2a.dispatch(x, None, ids, weights, [4, 4])
    expect(putget.ProtocolMisuse, a2a.dispatch, x, None, ids, weights)
    expect(ValueError, a2a.combine, rows[:7])
    expect(ValueError, a2a.combine, rows.view(4, 2, -1))
    expect(ValueError, a2a.combine, rows.float())
    expect(ValueError, a2a.combine, rows.T.contiguous().T)
    expect(ValueError, a2a.combine, rows, active_rank_mask=1)
    expect(ValueError, a2a.get_combine_payload_tensor_in_workspace, 8, layer.hidden_size, torch.bfloat16)
    other = four_payload(rank, layer)
    expect(putget.ProtocolMisuse, other.dispatch, x, None, ids, weights)
    a2a.reset_state()
    assert same_bits(run_layer(rank, other, layer, False, True), layer.expected(rank.rank))
    shared.close_shared(rank.comm)
    return messages


def test_wrong_calls_name_what_is_wrong_and_do_nothing() -> None:
    for messages in run_ranks(2, refuse):
        named = [
            "combine: no dispatch",
            "hidden_states has shape [1, 256], expected 2 rows",
            "hidden_states has shape [256, 2], expected 2 rows",
            "hidden_states_sf has strides",
            "token_selected_experts is None",
            "expert ids: expected a tensor [num_tokens, 3]",
            "active_rank_mask is not supported by dispatch",
            "has not been combined yet",
            "final_hidden_states has shape [7, 256], expected [8, 256] or [2, 4, 256]",
            "final_hidden_states has shape [4, 2, 256]",
            "final_hidden_states has dtype torch.float32, this layer combines torch.bfloat16",
            "final_hidden_states has strides",
            "active_rank_mask is not supported by combine",
            "asked for as 8 rows a rank of [256] bfloat16; the last dispatch gave 4",
            "another layer that shares this workspace",
        ]
        assert len(messages) == len(named)
        for message, part in zip(messages, named, strict=True):
            assert part in message


def payloads_differ(rank: Rank) -> str:
    """A body: rank 1 sends other rows than the rest."""
    layer = replace(RAGGED, num_tokens=(2, 2), recipe=("bf16", "fp8")[rank.rank])
    a2a = four_payload(rank, layer)
    rows = (*layer.rows(rank.rank), None)[:2]
    with pytest.raises(ValueError) as caught:
        a2a.dispatch(*rows, *layer.routes(rank.rank))
    shared.close_shared(rank.comm)
    return str(caught.value)


def test_ranks_that_send_other_rows_hear_about_it() -> None:
    for message in run_ranks(2, payloads_differ):
        assert "payloads differs between ranks" in message
        assert "[256] bfloat16" in message
        assert "[256] float8_e4m3fn" in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_experts": 9}, "num_experts is 9, expected None or 1 to num_slots, which is 8"),
        ({"num_experts": 0}, "num_experts is 0, expected None or 1 to num_slots, which is 8"),
        ({"use_low_precision_combine": True, "hidden_size": 72}, "output has 72 elements, expected a multiple of 16"),
        ({"ep_group_health": object()}, "ep_group_health is <object"),
        ({"alltoall_watchdog_on_timeout": print}, "alltoall_watchdog_on_timeout is <built-in function print>"),
        ({"dtype": torch.int32}, "allowed are bfloat16, float16 and float32"),
        ({"max_num_tokens_per_rank": 0}, "max_tokens_per_rank is 0"),
        ({"mapping": SimpleNamespace(moe_ep_size=2)}, "torch.distributed is not initialised"),
    ],
)
def test_constructor_refuses(changes: dict[str, Any], named: str) -> None:
    (comm,) = putget.Communicator.local(1)
    options = {"mapping": comm, "num_slots": 8, "top_k": 2, "max_num_tokens_per_rank": 4, "hidden_size": 64}
    with pytest.raises(ValueError) as caught:
        FourPayloadAllToAll(**{**options, "device": "cpu", **changes})
    assert named in str(caught.value)


def statistics(rank: Rank, layer: Layer) -> list[torch.Tensor | None]:
    """A body: numbers that travel with the rows, in one round of two."""
    a2a = four_payload(rank, layer, num_experts=5)
    assert a2a.enable_eplb
    told = []
    for mine in (None, torch.arange(5, dtype=torch.int32, device=rank.device) + 10 * rank.rank):
        ids, weights = (tensor.to(rank.device) for tensor in layer.routes(rank.rank))
        hidden = layer.hidden(rank.rank).to(rank.device)
        if mine is not None:
            for wrong in (mine[:4], mine.long()):
                with pytest.raises(
                    ValueError, match=r"eplb_local_stats is .* expected \[5\] torch.int32: num_experts is 5"
                ):
                    a2a.dispatch(hidden, None, ids, weights, eplb_local_stats=wrong)
        rows, *_ = a2a.dispatch(hidden, None, ids, weights, eplb_local_stats=mine)
        gathered = a2a.get_eplb_gathered_statistics()
        told.append(None if gathered is None else gathered.cpu().clone())
        a2a.combine(rows)
        assert a2a.get_eplb_gathered_statistics() is None
    with pytest.raises(ValueError, match="num_experts is None: this object was made without statistics"):
        four_payload(rank, layer).get_eplb_gathered_statistics()
    shared.close_shared(rank.comm)
    return told


def test_statistics_of_the_load_balancer_travel_with_the_rows(place: Place) -> None:
    expected = torch.arange(5, dtype=torch.int32) + 10 * torch.arange(place.size, dtype=torch.int32)[:, None]
    for told in place.run(statistics, place.fit(RAGGED)):
        assert told[0] is None
        assert torch.equal(told[1], expected)


_COMMUNICATION = "tensorrt_llm/_torch/modules/fused_moe/communication"
FAKE = {
    "tensorrt_llm/__init__.py": "",
    "tensorrt_llm/_torch/__init__.py": "",
    "tensorrt_llm/_torch/modules/__init__.py": "",
    "tensorrt_llm/_torch/modules/fused_moe/__init__.py": "",
    f"{_COMMUNICATION}/__init__.py": "from .factory import create_strategy\n",
    f"{_COMMUNICATION}/nvlink_one_sided.py": (
        "class NVLinkOneSided:\n"
        "    MAX_RANKS = 128\n"
        "    def __init__(self, mapping, num_slots, top_k, max_num_tokens_per_rank, payload_in_workspace=False,\n"
        "        hidden_size=None, dtype=None, num_experts=None, use_low_precision_combine=False,\n"
        "        ep_group_health=None, alltoall_watchdog_timeout_s=None, EXTRA\n"
        "        alltoall_watchdog_poll_interval_s=1.0):\n"
        "        raise RuntimeError('needs MNNVL')\n"
        "    def dispatch(self, hidden_states, hidden_states_sf, token_selected_slots, token_final_scales,\n"
        "        all_rank_num_tokens, use_dp_padding=None, **kwargs): ...\n"
        "    def combine(self, final_hidden_states, **kwargs): ...\n"
    ),
    f"{_COMMUNICATION}/factory.py": (
        "from .nvlink_one_sided import NVLinkOneSided\n"
        "def create_strategy(mapping, num_slots, top_k, max_num_tokens, hidden_size, dtype, num_experts=None):\n"
        "    made = NVLinkOneSided(mapping, num_slots, top_k, max_num_tokens, False, hidden_size=hidden_size,\n"
        "        dtype=dtype, num_experts=num_experts, use_low_precision_combine=False, ep_group_health=None,\n"
        "        alltoall_watchdog_timeout_s=20.0, alltoall_watchdog_poll_interval_s=0.1)\n"
        "    assert isinstance(made, NVLinkOneSided)\n"
        "    return made\n"
    ),
}


def from_the_factory(
    rank: Rank, layer: Layer, folder: Path, engine_first: bool, extra: str
) -> tuple[torch.Tensor, str, list[str]]:
    """A body: what the engine's factory makes, a round of it, and what it refuses; what the engine's log says."""
    folder = folder / str(rank.rank)  # each rank has its own: nobody waits for another one's files
    for name, text in FAKE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("EXTRA", extra))
    sys.path.insert(0, str(folder))
    package = _COMMUNICATION.replace("/", ".")
    if engine_first:
        importlib.import_module(package)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tensorrt_llm.putget")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    tensorrt_llm.install(lambda mapping: mapping.comm)
    create = importlib.import_module(package).create_strategy
    mapping = SimpleNamespace(moe_ep_size=rank.size, comm=rank.comm)
    sizes = (layer.num_experts, layer.top_k, layer.max_tokens_per_rank, layer.hidden_size, torch.bfloat16)
    with pytest.raises(ValueError) as caught:
        create(mapping, *sizes, num_experts=6)
    made = [create(mapping, *sizes) for _ in range(2)]
    assert made[0].MAX_RANKS == 128
    assert made[0].mapping is mapping
    combined = run_layer(rank, made[1], layer, True, True)
    shared.close_shared(rank.comm)
    return combined, str(caught.value), said


@pytest.mark.parametrize("engine_first", [False, True])
def test_install_puts_it_where_the_factory_looks(tmp_path: Path, engine_first: bool) -> None:
    layer = Layer(num_tokens=(3, 2), num_experts=5, owners=(0, 0, 0, 1, 1))
    with fresh_ranks(2) as ranks:
        for rank, (combined, refused, said) in ranks.call(from_the_factory, layer, tmp_path, engine_first, "").items():
            assert same_bits(combined, layer.expected(rank))
            assert "num_experts is 6, expected None or 1 to num_slots" in refused
            assert len(said) == 1
            assert "carries dispatch and combine of the mixture-of-experts layers: 5 experts on 2 ranks" in said[0]


def test_install_names_arguments_that_it_does_not_know(tmp_path: Path) -> None:
    layer = Layer(num_tokens=(1,))
    named = "NVLinkOneSided.__init__ of this version takes compression, which putget does not know"
    with fresh_ranks(1) as ranks, pytest.raises(RankError, match=named):
        ranks.call(from_the_factory, layer, tmp_path, True, "compression=None,")
