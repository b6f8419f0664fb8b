"""The grouped product of bfloat16 experts: right on both devices, and the same bits by Triton's kernel and torch's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from putget.moe import experts
from putget.moe.experts import grouped_bf16_mm


@dataclass
class Places:
    """Where each expert's rows are."""

    offsets: Tensor
    num_rows: Tensor


def made(counts: tuple[int, ...], n: int, k: int, device: str) -> tuple[Tensor, Tensor, Places]:
    """Rows with some behind the last group, weights, and places."""
    generator = torch.Generator().manual_seed(n + k)
    ends = torch.tensor(counts).cumsum(0)
    rows = torch.randn(int(ends[-1]) + 3, k, generator=generator).bfloat16()
    weights = (torch.randn(len(counts), n, k, generator=generator) / k**0.5).bfloat16()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int().to(device)
    return rows.to(device), weights.to(device), Places(offsets, torch.tensor(counts, dtype=torch.int32).to(device))


@pytest.mark.parametrize("counts", [(3, 0, 1, 20), (70,), (0, 0, 5), (1, 130, 2)], ids=str)
@pytest.mark.parametrize(("n", "k"), [(128, 64), (384, 192), (256, 512), (96, 64), (128, 72)])
@pytest.mark.parametrize("expected_rows", [1, 6, 16, 100, 1000])
def test_each_row_by_its_expert(counts: tuple[int, ...], n: int, k: int, expected_rows: int, device: str) -> None:
    rows, weights, places = made(counts, n, k, device)
    got = grouped_bf16_mm(rows, weights, places, expected_rows)
    assert got.shape == (len(rows), n)
    ends = places.offsets.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(ends)):
        want = rows[start:end].double() @ weights[expert].double().T
        assert torch.allclose(got[start:end].double(), want, rtol=2.0**-7, atol=2.0**-7), expert


class Conversions(TorchDispatchMode):
    """Notes the elements of each tensor that is converted to another type inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_weights_of_experts_without_rows_are_not_converted() -> None:
    """On the CPU, where each product begins with a conversion to float32."""
    rows, weights, places = made((0, 2, 0, 0), 96, 64, "cpu")
    with Conversions() as seen:
        grouped_bf16_mm(rows, weights, places, 1)
    assert seen.sizes.count(96 * 64) == 1


@pytest.mark.gpu
def test_both_products_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    for counts, n, k in (((3, 0, 1, 20), 384, 192), ((1, 130, 2), 1536, 2048), ((7,) * 64, 256, 512)):
        rows, weights, places = made(counts, n, k, "cuda")
        end = int(places.offsets[-1])
        monkeypatch.setattr(experts, "_loaded", set())
        found = [grouped_bf16_mm(rows, weights, places, expected)[:end] for expected in (1, 6, 16, 100)]
        with monkeypatch.context() as torch_alone:
            torch_alone.setattr(experts, "_TRITON_ROWS", 0)
            found.append(grouped_bf16_mm(rows, weights, places, 1)[:end])
        assert all(torch.equal(one, found[0]) for one in found)


def test_triton_is_for_few_rows_and_whole_tiles_on_new_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(tiles_for=lambda rows, scaled: "few" if rows < 8 else "many")
    captures = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    monkeypatch.setattr(experts, "_loaded", set())
    monkeypatch.setattr(experts.grouped_fp8, "has_tensor_copies", lambda device: device.index != 1)
    monkeypatch.setattr(experts.grouped_fp8, "triton_kernels", lambda: kernels)
    new, old = torch.device("cuda", 0), torch.device("cuda", 1)
    weights = torch.empty(2, 256, 128, device="meta")
    assert experts._triton_for(new, weights, 256) is kernels
    assert experts._triton_for(new, weights, 257) is None
    assert experts._triton_for(old, weights, 1) is None
    assert experts._triton_for(new, torch.empty(2, 192, 128, device="meta"), 1) is None
    assert experts._triton_for(new, torch.empty(2, 256, 96, device="meta"), 1) is None
    assert experts._triton_for(new, weights, 1) is kernels
    # Outside of a capture: to load a kernel, and where the product takes longer than its launch.
    captures = False
    assert experts._triton_for(new, weights, 1) is kernels
    experts._loaded.add(experts._kind(kernels, weights, 1))  # type: ignore[arg-type]
    assert [experts._triton_for(new, weights, rows) for rows in (1, 7, 8, 16)] == [None, None, kernels, kernels]
    monkeypatch.setattr(experts.grouped_fp8, "triton_kernels", lambda: None)
    assert experts._triton_for(new, weights, 100) is None
