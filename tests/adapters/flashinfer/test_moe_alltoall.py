"""MoeAlltoAll with FlashInfer's arguments: as engines call it, with ranks that differ, and what is refused."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import putget
from putget import reference
from putget.adapters import flashinfer, shared
from putget.adapters.flashinfer import MoeAlltoAll, moe_a2a_get_workspace_size_per_rank
from putget.adapters.flashinfer.layout import moe_a2a_active_rank_mask, symmetric_bytes
from tests.adapters.conftest import Place
from tests.adapters.layer import Layer, same_bits
from tests.adapters.packages import shell
from tests.adapters.upstream import upstream
from tests.harness import Rank, RankError, fresh_ranks, run_ranks

RAGGED = Layer(num_tokens=(3, 0, 8, 1))


def mapping_of(rank: Rank) -> SimpleNamespace:
    return SimpleNamespace(moe_ep_size=rank.size, moe_ep_rank=rank.rank)


def alltoall(rank: Rank, layer: Layer, **options: Any) -> MoeAlltoAll:
    defaults: dict[str, Any] = {
        "mapping": mapping_of(rank),
        "max_num_tokens": layer.max_tokens_per_rank,
        "top_k": layer.top_k,
        "num_experts": layer.num_experts,
        "workspace_size_per_rank": moe_a2a_get_workspace_size_per_rank(
            rank.size, layer.max_tokens_per_rank, 2 * layer.hidden_size + 8 * layer.top_k, 2 * layer.hidden_size
        ),
        "device": rank.device,
        "timeout_s": 20.0,
        "warmup_timeout_s": 20.0,
    }
    return MoeAlltoAll(**{**defaults, **options})


def run_layer(rank: Rank, a2a: MoeAlltoAll, layer: Layer, runtime_max: int, in_workspace: bool) -> torch.Tensor:
    """One round in the way of TensorRT-LLM and SGLang: rows, ids and weights are payloads."""
    ids, weights = (tensor.to(rank.device) for tensor in layer.routes(rank.rank))
    rows = [tensor.to(rank.device) for tensor in layer.rows(rank.rank)]
    invalid = layer.num_experts if in_workspace else None
    got = a2a.dispatch(ids, [*rows, ids, weights], runtime_max, invalid, len(rows))
    assert [tuple(t.shape[:2]) for t in got] == [(layer.ep_size, runtime_max)] * len(got)
    flat = [tensor.view(-1, tensor.shape[-1]) for tensor in got]  # engines do just this
    seen_ids, seen_weights = flat[-2:]
    if invalid is not None:
        assert not (seen_ids == -1).all(1).any()
        seen_ids = torch.where(seen_ids == invalid, -1, seen_ids)
    output = layer.experts(tuple(flat[:-2]), seen_ids, seen_weights, rank.rank)
    if in_workspace:
        buffer = a2a.get_combine_payload_tensor_in_workspace(runtime_max, layer.hidden_size, torch.bfloat16)
        buffer.view(-1, layer.hidden_size).copy_(output)
        output = buffer
    output = output.view(layer.ep_size, runtime_max, -1)
    low = a2a.use_low_precision_combine
    return a2a.combine(output, runtime_max, payload_in_workspace=in_workspace, use_low_precision=low).cpu()


def play(rank: Rank, layers: list[Layer]) -> list[torch.Tensor]:
    """A body: every layer with a runtime maximum of this rank's own, then with the largest."""
    objects = [alltoall(rank, layer, by_source=index % 3 > 0) for index, layer in enumerate(layers)]
    results = []
    for index, layer in enumerate(layers):
        own_max = min(max(1, *layer.num_tokens) + rank.rank, layer.max_tokens_per_rank)
        results.append(run_layer(rank, objects[index], layer, own_max, index % 2 == 1))
        results.append(run_layer(rank, objects[index], layer, layer.max_tokens_per_rank, index % 2 == 0))
    shared.close_shared(rank.comm)
    return results


def test_recipes_and_runtime_maxima_that_differ(place: Place) -> None:
    layers = [replace(RAGGED, recipe=recipe, seed=seed) for seed, recipe in enumerate(("bf16", "fp8", "nvfp4"))]
    layers += [replace(RAGGED, num_tokens=(0, 0, 0, 1)), replace(RAGGED, num_tokens=(4, 4, 4, 4), no_expert=0.9)]
    layers = [place.fit(layer) for layer in layers]
    for rank, combined in enumerate(place.run(play, layers)):
        for index, layer in enumerate(layers):
            expected = layer.expected(rank)
            assert same_bits(combined[2 * index], expected), (rank, layer)
            assert same_bits(combined[2 * index + 1], expected), (rank, layer)


