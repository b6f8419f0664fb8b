"""Both products of experts over few rows in one kernel: what it refuses, when it is used, and its bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from putget import _abi, _abi_moe
from putget.moe import fused_layer, grouped_fp8, networks
from putget.moe.expert_rows import ExpertRows
from putget.moe.experts import fp8_networks, takes_scattered
from putget.moe.kernels import GATES, Gate
from tests.harness import Rank, run_ranks
from tests.moe.dense import Dense
from tests.moe.layers import make_layer
from tests.moe.test_fused import open_a2a, weights_of
from tests.moe.test_grouped_fp8 import Product

FEW = 4  # expected rows
FEWEST_UNITS = networks.FEWEST_UNITS  # before `few_units` changes it


@pytest.fixture(autouse=True)
def few_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is for experts of any sizes here."""
    monkeypatch.setattr(networks, "FEWEST_UNITS", 1)


def arguments(**changed: Any) -> _abi_moe.MoeNetworksArgs:
    """Arguments that only a build with CUDA could use: of memory that nothing reads."""
    names = ("rows", "row_scales", "gate_up", "gate_up_scales", "down", "down_scales", "between", "between_scales")
    given = {
        "device": _abi.DEVICE_CUDA,
        **dict.fromkeys((*names, "out", "starts", "counts", "progress"), 4096),
        **{"num_experts": 2, "num_rows": 8, "capacity": 8, "hidden_size": 256, "intermediate_size": 128},
        **changed,
    }
    return _abi_moe.MoeNetworksArgs(**given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_size": 100}, "hidden_size is 100"),
        ({"intermediate_size": 192}, "intermediate_size is 192"),
        ({"num_experts": 257}, "num_experts"),
        ({"capacity": 0}, "capacity"),
        ({"num_rows": 0}, "num_rows"),
        ({"num_rows": 7}, "num_rows is 7, without source_rows expected 8"),
        ({"device": _abi.DEVICE_CPU}, "device"),
        ({"down": 4097}, "16 bytes"),
        ({"progress": None}, "progress"),
        ({"gate": 2}, "gate"),
        ({"num_experts": 256, "hidden_size": 1 << 23}, "too many rows"),
    ],
)
def test_wrong_arguments(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _abi.call("putget_moe_networks", ctypes.byref(arguments(**changed)))


@pytest.mark.parametrize(
    ("num_experts", "hidden", "rows", "native", "wanted"),
    [
        (8, 7168, 8, True, (True, True)),
        (8, 7168, 16, True, (True, True)),
        (8, 7168, 17, True, (True, False)),
        (8, 7168, 136, True, (True, False)),
        (15, 7168, 137, True, (False, False)),
        (15, 7168, 175, True, (False, False)),
        (8, 7168, 176, True, (True, False)),
        (16, 7168, 137, True, (True, False)),
        (64, 7168, 255, True, (True, False)),
        (64, 7168, 256, True, (False, False)),
        (7, 7168, 8, True, (True, True)),
        (6, 7168, 8, True, (False, False)),
        (0, 7168, 8, True, (False, False)),
        (257, 7168, 8, True, (False, False)),
        (256, 1 << 23, 8, True, (False, False)),
        (8, 7168, 8, False, (False, False)),
    ],
)
def test_few_rows_of_hopper_take_it(
    monkeypatch: pytest.MonkeyPatch, num_experts: int, hidden: int, rows: int, native: bool, wanted: tuple[bool, bool]
) -> None:
    monkeypatch.setattr(grouped_fp8, "is_native", lambda _: native)
    monkeypatch.setattr(networks, "FEWEST_UNITS", FEWEST_UNITS)
    down = torch.empty(num_experts, hidden, 2048, dtype=torch.float8_e4m3fn, device="meta")
    takes = networks.takes(down, rows)
    assert (takes, takes_scattered(down, rows, torch.float8_e4m3fn)) == wanted
    assert not takes_scattered(down, rows, torch.bfloat16)  # these have to be quantised first


def stand_in(
    rows: ExpertRows,
    source_rows: Tensor | None,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    gate: Gate,
    progress: Tensor,
) -> Tensor:
    """The kernel's result by two products, on the CPU, for checked arguments."""
    capacity = rows.capacity if source_rows is None else len(source_rows)
    networks._check(rows, source_rows, weights, gate, progress, capacity)
    assert rows.scales is not None
    if source_rows is not None:
        at = source_rows.clamp(min=0).long()
        codes = rows.codes.view(torch.uint8)[at].view(rows.codes.dtype)
        rows = ExpertRows(codes, rows.scales[at], rows.starts, rows.counts)
    active = grouped_fp8.gated_fp8_mm(rows, weights[0], weights[1], gate, expected_rows=FEW)
    second = ExpertRows(*active, rows.starts, rows.counts)
    return grouped_fp8.grouped_fp8_mm(second, weights[2], weights[3], expected_rows=FEW)


def scattered_or_not(rank: Rank, row_dtype: torch.dtype) -> list[bool]:
    """A body: a layer and fused_layer with few rows and with more, by the kernel's stand-in; which were scattered."""
    dense = Dense(fp8=True, hidden=256, top_k=4)
    taken: list[bool] = []

    def run(rows: ExpertRows, source_rows: Tensor | None, *more: Any) -> Tensor:
        taken.append(source_rows is not None)
        return stand_in(rows, source_rows, *more)

    with make_layer(rank, dense, row_dtype=row_dtype) as layer, open_a2a(rank, dense, row_dtype) as a2a:
        weights = weights_of(layer)
        for few in (2, 5, 0, 8):
            x = dense.tokens(rank.rank, few, few)
            want = layer(x, busiest_tokens=few)
            ids, by, _ = layer.route(x)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(grouped_fp8, "is_native", lambda _: True)
                patch.setattr(networks, "run", run)
                patch.setattr(networks, "MOST_SCATTERED", 5)  # rows of an expert: with 8 experts those of 5 tokens
                assert torch.equal(layer(x, busiest_tokens=few), want), few
                assert torch.equal(fused_layer(a2a, x, ids, by, **weights, busiest_tokens=few), want), few
        assert len(a2a._rounds.grouper._sets) == 1  # so that a graph of any size can be captured after one call
        a2a.check()
    return taken


@pytest.mark.parametrize("row_dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_layers_take_few_rows_where_they_arrived(row_dtype: torch.dtype) -> None:
    few = row_dtype == torch.float8_e4m3fn
    for taken in run_ranks(2, scattered_or_not, row_dtype):
        # Without tokens a rank is ready for 8 of others.
        assert taken == [few, few, few, few, False, False, False, False]


def test_scattered_rows_are_refused_where_nothing_takes_them() -> None:
    made = Product((3, 1)).make()
    assert made.rows.scales is not None
    rows = (made.rows.codes, made.rows.scales)
    groups: Any = ExpertMajorLike(torch.tensor([0, 3, 4], dtype=torch.int32), made.rows.counts)
    weights = (made.weights, made.weight_scales, made.weights, made.weight_scales)
    with pytest.raises(ValueError, match="source_rows is given for 4 rows per expert"):
        fp8_networks(rows, groups, weights, "silu", FEW, torch.zeros(4, dtype=torch.int32))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gate", lambda _: "relu", "gate is 'relu'"),
        ("down", lambda down: down.transpose(1, 2), "gate_up has shape"),
        ("down", lambda down: down.view(torch.int8), "down has dtype"),
        ("gate_up_scales", lambda scales: scales[:, :1].contiguous(), "weight_scales has shape"),
        ("down_scales", lambda scales: scales.double(), "down_scales has dtype"),
        ("source_rows", lambda rows: rows.long(), "source_rows has dtype"),
        ("progress", lambda words: words[:3], "progress has 3 words, expected 4 or more"),
    ],
)
def test_wrong_tensors(name: str, change: Callable[[Any], Any], message: str) -> None:
    """A mistake is named before the library is called, which would need a GPU."""
    first, second = Product((3, 1), n=256, k=256).make(), Product((3, 1), n=256, k=128).make()
    given: dict[str, Any] = {
        "gate_up": first.weights,
        "gate_up_scales": first.weight_scales,
        "down": second.weights,
        "down_scales": second.weight_scales,
        "gate": "silu",
        "source_rows": torch.zeros(4, dtype=torch.int32),
        "progress": torch.zeros(4, dtype=torch.int32),
    }
    given[name] = change(given[name])
    gate_up, gate_up_scales, down, down_scales, gate, source_rows, progress = given.values()
    with pytest.raises(ValueError, match=message):
        networks.run(first.rows, source_rows, (gate_up, gate_up_scales, down, down_scales), gate, progress)


