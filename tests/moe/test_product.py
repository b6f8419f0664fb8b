"""The library's kernel of the grouped FP8 product: what it refuses, when it is used, and its bits."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from putget import _abi
from putget.moe import grouped_fp8
from tests.moe.test_grouped_fp8 import PRODUCTS, Product

# Both warpgroups, one of them, several tiles with a part of one, an odd number of blocks, and experts without rows.
LARGER = (
    Product((129, 0, 64, 300), n=384, k=640, seed=5),
    Product((1, 257, 512), n=256, k=1024, gap=3, seed=6),
)


def _arguments(**changed: Any) -> _abi.MoeProductArgs:
    """Arguments that only a build with CUDA could use: of memory that nothing reads."""
    names = ("rows", "row_scales", "weights", "weight_scales", "out", "starts", "counts")
    given = {
        "device": _abi.DEVICE_CUDA,
        **dict.fromkeys(names, 4096),
        **{"num_experts": 2, "capacity": 8, "n": 256, "k": 128, "expected_rows": 4},
        **changed,
    }
    return _abi.MoeProductArgs(**given)


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("product", [*PRODUCTS, *LARGER], ids=str)
def test_the_bits_are_those_of_triton(product: Product) -> None:
    if not grouped_fp8._takes(torch.device("cuda", 0), len(product.counts), product.n, product.k, 1000):
        pytest.skip("the kernel is for compute capability 9.0")
    made = {name: tensor.cuda() for name, tensor in product.make().items()}
    if not len(made["rows"]):
        pytest.skip("no rows")
    want = torch.full((len(made["rows"]), product.n), float("nan"), dtype=torch.bfloat16, device="cuda")
    got = want.clone()
    grouped_fp8._kernels().grouped_mm(**made, out=want, expected_rows=1000, num_sms=None)
    grouped_fp8._native_product(**made, out=got, expected_rows=1000, num_sms=None)
    assert product.wrong_rows(made, got) == []
    # Rows of no expert stay as they were, too.
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