def ids_of_payloads(rank: Rank, layer: Layer) -> list[bool]:
    """A body: expert ids that are the routes themselves, and ids that travel as a payload, in turns."""
    ids, weights = (tensor.to(rank.device) for tensor in layer.routes(rank.rank))
    rows = [tensor.to(rank.device) for tensor in layer.rows(rank.rank)]
    back = torch.zeros(layer.ep_size, layer.max_tokens_per_rank, layer.hidden_size, dtype=torch.bfloat16)
    alike = []
    for by_source in (False, True):
        ways = [alltoall(rank, layer, by_source=by_source, ids_are_routes=way) for way in (True, False)]
        for invalid in (None, -1, 3, layer.num_experts):
            found = []
            for a2a in ways:
                got = a2a.dispatch(ids, [*rows, ids, weights], layer.max_tokens_per_rank, invalid, len(rows))
                found.append(got[len(rows)].clone())
                assert a2a.received is not None
                assert len(a2a.received.payloads) - len(rows) == (a2a is ways[1])
                a2a.combine(back.to(rank.device), layer.max_tokens_per_rank)
            alike.append(torch.equal(*found))
        with pytest.raises(ValueError, match=r"input_payloads\[1\] is another tensor than token_selected_experts"):
            ways[0].dispatch(ids, [*rows, ids.clone(), weights], layer.max_tokens_per_rank, None, len(rows))
    shared.close_shared(rank.comm)
    return alike


def test_ids_by_which_dispatch_routes_travel_once(place: Place) -> None:
    layer = place.fit(replace(RAGGED, recipe="bf16", no_expert=0.3))
    assert place.run(ids_of_payloads, layer) == [[True] * 8] * layer.ep_size


def low_precision(rank: Rank, layer: Layer) -> list[torch.Tensor]:
    """A body: rows that come back quantised; by the constructor, and by what install was told."""
    results = []
    for by_argument in (True, False):
        low = True if by_argument else None
        MoeAlltoAll.use_low_precision_combine = not by_argument
        size = moe_a2a_get_workspace_size_per_rank(
            rank.size, 8, 2 * layer.hidden_size + 8 * layer.top_k, 2 * layer.hidden_size
        )
        for options in ({"workspace_size_per_rank": size}, {"workspace_size_per_rank": None, "hidden_size": 256}):
            a2a = alltoall(rank, layer, use_low_precision_combine=low, **options)
            results.append(run_layer(rank, a2a, layer, 8, by_argument))
    MoeAlltoAll.use_low_precision_combine = False
    shared.close_shared(rank.comm)
    return results


def test_low_precision_combine(place: Place) -> None:
    layer = place.fit(RAGGED)
    for rank, combined in enumerate(place.run(low_precision, layer)):
        assert len(combined) == 4
        for rows in combined:
            assert same_bits(rows, layer.expected(rank, torch.float8_e4m3fn))


def opaque_payloads(rank: Rank, by_source: bool) -> None:
    """A body: payloads of other kinds, in another order, ids that no index names; where each row lies."""
    layer = RAGGED
    a2a = alltoall(rank, layer, hidden_size=16, by_source=by_source)
    sent = []
    for src in range(layer.ep_size):
        ids, weights = layer.routes(src)
        codes = torch.arange(ids.shape[0] * 5, dtype=torch.int16).view(-1, 5) + 1000 * src
        bits = (codes[:, :3] % 2).to(torch.bool)
        sent.append(reference.Sent(ids, weights, (codes[:, :1].double(), weights * 2, ids + 7, codes, bits)))
    table = reference.default_expert_to_rank(layer.num_experts, layer.ep_size)
    _, arrived = reference.dispatch(sent, table, max_rows=layer.max_tokens_per_rank)
    mine = sent[rank.rank]
    got = a2a.dispatch(mine.topk_ids, list(mine.payloads), layer.max_tokens_per_rank)
    received = a2a.received
    assert received is not None
    expected = arrived[rank.rank]
    for tensor, rows in zip(got, expected.payloads, strict=True):
        flat = tensor.view(-1, tensor.shape[-1])
        for src, count in enumerate(expected.num_tokens.tolist()):
            for slot in range(count):
                row = tensor[src, slot] if by_source else flat[slot * layer.ep_size + src]
                assert torch.equal(row, rows[src, slot])
            assert not by_source or not tensor[src, count:].any()
    assert torch.equal(received.topk_ids, expected.topk_ids)
    a2a.release()
    shared.close_shared(rank.comm)


