"""Block-scaled FP8: quantisation, the grouped product on CPU and GPU, and its kernel interpreted without a GPU."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import putget
from putget.moe import grouped_fp8
from putget.moe.expert_rows import ExpertRows
from putget.moe.kernels import GATES, gated_activation
from tests.harness import warm
from tests.moe.dense import through_fp8
from tests.project.checkout import ROOT

# The result is rounded to BF16 once, by the interpreter towards zero; sums in another order differ by far less.
TOLERANCE = 2.0**-7


@dataclass
class Made:
    """Tensors of one grouped product, by expert."""

    rows: ExpertRows
    weights: Tensor
    weight_scales: Tensor

    def on(self, device: str) -> Made:
        """The same on a device."""
        rows = ExpertRows(*(one.to(device) for one in vars(self.rows).values()))
        return Made(rows, self.weights.to(device), self.weight_scales.to(device))


@dataclass(frozen=True)
class Product:
    """Arguments of one grouped product.

    Attributes:
        counts: rows of each expert.
        gap: rows between the rows of two experts, and before the first.
    """

    counts: tuple[int, ...]
    n: int = 256
    k: int = 256
    gap: int = 0
    seed: int = 0

    def make(self) -> Made:
        generator = torch.Generator().manual_seed(self.seed)
        starts, at = [], 0
        for count in self.counts:
            at += self.gap
            starts.append(at)
            at += count
        experts = len(self.counts)
        weights = [
            grouped_fp8.quantise_blocks(torch.randn(self.n, self.k, generator=generator)) for _ in range(experts)
        ]
        rows, row_scales = grouped_fp8.quantise_rows(torch.randn(at, self.k, generator=generator))
        codes = [codes.view(torch.uint8) for codes, _ in weights]
        where = (torch.tensor(starts, dtype=torch.int32), torch.tensor(self.counts, dtype=torch.int32))
        return Made(
            ExpertRows(rows, row_scales, *where),
            torch.stack(codes).view(torch.float8_e4m3fn),
            torch.stack([scales for _, scales in weights]),
        )

    def wrong_rows(self, made: Made, got: Tensor) -> list[int]:
        """Rows of got [capacity, n] that are not what float64 gives."""
        wrong = []
        for expert, (start, count) in enumerate(zip(made.rows.starts.tolist(), self.counts, strict=True)):
            span = slice(start, start + count)
            scales = made.rows.scales[span].double().repeat_interleave(128, 1)
            blocks = made.weight_scales[expert].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
            want = (made.rows.codes[span].double() * scales) @ (made.weights[expert].double() * blocks).T
            error = (got[span].double() - want).norm(dim=1) / want.norm(dim=1)
            wrong += [start + int(row) for row in (~(error <= TOLERANCE)).nonzero()]
        return wrong


PRODUCTS = (
    Product((3, 0, 1, 20)),
    Product((0, 0), seed=1),
    Product((70,), n=128, k=128, seed=2),
    Product((16, 17, 0, 0, 33), gap=5, seed=3),
    Product((1, 2, 3), n=384, k=256, gap=128, seed=4),
)


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
@pytest.mark.parametrize("expected_rows", [1, 16, 1000])
def test_grouped_product(product: Product, expected_rows: int, device: str) -> None:
    made = product.make()
    given = made.on(device)
    got = grouped_fp8.grouped_fp8_mm(given.rows, given.weights, given.weight_scales, expected_rows=expected_rows)
    assert got.dtype == torch.bfloat16
    assert got.shape == (len(made.rows.codes), product.n)
    assert product.wrong_rows(made, got.cpu()) == []


def same_rows(product: Product, made: Made, one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    """Whether the rows of experts are equal byte for byte."""
    spans = zip(made.rows.starts.tolist(), product.counts, strict=True)
    here = torch.cat([torch.arange(start, start + count) for start, count in spans])
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.cpu()[here].view(torch.uint8), b.cpu()[here].view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize("product", [one for one in PRODUCTS if one.n % 256 == 0], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_gated_product_is_the_product_and_the_activation(product: Product, gate: grouped_fp8.Gate, device: str) -> None:
    made = product.make()
    given = made.on(device)
    weights = (given.weights, given.weight_scales)
    between = grouped_fp8.grouped_fp8_mm(given.rows, *weights, expected_rows=1000)
    want = gated_activation(between, gate, num_valid=(given.rows.starts, given.rows.counts), quantise="fp8_block")
    got = grouped_fp8.gated_fp8_mm(given.rows, *weights, gate, expected_rows=1000)
    assert [one.shape for one in got] == [(len(between), product.n // 2), (len(between), product.n // 256)]
    assert same_rows(product, made, got, want)


def test_the_comparison_can_fail() -> None:
    product = PRODUCTS[0]
    made = product.make()
    got = grouped_fp8.grouped_fp8_mm(made.rows, made.weights, made.weight_scales, expected_rows=1)
    made.rows.scales[4] *= 1.05
    assert product.wrong_rows(made, got) == [4]


def test_kernels_without_a_gpu() -> None:
    """The kernels' text, run by Triton's interpreter, which is chosen before Triton is imported: in its own process."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    result = subprocess.run(
        [warm.python(), "-m", "tests.moe.interpreted"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("right") == 3 * len(PRODUCTS), result.stdout
    assert result.stdout.count("chosen") == 2 * 5, result.stdout
    assert result.stdout.count("close") == 4, result.stdout
    assert result.stdout.count("placed") == 2 * 3, result.stdout
    assert result.stdout.count("quantised") == 4, result.stdout


def test_quantised_bytes(device: str) -> None:
    """Both backends write the bytes that plain torch gives; zeros, large and subnormal values are among the groups."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(37, 512, generator=generator) * 2.0 ** torch.randint(
        -30, 30, (37, 4), generator=generator
    ).repeat_interleave(128, 1)
    x[3], x[4, :128], x[5, 7] = 0, 1e-20, 3e38
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        sent = x.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else x.to(dtype)
        codes, scales = grouped_fp8.quantise_rows(sent.to(device))
        groups = sent.float().view(37, 4, 128)
        expected_scales = groups.abs().amax(2).clamp(min=1e-12) / 448
        expected = (groups / expected_scales[:, :, None]).clamp(-448, 448).view(37, 512).to(torch.float8_e4m3fn)
        assert torch.equal(scales.cpu(), expected_scales)
        assert torch.equal(codes.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("count", [0, 1, 30, 37])
def test_rows_before_a_count(count: int, device: str) -> None:
    x = torch.randn(37, 256, generator=torch.Generator().manual_seed(6)).to(device)
    codes = torch.full((37, 256), 7, dtype=torch.uint8, device=device)
    scales = torch.full((37, 2), -1.0, device=device)
    num_rows = torch.tensor([count], dtype=torch.int32, device=device)
    grouped_fp8.quantise_rows(x, codes.view(torch.float8_e4m3fn), scales, num_rows)
    all_codes, all_scales = grouped_fp8.quantise_rows(x)
    assert torch.equal(codes[:count], all_codes[:count].view(torch.uint8))
    assert torch.equal(scales[:count], all_scales[:count])
    assert bool((codes[count:] == 7).all())
    assert bool((scales[count:] == -1).all())


def test_no_rows(device: str) -> None:
    codes, scales = grouped_fp8.quantise_rows(torch.empty(0, 256, device=device))
    assert codes.shape == (0, 256)
    assert scales.shape == (0, 2)
    made = Product((0,)).make().on(device)
    weights = (made.weights, made.weight_scales)
    assert grouped_fp8.grouped_fp8_mm(made.rows, *weights, expected_rows=1).shape == (0, 256)
    active, active_scales = grouped_fp8.gated_fp8_mm(made.rows, *weights, "gelu", expected_rows=1)
    assert (active.shape, active_scales.shape) == ((0, 128), (0, 1))


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 1000))
def test_blocks_and_back(row_blocks: int, column_blocks: int, seed: int) -> None:
    weight = torch.randn(row_blocks * 128, column_blocks * 128, generator=torch.Generator().manual_seed(seed))
    codes, scales = grouped_fp8.quantise_blocks(weight)
    assert scales.shape == (row_blocks, column_blocks)
    back = grouped_fp8.dequantise_blocks(codes, scales)
    # Half of the last place of E4M3, relative to the value; or of its smallest step, relative to the block's scale.
    bound = torch.maximum(weight.abs() * 2.0**-4, scales.repeat_interleave(128, 0).repeat_interleave(128, 1) * 2.0**-10)
    assert bool(((back - weight).abs() <= bound * 1.001).all())
    torch.testing.assert_close(back, through_fp8(weight, 128), rtol=1e-5, atol=1e-6)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "putget.moe.grouped_fp8_triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(putget.BackendUnavailable, match="FP8 experts on CUDA need Triton"):
        grouped_fp8._kernels()


def test_wrong_sizes() -> None:
    with pytest.raises(ValueError, match=r"columns of x is 100, FP8 blocks need a multiple of 128"):
        grouped_fp8.quantise_rows(torch.zeros(2, 100))
    with pytest.raises(ValueError, match=r"x has strides \[512, 1\], expected a contiguous tensor"):
        grouped_fp8.quantise_rows(torch.zeros(4, 256)[::2])
    with pytest.raises(ValueError, match=r"x is Tensor of shape \[256\], expected 2 dimensions"):
        grouped_fp8.quantise_rows(torch.zeros(256))
    with pytest.raises(ValueError, match=r"x has dtype float64"):
        grouped_fp8.quantise_rows(torch.zeros(1, 256, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"rows of weight is 64"):
        grouped_fp8.quantise_blocks(torch.zeros(64, 128))
    with pytest.raises(ValueError, match=r"num_rows has dtype int64"):
        grouped_fp8.quantise_rows(torch.zeros(2, 128), num_rows=torch.tensor([1]))
    made = Product((1, 2)).make()
    weights = (made.weights, made.weight_scales)
    wrong_scales, wrong_starts = made.rows.scales[1:], made.rows.starts.long()
    for name, wrong in (("scales", wrong_scales), ("starts", wrong_starts)):
        for call in (grouped_fp8.grouped_fp8_mm, functools.partial(grouped_fp8.gated_fp8_mm, gate="silu")):
            with pytest.raises(ValueError, match=f"{name} has"):
                call(replace(made.rows, **{name: wrong}), *weights, expected_rows=1)
    with pytest.raises(ValueError, match=r"gate is 'relu', allowed are 'silu' and 'gelu'"):
        grouped_fp8.gated_fp8_mm(made.rows, *weights, "relu", expected_rows=1)  # type: ignore[arg-type]
    narrow = Product((1, 2), n=128).make()
    with pytest.raises(ValueError, match=r"n is 128, a gate and its other factor need a multiple of 256"):
        grouped_fp8.gated_fp8_mm(narrow.rows, narrow.weights, narrow.weight_scales, "silu", expected_rows=1)
    with pytest.raises(ValueError, match=r"n is 100"):
        grouped_fp8.grouped_fp8_mm(made.rows, made.weights[:, :100].contiguous(), made.weight_scales, expected_rows=1)
