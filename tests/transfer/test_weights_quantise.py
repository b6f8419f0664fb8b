"""FP8 in blocks: against a plain loop, and every case that the table of `quantise` defines."""

from __future__ import annotations

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import torch

from putget_transfer import weights


def restored(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, columns = values.shape
    wide = scales.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return values.float() * wide


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (300, 200), (129, 127), (256, 1)])
@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_blocks_are_those_of_a_plain_loop(shape: tuple[int, int], scale: str) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    values, scales = weights.quantise(tensor, scale=scale)
    assert (values.shape, values.dtype) == (tensor.shape, torch.float8_e4m3fn)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = tensor[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128].float()
            wanted = block.abs().max() / 448
            if scale == "ue8m0":
                wanted = 2.0 ** torch.ceil(torch.log2(wanted))
            assert scales[row, column].float() == wanted
            own = values[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
            assert torch.equal(own.view(torch.uint8), (block / wanted).to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.allclose(restored(values, scales), tensor.float(), rtol=0.07, atol=float(scales.float().max()) / 256)


def test_unusual_numbers() -> None:
    tensor = torch.ones(256, 256)
    tensor[0, 0], tensor[0, 1], tensor[0, 2], tensor[0, 3] = float("nan"), float("inf"), -float("inf"), -float("nan")
    tensor[128:, :128] = 0
    tensor[:128, 128:] = torch.finfo(torch.float32).smallest_normal
    tensor[128:, 128:] = float("inf")
    values, scales = weights.quantise(tensor)
    assert values.view(torch.uint8)[0, 0] == values.view(torch.uint8)[0, 3] == 0x7F
    assert (values[0, 1].float(), values[0, 2].float(), values[0, 4].float()) == (448, -448, 448)
    assert scales.tolist() == [[1 / torch.tensor(448.0), 2**-126], [1, 1]]
    assert not values[128:, :128].float().any()
    assert (values[:128, 128:].float() == 1).all()
    assert (values[128:, 128:].float() == 448).all()


def test_powers_of_two_stay_what_they_are() -> None:
    exponents = [-126, -9, 0, 1, 100]
    tensor = torch.cat([torch.full((128, 128), 448 * 2.0**exponent) for exponent in exponents])
    values, scales = weights.quantise(tensor, scale="ue8m0")
    assert scales.dtype == torch.float8_e8m0fnu
    assert (scales.view(torch.uint8)[:, 0].int() - 127).tolist() == exponents
    assert (values.float() == 448).all()


def test_stacked_experts_have_blocks_of_their_own() -> None:
    stacked = torch.randn(3, 130, 140)
    values, scales = weights.quantise(stacked)
    for at in range(3):
        one = weights.quantise(stacked[at])
        assert torch.equal(values[at].view(torch.uint8), one[0].view(torch.uint8))
        assert torch.equal(scales[at], one[1])


@pytest.mark.parametrize(
    ("tensor", "scale", "words"),
    [
        (torch.zeros(4), "float32", r"torch.float32 \(4,\)"),
        (torch.zeros(4, 4, dtype=torch.int32), "float32", "int32"),
        (torch.zeros(4, 4), "e4m3", "'e4m3' came"),
    ],
)
def test_other_tensors_are_refused(tensor: torch.Tensor, scale: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        weights.quantise(tensor, scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_gpu_and_cpu_give_the_same_bytes(scale: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    bits = torch.randint(-(2**31), 2**31, (512, 384), dtype=torch.int64, generator=torch.Generator().manual_seed(2))
    tensor = bits.to(torch.int32).view(torch.float32)
    for one, other in zip(
        weights.quantise(tensor, scale=scale), weights.quantise(tensor.cuda(), scale=scale), strict=True
    ):
        assert torch.equal(one.view(torch.uint8), other.cpu().view(torch.uint8))