@pytest.mark.parametrize("by_source", [True, False])
def test_payloads_are_opaque(by_source: bool) -> None:
    run_ranks(4, opaque_payloads, by_source)


def dummy_row(rank: Rank) -> list[int]:
    """A body: rank 1 has no token and routes a dummy row to itself whose payload of ids says "no expert"."""
    layer = replace(RAGGED, num_tokens=(2, 1))
    a2a = alltoall(rank, layer)
    ids, weights = layer.routes(rank.rank)
    (x,) = layer.rows(rank.rank)
    routing = ids
    if rank.rank == 1:
        routing, ids, weights = torch.full_like(ids, 4), torch.full_like(ids, -1), torch.zeros_like(weights)
    *_, seen, _ = a2a.dispatch(routing, [x, ids, weights], 4, expert_id_payload_index=1)
    received = a2a.received
    assert received is not None
    counts = received.num_tokens.tolist()
    combined = a2a.combine(torch.full((2, 4, layer.hidden_size), 3.0, dtype=torch.bfloat16), 4)
    assert rank.rank == 0 or (combined == 3).all()
    assert (seen[1] == -1).all()
    assert not (seen[0, : counts[0]] == -1).all(1).any()
    shared.close_shared(rank.comm)
    return counts


def test_rows_go_where_token_selected_experts_says() -> None:
    counts = run_ranks(2, dummy_row)
    assert [count[1] for count in counts] == [0, 1]


