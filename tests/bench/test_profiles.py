"""Shapes on the wire and the quantisation recipes."""

from __future__ import annotations

import pytest
import torch

from putget_bench import profiles, quantise


def test_bytes_of_a_deepseek_v3_token() -> None:
    # 7168 values + 56 float32 scales + 8 int32 ids + 8 float32 weights
    assert profiles.dispatch_row_bytes(profiles.payloads("fp8", 7168), 8) == 7168 + 224 + 64
    assert profiles.dispatch_row_bytes(profiles.payloads("bf16", 7168), 8) == 14336 + 64
    assert profiles.dispatch_row_bytes(profiles.payloads("nvfp4", 7168), 8) == 3584 + 448 + 64


def test_nvfp4_is_28_percent_of_bf16() -> None:
    nvfp4 = sum(payload.row_bytes for payload in profiles.payloads("nvfp4", 7168))
    assert nvfp4 / (2 * 7168) == pytest.approx(0.28, abs=0.005)


def test_last_fp8_group_may_be_short() -> None:
    hidden_size = profiles.PROFILES["gpt_oss_120b"].hidden_size
    rows, scales = profiles.payloads("fp8", hidden_size)
    assert rows.shape == (2880,)
    assert scales.shape == (23,)  # 22 groups of 128 and one of 64


def test_unknown_recipes_are_refused() -> None:
    with pytest.raises(ValueError, match="--quant must be one of bf16, fp8, nvfp4, got 'int4'"):
        profiles.payloads("int4", 128)
    with pytest.raises(ValueError, match="multiple of 16 for --quant nvfp4, got 24"):
        profiles.payloads("nvfp4", 24)


@pytest.mark.parametrize("hidden_size", [2880, 256])
@pytest.mark.parametrize(("quant", "error"), [("bf16", 2**-8), ("fp8", 2**-4), ("nvfp4", 0.25)])
def test_quantised_rows_have_the_declared_shape_and_come_back(quant: str, error: float, hidden_size: int) -> None:
    rows = torch.randn(5, hidden_size, generator=torch.Generator().manual_seed(1))
    carried = quantise.quantise(quant, rows)
    declared = profiles.payloads(quant, hidden_size)
    assert [tuple(part.shape[1:]) for part in carried] == [payload.shape for payload in declared]
    assert [part.dtype for part in carried] == [payload.dtype for payload in declared]
    back = quantise.dequantise(quant, carried, hidden_size)
    assert ((back - rows).norm() / rows.norm()).item() < error
    # No recipe is exact on random rows: a round trip that returned its input would test nothing.
    assert not torch.equal(back, rows)


@pytest.mark.parametrize("quant", profiles.QUANTS)
def test_rows_of_zeros_stay_zeros(quant: str) -> None:
    carried = quantise.quantise(quant, torch.zeros(2, 128))
    assert torch.equal(quantise.dequantise(quant, carried, 128), torch.zeros(2, 128))


def test_nvfp4_represents_its_own_values_exactly() -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0, 0.0])
    assert torch.equal(quantise.dequantise("nvfp4", quantise.quantise("nvfp4", values[None]), 16), values[None])