@dataclass
class ExpertMajorLike:
    """Groups that have no progress."""

    offsets: Tensor
    num_rows: Tensor


@dataclass
class Experts:
    """Rows of a GPU's experts, scattered over as many again, and weights."""

    counts: list[int]
    hidden: int
    intermediate: int
    gap: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(self.counts) + self.hidden)

        def weights(n: int, k: int) -> tuple[Tensor, Tensor]:
            made = [grouped_fp8.quantise_blocks(torch.randn(n, k, generator=generator)) for _ in self.counts]
            codes = torch.stack([one.view(torch.uint8) for one, _ in made]).view(torch.float8_e4m3fn)
            return codes.cuda(), torch.stack([scales for _, scales in made]).cuda()

        self.weights = (*weights(2 * self.intermediate, self.hidden), *weights(self.hidden, self.intermediate))
        starts, places, at = [], [], self.gap
        for count in self.counts:
            starts.append(at)
            places += range(at, at + count)
            at += count + self.gap
        rows, scales = grouped_fp8.quantise_rows(torch.randn(2 * at + 1, self.hidden, generator=generator))
        self.source_rows = torch.full((at,), -1, dtype=torch.int32)
        self.places = torch.tensor(places, dtype=torch.long)
        self.source_rows[self.places] = torch.randperm(len(rows), generator=generator)[: len(places)].int()
        by_expert = self.source_rows.clamp(min=0).long()
        ordered = rows.view(torch.uint8)[by_expert].view(rows.dtype)
        self.source_rows = self.source_rows.cuda()
        self.places = self.places.cuda()
        self.starts, self.num_rows = (torch.tensor(one, dtype=torch.int32).cuda() for one in (starts, self.counts))
        self.offsets = torch.cat([self.starts, self.starts[-1:] + self.num_rows[-1:]])
        self.arrived = (rows.cuda(), scales.cuda())
        self.ordered = (ordered.cuda(), scales[by_expert].cuda())
        self.progress: Tensor | None = torch.zeros(2 + len(self.counts) + at // 16, dtype=torch.int32, device="cuda")

    def apart(self, gate: Gate) -> Tensor:
        """The result of two products and the activation."""
        own, self.progress = self.progress, None
        try:
            return fp8_networks(self.ordered, self, self.weights, gate, FEW)[self.places]
        finally:
            self.progress = own

    def left(self) -> int:
        """Words of progress that the kernel has not cleared."""
        assert self.progress is not None
        return int(self.progress.count_nonzero())


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


# Bands and boxes of each kind, several tiles, experts without rows, a block without a second one, one row, and none.
CASES = (
    ([1], 128, 128, 0),
    ([3, 0, 17, 40, 0, 130], 384, 256, 0),
    ([0, 0, 65, 1], 256, 384, 3),
    ([16] * 20, 640, 128, 0),
    ([150, 257, 1, 0, 128, 33, 81], 512, 256, 1),
    ([129, 136, 144, 145, 0, 272, 273], 384, 256, 2),  # the last tile's rows beside its bands, from one to all
    ([160, 161, 288, 289, 152, 153], 256, 384, 0),
    ([9] * 31 + [150] + [7] * 20 + [192, 193, 3], 256, 256, 2),  # two short tiles come last, of the 32nd and 53rd
    ([0, 0], 256, 128, 1),
)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_the_bits_are_those_of_two_products(case: tuple[list[int], int, int, int], gate: Gate) -> None:
    experts = Experts(*case)
    want = experts.apart(gate)
    for rows, source_rows in ((experts.ordered, None), (experts.arrived, experts.source_rows)):
        for _ in range(3):
            got = fp8_networks(rows, experts, experts.weights, gate, FEW, source_rows)[experts.places]
            assert torch.equal(got.view(torch.int16), want.view(torch.int16)), source_rows is None
            assert experts.left() == 0


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("num_sms", [1, 2, 7, 132])
def test_any_number_of_ctas_ends(num_sms: int) -> None:
    experts = Experts(*CASES[1])
    want = experts.apart("silu")
    rows = ExpertRows(*experts.ordered, experts.starts, experts.num_rows)
    for _ in range(3):
        got = networks.run(rows, None, experts.weights, "silu", experts.progress, num_sms)[experts.places]
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))
        assert experts.left() == 0


@pytest.mark.gpu
@needs_hopper
def test_layers_in_a_row_and_beside_each_other() -> None:
    """Launches that begin while the one before them ends, on two streams that share the SMs, in graphs."""
    both = [Experts(*CASES[1]), Experts(*CASES[3])]
    wants = [one.apart("silu") for one in both]
    streams = [torch.cuda.Stream() for _ in both]
    outs: list[list[Tensor]] = [[], []]
    graphs = []
    for one, stream, out in zip(both, streams, outs, strict=True):
        rows = ExpertRows(*one.ordered, one.starts, one.num_rows)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            networks.run(rows, None, one.weights, "silu", one.progress)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                out += [networks.run(rows, None, one.weights, "silu", one.progress) for _ in range(20)]
            graphs.append(graph)
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for one, out, want in zip(both, outs, wants, strict=True):
        assert all(torch.equal(got[one.places].view(torch.int16), want.view(torch.int16)) for got in out)
        assert one.left() == 0