def refuse(rank: Rank) -> list[str]:
    """A body: wrong calls; then a right round."""
    layer = replace(RAGGED, num_tokens=(2, 2))
    a2a = alltoall(rank, layer)
    ids, weights = layer.routes(rank.rank)
    (x,) = layer.rows(rank.rank)
    good = [x, ids, weights]
    rows = torch.zeros(2, 4, layer.hidden_size, dtype=torch.bfloat16)
    messages = []

    def expect(kind: type[Exception], call: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(kind) as caught:
            call(*args, **options)
        messages.append(str(caught.value))

    expect(putget.ProtocolMisuse, a2a.combine, rows, 4)
    expect(putget.ProtocolMisuse, a2a.get_combine_payload_tensor_in_workspace, 4, layer.hidden_size, torch.bfloat16)
    expect(ValueError, a2a.dispatch, ids, good, 9)
    expect(ValueError, a2a.dispatch, ids, good, 0)
    expect(ValueError, a2a.dispatch, ids, good, 4, 8)
    expect(ValueError, a2a.dispatch, ids, good, 4, 8, 3)
    expect(ValueError, a2a.dispatch, ids.long(), good, 4)
    expect(ValueError, a2a.dispatch, ids, good, 4, None, 2)
    expect(ValueError, a2a.dispatch, ids, [x[:1], ids, weights], 4, None, 1)
    expect(ValueError, a2a.dispatch, ids, good, 4, eplb_local_stats=ids)
    expect(ValueError, a2a.dispatch, ids, good, 4, active_rank_mask=moe_a2a_active_rank_mask([0, 1], 2))
    a2a.dispatch(ids, good, 4, None, 1)
    expect(putget.ProtocolMisuse, a2a.dispatch, ids, good, 4, None, 1)
    expect(ValueError, a2a.combine, rows, 3)
    expect(ValueError, a2a.combine, rows[:, :3], 4)
    expect(ValueError, a2a.combine, rows.int(), 4)
    expect(ValueError, a2a.combine, rows, 4, output=torch.empty(2, 128, dtype=torch.bfloat16))
    expect(ValueError, a2a.combine, rows, 4, output=torch.empty(256, 2, dtype=torch.bfloat16).T)
    expect(ValueError, a2a.combine, rows, 4, payload_in_workspace=True)
    expect(ValueError, a2a.combine, rows, 4, output_dtype=torch.float8_e4m3fn)
    expect(ValueError, a2a.combine, rows, 4, output_scales=ids)
    expect(ValueError, a2a.combine, rows, 4, output_scalar_scale=2.0)
    expect(ValueError, a2a.get_combine_payload_tensor_in_workspace, 4, 65536, torch.bfloat16)
    a2a.release()
    assert same_bits(run_layer(rank, a2a, layer, 4, True), layer.expected(rank.rank))
    shared.close_shared(rank.comm)
    return messages


def test_wrong_calls_name_what_is_wrong_and_do_nothing() -> None:
    named = [
        "no dispatch of this layer",
        "no dispatch of this layer",
        "runtime_max_tokens_per_rank is 9, allowed are ints from 1 to 8",
        "runtime_max_tokens_per_rank is 0",
        "invalid_token_expert_id is given, expert_id_payload_index is None",
        "expert_id_payload_index is 3, there are 3 input_payloads",
        "token_selected_experts: [2, 3] torch.int64 came, expected an int32 tensor [num_tokens, 3]",
        "expert ids in input_payloads: [2, 3] torch.float32 came",
        "input_payloads[0] has shape [1, 256], expected 2 rows",
        "eplb_local_stats is [2, 3] torch.int32, expected [0] torch.int32: eplb_stats_num_experts is 0",
        "active_rank_mask is given, expected None without enable_rank_mask=True",
        "has not been combined yet",
        "runtime_max_tokens_per_rank is 3, the last dispatch gave 4 rows a rank",
        "payload has shape [2, 3, 256], expected [2, 4, hidden_size]",
        "payload has dtype torch.int32, supported are torch.bfloat16",
        "output is [2, 128] torch.bfloat16, expected [2, 256] torch.bfloat16",
        "output must be contiguous, got stride=(1, 2)",
        "payload_in_workspace is True, payload is not the tensor",
        "output_dtype is torch.float8_e4m3fn, supported is torch.bfloat16",
        "output_scales is a tensor, supported is None",
        "output_scalar_scale is 2.0, supported is 1.0",
        "are not within one rank's part",
    ]
    for messages in run_ranks(2, refuse):
        assert len(messages) == len(named)
        for message, part in zip(messages, named, strict=True):
            assert part in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "workspace_size_per_rank and hidden_size are None"),
        ({"eplb_stats_num_experts": -1}, "eplb_stats_num_experts is -1, expected an int of at least 0"),
        ({"workspace_size_per_rank": 64}, "workspace_size_per_rank is 64, expected room for rows of 4 tokens"),
        ({"backend": "cake"}, "backend is 'cake', supported is 'trtllm'"),
        ({"mapping": SimpleNamespace(moe_ep_size=2, moe_ep_rank=0)}, "mapping.moe_ep_size is 2, the group has 1"),
        ({"comm": None, "mnnvl_config": SimpleNamespace(comm_backend=object())}, "comm_backend is a object"),
    ],
)
def test_constructor_refuses(changes: dict[str, Any], named: str) -> None:
    (comm,) = putget.Communicator.local(1)
    good = {"mapping": SimpleNamespace(moe_ep_size=1, moe_ep_rank=0), "max_num_tokens": 4, "top_k": 2, "num_experts": 8}
    with pytest.raises(ValueError) as caught:
        MoeAlltoAll(**{**good, "hidden_size": 64, "comm": comm, "device": "cpu", **changes})
    assert named in str(caught.value)


SMALL_BYTES = moe_a2a_get_workspace_size_per_rank(4, 8, 16, 16)


def small_workspace(rank: Rank, by_source: bool) -> str:
    """A body: the given size is too small for the rows that come."""
    a2a = alltoall(rank, RAGGED, workspace_size_per_rank=SMALL_BYTES, by_source=by_source)
    with pytest.raises(ValueError) as caught:
        run_layer(rank, a2a, RAGGED, 8, False)
    shared.close_shared(rank.comm)
    return str(caught.value)


