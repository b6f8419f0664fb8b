"""The library's kernel of the grouped FP8 product: what it refuses, when it is used, and its bits."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from putget import _abi, _abi_moe
from putget.moe import grouped_fp8
from putget.moe.kernels import GATES, gated_activation
from tests.moe.test_grouped_fp8 import PRODUCTS, Made, Product

# Both warpgroups, one of them, several tiles with a part of one, an odd number of blocks, and experts without rows.
LARGER = (
    Product((129, 0, 64, 300), n=384, k=640, seed=5),
    Product((1, 257, 512), n=256, k=1024, gap=3, seed=6),
)
# Several blocks of the gate.
GATED = (Product((200, 3, 0, 128), n=1024, k=512, seed=7), Product((1, 1, 400), n=768, k=384, gap=2, seed=8))


def _arguments(**changed: Any) -> _abi_moe.MoeProductArgs:
    """Arguments that only a build with CUDA could use: of memory that nothing reads."""
    names = ("rows", "row_scales", "weights", "weight_scales", "out", "starts", "counts")
    given = {
        "device": _abi.DEVICE_CUDA,
        **dict.fromkeys(names, 4096),
        **{"num_experts": 2, "capacity": 8, "n": 256, "k": 128, "expected_rows": 4},
        **changed,
    }
    return _abi_moe.MoeProductArgs(**given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n": 100}, "n is 100"),
        ({"k": 192}, "k is 192"),
        ({"num_experts": 1025}, "num_experts"),
        ({"capacity": 0}, "capacity"),
        ({"device": _abi.DEVICE_CPU}, "device"),
        ({"rows": 4097}, "16 bytes"),
        ({"counts": None}, "counts"),
        ({"gate": 2}, "gate"),
        ({"out_scales": 4096, "n": 384}, "n is 384, a gated product needs a multiple of 256"),
    ],
)
def test_wrong_arguments(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _abi.call("putget_moe_product", ctypes.byref(_arguments(**changed)))


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """A faked capability of GPUs; nothing has been said about them yet."""
    found = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found[0])
    for known in (grouped_fp8._capability, grouped_fp8._say):
        known.cache_clear()
    yield found
    for known in (grouped_fp8._capability, grouped_fp8._say):
        known.cache_clear()


@pytest.mark.parametrize(
    ("gpu", "num_experts", "n", "rows", "why"),
    [
        ((9, 0), 8, 4096, 256, None),
        ((9, 0), 1024, 4096, 256, None),
        ((9, 0), 8, 4096, 255, "an expert gets fewer than 256 rows"),
        ((10, 0), 8, 4096, 256, "compute capability is 10.0, not 9.0"),
        ((8, 9), 8, 4096, 1, "compute capability is 8.9, not 9.0"),
        ((9, 0), 1025, 4096, 256, "a rank has more than 1024 experts"),
        ((9, 0), 1024, 1 << 21, 256, "the weights have 2^31 rows or more"),
    ],
)
def test_the_log_says_once_for_each_shape_why_triton_runs(
    capability: list[tuple[int, int]],
    caplog: pytest.LogCaptureFixture,
    gpu: tuple[int, int],
    num_experts: int,
    n: int,
    rows: int,
    why: str | None,
) -> None:
    capability[0] = gpu
    device = torch.device("cuda", 0)
    with caplog.at_level(logging.INFO, logger="putget"):
        for k in (512, 1024):
            for _ in range(3):
                assert grouped_fp8._takes(device, num_experts, n, k, rows) == (why is None)
    said = [record.getMessage() for record in caplog.records]
    wanted = [f"FP8 experts [{num_experts}, {n}, {k}] on cuda:0: {why}, so products are Triton's" for k in (512, 1024)]
    assert said == ([] if why is None else wanted)


def _taken(product: Product) -> Made:
    """The product's tensors on the GPU; skips where the kernel does not run."""
    if not grouped_fp8._takes(torch.device("cuda", 0), len(product.counts), product.n, product.k, 1000):
        pytest.skip("the kernel is for compute capability 9.0")
    if not sum(product.counts):
        pytest.skip("no rows")
    return product.make().on("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("product", [*PRODUCTS, *LARGER], ids=str)
def test_the_bits_are_those_of_triton(product: Product) -> None:
    made = _taken(product)
    weights = (made.weights, made.weight_scales)
    want = torch.full((made.rows.capacity, product.n), float("nan"), dtype=torch.bfloat16, device="cuda")
    got = want.clone()
    grouped_fp8._kernels().grouped_mm(made.rows, *weights, want, 1000, None)
    grouped_fp8._native_product(made.rows, *weights, got, None, "silu", 1000, None)
    assert product.wrong_rows(made, got) == []
    # Rows of no expert stay as they were, too.
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("product", [one for one in (*PRODUCTS, *LARGER, *GATED) if one.n % 256 == 0], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_the_gated_end_has_the_bits_of_the_activation(product: Product, gate: str) -> None:
    made = _taken(product)
    weights = (made.weights, made.weight_scales)
    between = torch.empty((made.rows.capacity, product.n), dtype=torch.bfloat16, device="cuda")
    grouped_fp8._kernels().grouped_mm(made.rows, *weights, between, 1000, None)
    shapes = ((product.n // 2, torch.uint8), (product.n // 256 * 4, torch.uint8))
    want, got = (
        [torch.full((len(between), columns), 0x5A, dtype=dtype, device="cuda") for columns, dtype in shapes]
        for _ in range(2)
    )
    for made_by, into in (("activation", want), ("product", got)):
        codes, scales = into[0].view(torch.float8_e4m3fn), into[1].view(torch.float32)
        if made_by == "activation":
            valid = (made.rows.starts, made.rows.counts)
            gated_activation(between, gate, num_valid=valid, quantise="fp8_block", out=codes, scales=scales)  # type: ignore[call-overload]
        else:
            grouped_fp8._native_product(made.rows, *weights, codes, scales, gate, 1000, None)
    # Rows of no expert stay as they were, too.
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