@pytest.mark.parametrize("by_source", [True, False])
def test_workspace_that_is_too_small(by_source: bool) -> None:
    for rank, message in enumerate(run_ranks(4, small_workspace, by_source)):
        assert re.search(r"workspace has \d+ bytes.*, needed are", message), rank


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("top_k", [1, 8, 32])
@pytest.mark.parametrize("combine_dtype", [None, torch.float8_e4m3fn])
def test_workspace_size_is_enough_for_every_recipe(recipe: str, top_k: int, combine_dtype: torch.dtype | None) -> None:
    rows = Layer(num_tokens=(1,), hidden_size=2048, recipe=recipe).rows(0)
    payloads = [putget.Payload(tuple(tensor.shape[1:]), tensor.dtype) for tensor in rows]
    payloads.append(putget.Payload((top_k,), torch.int32))
    needed = putget.workspace_bytes(
        ep_size=8,
        max_tokens_per_rank=33,
        top_k=top_k,
        payloads=payloads,
        output=putget.Payload((2048,), torch.bfloat16),
        combine_dtype=combine_dtype,
    )
    dispatch_bytes = sum(payload.row_bytes for payload in payloads) + 4 * top_k
    part = moe_a2a_get_workspace_size_per_rank(8, 33, dispatch_bytes, 4096)
    empty = moe_a2a_get_workspace_size_per_rank(8, 33, 0, 0)
    assert 8 * 33 * (dispatch_bytes + 4096) <= part - empty < 8 * 33 * (dispatch_bytes + 4096) + 256
    given = symmetric_bytes(part, 8, 33)
    # Three fifths of a workspace are regions.
    assert needed <= given <= needed + (8 * 33 * (32 * 8 + 4 * top_k) + 8 * 4096) * 5 // 3 + 4096


FAKE = {
    "flashinfer/__init__.py": "",
    "flashinfer/comm/__init__.py": "from .trtllm_moe_alltoall import *\n",
    "flashinfer/comm/trtllm_moe_alltoall.py": (
        "def moe_a2a_get_workspace_size_per_rank(ep_size, max_num_tokens): ...\n"
        "def moe_a2a_initialize(workspace, ep_rank, ep_size, max_num_tokens): ...\n"
        "def moe_a2a_dispatch(token_selected_experts, input_payloads, workspace, metainfo): ...\n"
        "def moe_a2a_combine(payload, local_num_tokens, workspace, metainfo): ...\n"
        "def moe_a2a_sanitize_expert_ids(expert_ids, workspace, metainfo): ...\n"
        "def moe_a2a_wrap_payload_tensor_in_workspace(workspace, leading_shape): ...\n"
        "class MoeAlltoAll:\n"
        "    def __init__(self, mapping, max_num_tokens, top_k, num_experts): ...\n"
        "    def dispatch(self, token_selected_experts, input_payloads, EXTRA runtime_max_tokens_per_rank): ...\n"
    ),
    "engine.py": "from flashinfer.comm import MoeAlltoAll\n",
}


def installed(rank: Rank, folder: Path, engine_first: bool, extra: str) -> tuple[bool, bool, bool]:
    """A body: whether FlashInfer's package and an engine that imports from it have putget's class."""
    for name, text in FAKE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("EXTRA", extra))
    sys.path.insert(0, str(folder))
    if engine_first:
        importlib.import_module("engine")
    flashinfer.install()
    assert not MoeAlltoAll.use_low_precision_combine
    flashinfer.install(use_low_precision_combine=True)
    assert MoeAlltoAll.use_low_precision_combine
    modules = [importlib.import_module(name) for name in ("engine", "flashinfer.comm")]
    sizing = modules[1].moe_a2a_get_workspace_size_per_rank is moe_a2a_get_workspace_size_per_rank
    return (*(module.MoeAlltoAll is MoeAlltoAll for module in modules), sizing)


@pytest.mark.parametrize("engine_first", [False, True])
def test_install_replaces_names_before_and_after_the_engine_is_imported(tmp_path: Path, engine_first: bool) -> None:
    with fresh_ranks(1) as ranks:
        assert ranks.call(installed, tmp_path, engine_first, "")[0] == (True, True, True)


def test_install_names_arguments_that_it_does_not_know(tmp_path: Path) -> None:
    named = "MoeAlltoAll.dispatch of this version takes compression, which putget does not know"
    with fresh_ranks(1) as ranks, pytest.raises(RankError, match=named):
        ranks.call(installed, tmp_path, True, "compression,")


def arguments_of(tree: ast.AST, name: str) -> list[str]:
    (function,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [argument.arg for argument in every]


def test_arguments_are_those_of_the_published_class() -> None:
    source = upstream("flashinfer") / "flashinfer" / "comm" / "trtllm_moe_alltoall.py"
    module = ast.parse(source.read_text())
    (published,) = [n for n in module.body if isinstance(n, ast.ClassDef) and n.name == "MoeAlltoAll"]
    calls = ["__init__", "dispatch", "combine", "get_combine_payload_tensor_in_workspace"]
    for name in [*calls, "get_moe_workspace_size_per_rank"]:
        ours = list(inspect.signature(getattr(MoeAlltoAll, name)).parameters)
        theirs = arguments_of(published, name)
        assert ours[: len(theirs)] == theirs, name
    sizing = "moe_a2a_get_workspace_size_per_rank"
    (function,) = [n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == sizing]
    published_arguments = arguments_of(function, sizing)
    ours = list(inspect.signature(getattr(flashinfer, sizing)).parameters)
    assert ours[: len(published_arguments)] == published_arguments


def test_functions_take_the_published_arguments() -> None:
    source = upstream("flashinfer") / "flashinfer" / "comm" / "trtllm_moe_alltoall.py"
    published = {n.name: n for n in ast.parse(source.read_text()).body if isinstance(n, ast.FunctionDef)}
    replaced = [name for name in dir(flashinfer.functions) if name.startswith("moe_a2a_") and name in published]
    assert len(replaced) >= 5, replaced
    for name in replaced:
        ours = inspect.signature(getattr(flashinfer.functions, name)).parameters
        assert set(arguments_of(published[name], name)) <= set(ours), name


def with_published_mapping(rank: Rank, root: Path) -> torch.Tensor:
    """A body: FlashInfer's own Mapping and communicator over a subgroup-free world."""
    shell(root, "flashinfer", "flashinfer.comm")
    mapping = importlib.import_module("flashinfer.comm.mapping").Mapping(
        rank=rank.rank, world_size=rank.size, tp_size=rank.size, moe_ep_size=rank.size, gpus_per_node=rank.size
    )
    backend = importlib.import_module("flashinfer.comm.comm_backend").TorchDistBackend(group=dist.group.WORLD)
    a2a = alltoall(rank, RAGGED, mapping=mapping, mnnvl_config=SimpleNamespace(comm_backend=backend))
    return run_layer(rank, a2a, RAGGED, 8, True)


def test_published_mapping_and_communicator() -> None:
    root = upstream("flashinfer")
    with fresh_ranks(4) as ranks:
        for rank, combined in ranks.call(with_published_mapping, root).items():
            assert same_bits(combined, RAGGED.expected(rank))


def by_source(rank: Rank, layer: Layer) -> list[torch.Tensor]:
    """A body: rows indexed by source, tables at metainfo, an output of the caller's, FP8 when combine asks for it."""
    a2a = alltoall(rank, layer, hidden_size=layer.hidden_size)
    ids, weights = (tensor.to(rank.device) for tensor in layer.routes(rank.rank))
    (x,) = (tensor.to(rank.device) for tensor in layer.rows(rank.rank))
    results = []
    for low in (False, True, True, False):
        got = a2a.dispatch(ids, [x, ids, weights], layer.max_tokens_per_rank, -7, 1)
        rows, seen_ids, seen_weights = (tensor.view(-1, tensor.shape[-1]) for tensor in got)
        output = layer.experts((rows,), torch.where(seen_ids == -7, -1, seen_ids), seen_weights, rank.rank)
        place = a2a.get_combine_payload_tensor_in_workspace(8, layer.hidden_size, torch.bfloat16)
        place.copy_(output.view_as(place))
        out = torch.empty_like(x)
        assert a2a.combine(place, 8, payload_in_workspace=True, output=out, use_low_precision=low) is out
        results.append(out.cpu())
    index = MoeAlltoAll._METAINFO_INDEX
    tables = {}
    for name, words in (("SEND_COUNTERS", 4), ("RECV_COUNTERS", 4), ("TOPK_TARGET_RANKS", len(ids) * layer.top_k)):
        offset = int(a2a.metainfo[index[f"{name}_OFFSET_INDEX"]])
        tables[name] = a2a.workspace[rank.rank, offset : offset + 4 * words].view(torch.int32).cpu()
    assert torch.equal(tables["RECV_COUNTERS"], (got[1] != -7).any(2).sum(1).int().cpu())
    owners = torch.where(ids.cpu() < 0, -1, layer.table[ids.cpu().clamp(min=0).long()])
    for token, ranks in enumerate(tables["TOPK_TARGET_RANKS"].view(-1, layer.top_k).tolist()):
        seen = [rank for rank in ranks if rank >= 0]
        assert sorted(seen) == sorted(set(owners[token].tolist()) - {-1})
    sent = [int((owners == peer).any(1).sum()) for peer in range(layer.ep_size)]
    assert tables["SEND_COUNTERS"].tolist() == sent
    shared.close_shared(rank.comm)
    return results


def test_rows_by_source_and_tables_at_metainfo() -> None:
    for rank, combined in enumerate(run_ranks(4, by_source, RAGGED)):
        for low, rows in zip((False, True, True, False), combined, strict=True):
            assert same_bits(rows, RAGGED.expected(rank, torch.float8_e4m3fn if low else None))


def with_stats(rank: Rank, layer: Layer) -> None:
    """A body: numbers of every rank reach all, rows or not; a rank may give none."""
    a2a = alltoall(rank, layer, eplb_stats_num_experts=5, by_source=True, hidden_size=256, workspace_size_per_rank=None)
    ids, weights = layer.routes(rank.rank)
    (x,) = layer.rows(rank.rank)
    for turn in range(3):
        own = torch.arange(5, dtype=torch.int32) + 100 * rank.rank + turn
        given = None if turn == 2 and rank.rank == 1 else own
        a2a.dispatch(ids, [x, ids, weights], 8, eplb_local_stats=given)
        found = a2a.eplb_gathered_stats
        if given is None:
            assert found is None
        else:
            expected = torch.arange(5) + 100 * torch.arange(layer.ep_size)[:, None] + turn
            expected[1] *= turn < 2
            assert found is not None
            assert torch.equal(found, expected.int())
        a2a.combine(torch.zeros(layer.ep_size, 8, layer.hidden_size, dtype=torch.bfloat16), 8)
        assert a2a.eplb_gathered_stats is None
    shared.close_shared(rank.comm)


def test_statistics_reach_every_rank() -> None:
    run_ranks(4, with_stats, RAGGED)


def masked(rank: Rank, layer: Layer) -> list[torch.Tensor]:
    """A body: a round of all ranks; then rank 1 stays away, and the others leave it out; then it is back."""
    a2a = alltoall(rank, layer, enable_rank_mask=True, hidden_size=layer.hidden_size)
    ids, weights = layer.routes(rank.rank)
    (x,) = layer.rows(rank.rank)
    results = []
    was_active = True
    for active in ([0, 1, 2, 3], [0, 2, 3], [0, 2, 3], [0, 1, 2, 3]):
        if rank.rank not in active:
            was_active = False
            continue
        if not was_active:
            a2a.all_to_all.set_active_ranks([True] * 4)
        mask = moe_a2a_active_rank_mask(active, rank.size)
        got = a2a.dispatch(ids, [x, ids, weights], 8, -1, 1, active_rank_mask=mask)
        rows, seen_ids, seen_weights = (tensor.view(-1, tensor.shape[-1]) for tensor in got)
        assert rank.rank == 1 or 1 in active or not got[0][1].any()
        output = layer.experts((rows,), seen_ids, seen_weights, rank.rank)
        with pytest.raises(ValueError, match="active_rank_mask"):
            a2a.combine(output.view(4, 8, -1), 8)
        results.append(a2a.combine(output.view(4, 8, -1), 8, active_rank_mask=mask))
    with pytest.raises(ValueError, match="active_rank_mask is None"):
        a2a.dispatch(ids, [x], 8)
    with pytest.raises(ValueError, match=f"leaves out the own ep_rank {rank.rank}"):
        a2a.dispatch(ids, [x], 8, active_rank_mask=moe_a2a_active_rank_mask([(rank.rank + 1) % 4], 4))
    shared.close_shared(rank.comm)
    return results


def masked_at_first(rank: Rank, layer: Layer) -> str:
    """A body: rank 1 is left out of a first dispatch, which is refused; then all ranks run the round."""
    # Over a communicator that no other test has dispatched such rows on.
    a2a = alltoall(rank, layer, enable_rank_mask=True, hidden_size=layer.hidden_size, comm=rank.comm)
    ids, weights = layer.routes(rank.rank)
    (x,) = layer.rows(rank.rank)
    told = ""
    if rank.rank != 1:
        mask = moe_a2a_active_rank_mask([0, 2, 3], 4)
        with pytest.raises(ValueError, match="leaves out") as caught:
            a2a.dispatch(ids, [x, ids, weights], 8, -1, 1, active_rank_mask=mask)
        told = str(caught.value)
    a2a.dispatch(ids, [x, ids, weights], 8, -1, 1, active_rank_mask=moe_a2a_active_rank_mask(range(4), 4))
    a2a.release()
    shared.close_shared(rank.comm)
    return told


def test_a_first_dispatch_that_leaves_ranks_out_is_refused() -> None:
    told = run_ranks(4, masked_at_first, RAGGED)
    assert told.pop(1) == ""
    for text in told:
        assert text.startswith("the first dispatch of rows")
        assert "leaves out rank(s) 1, and all ranks make what it needs: run one round of these rows with all" in text


def test_active_rank_mask() -> None:
    layer = replace(RAGGED, top_k=1, no_expert=0.0)
    for rank, combined in enumerate(run_ranks(4, masked, layer)):
        ids = layer.routes(rank)[0][:, 0]
        expected = layer.expected(rank)
        without = torch.where((layer.table[ids.long()] == 1)[:, None], 0, expected)
        wanted = [expected, expected] if rank == 1 else [expected, without, without, expected]
        assert len(combined) == len(wanted)
        assert all(same_bits(*pair) for pair in zip(combined, wanted, strict=True)), rank


def checkpoint(rank: Rank, layer: Layer) -> list[torch.Tensor]:
    """A body: rounds before and after the memory was given up, of two layers that share it."""
    first, second = alltoall(rank, layer), alltoall(rank, layer)
    results = [run_layer(rank, first, layer, 8, False), run_layer(rank, second, layer, 8, True)]
    ids, weights = layer.routes(rank.rank)
    (x,) = layer.rows(rank.rank)
    first.dispatch(ids, [x, ids, weights], 8)
    with pytest.raises(putget.ProtocolMisuse, match="has not been combined"):
        first.checkpoint_prepare()
    first.release()
    for a2a in (first, first, second):
        a2a.checkpoint_prepare()
    with pytest.raises(putget.ProtocolMisuse, match="restore it before"):
        second.dispatch(ids, [x, ids, weights], 8)
    for a2a in (second, first, first):
        a2a.checkpoint_restore(rank.comm)
    results += [run_layer(rank, first, layer, 8, False), run_layer(rank, second, layer, 8, True)]
    shared.close_shared(rank.comm)
    return results


def test_checkpoint_prepare_and_restore() -> None:
    for rank, combined in enumerate(run_ranks(4, checkpoint, RAGGED)):
        assert len(combined) == 4
        assert all(same_bits(rows, RAGGED.expected(rank)) for rows in combined)


def left_open(rank: Rank, layer: Layer) -> torch.Tensor:
    """A body: a layer dispatches and is given up; another one of its size takes the memory over."""
    first = alltoall(rank, layer)
    ids, weights = layer.routes(rank.rank)
    (x,) = layer.rows(rank.rank)
    first.dispatch(ids, [x, ids, weights], 8)
    second = alltoall(rank, layer)
    with pytest.raises(putget.ProtocolMisuse, match="another layer that shares this workspace"):
        second.dispatch(ids, [x, ids, weights], 8)
    del first
    combined = run_layer(rank, second, layer, 8, False)
    shared.close_shared(rank.comm)
    return combined


def test_a_layer_that_is_gone_has_no_open_round() -> None:
    layer = replace(RAGGED, num_tokens=(2, 2))
    for rank, combined in enumerate(run_ranks(2, left_open, layer)):
        assert same_bits(combined, layer.expected(rank))


def test_one_rank_needs_no_group() -> None:
    layer = replace(RAGGED, num_tokens=(3,), no_expert=0.0)
    mapping = SimpleNamespace(moe_ep_size=1, moe_ep_rank=0)
    a2a = MoeAlltoAll(mapping, 8, layer.top_k, layer.num_experts, hidden_size=256, device="cpu")
    ids, _ = layer.routes(0)
    (x,) = layer.rows(0)
    (rows,) = a2a.dispatch(ids, [x], 8)
    assert same_bits(a2a.combine(rows, 8), x)
    shared.close_shared()
