"""native/protocol/round/numeric.h rounds and widens as torch does: every code, and a dense sweep of float32."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.protocol.tags import ROOT

CODECS = {
    "fp8": (torch.float8_e4m3fn, np.uint8),
    "bf16": (torch.bfloat16, np.uint16),
    "f16": (torch.float16, np.uint16),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("numeric") / "numeric"
    source = ROOT / "tests" / "native" / "numeric.cpp"
    compiler = os.environ.get("CXX", "c++")
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wno-psabi", f"-I{ROOT / 'native'}"]
    subprocess.run([compiler, *options, "-o", str(target), str(source)], check=True, timeout=400)
    return target


def run(program: Path, *arguments: str, given: bytes = b"") -> bytes:
    return subprocess.run([program, *arguments], input=given, capture_output=True, check=True, timeout=400).stdout


def codes(dtype: torch.dtype) -> torch.Tensor:
    """All values of a type, in the order of their codes."""
    bits = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int64)
    return bits.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)


def sweep(dtype: torch.dtype) -> torch.Tensor:
    """float32 of all sizes; and around every value of the type and the middle between two: that, and its neighbours."""
    everywhere = np.arange(0, 2**32, 1021, dtype=np.uint64).astype(np.uint32).view(np.float32)
    values = codes(dtype).double()
    values = values[values.isfinite()].sort().values.unique()
    middles = (values[1:] + values[:-1]) / 2
    largest = values[-1:]
    beyond = torch.tensor([1.0001, 1.03, 1.04, 1.1, 2, 1e10]).double() * largest
    near = torch.cat([values, middles, beyond, -beyond]).float().numpy()
    infinity = np.float32(np.inf)
    around = np.concatenate([near, np.nextafter(near, infinity), np.nextafter(near, -infinity)])
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45], dtype=np.float32)
    return torch.from_numpy(np.concatenate([everywhere, around, special]))


@pytest.mark.parametrize("together", ["", "8"], ids=["one", "eight"])
@pytest.mark.parametrize("name", CODECS)
def test_every_code_is_widened_as_by_torch(name: str, together: str, program: Path) -> None:
    dtype, _ = CODECS[name]
    got = np.frombuffer(run(program, name, f"widen{together}"), np.float32)
    want = codes(dtype).float().numpy()
    assert got.shape == want.shape
    assert np.array_equal(np.isnan(got), np.isnan(want))
    number = ~np.isnan(want)
    assert np.array_equal(got[number].view(np.uint32), want[number].view(np.uint32))


@pytest.mark.parametrize("together", ["", "8"], ids=["one", "eight"])
@pytest.mark.parametrize("name", CODECS)
def test_a_sweep_is_narrowed_as_by_torch(name: str, together: str, program: Path) -> None:
    dtype, bits = CODECS[name]
    values = sweep(dtype)
    got = np.frombuffer(run(program, name, f"narrow{together}", given=values.numpy().tobytes()), bits)
    if dtype == torch.float8_e4m3fn:
        largest = torch.finfo(dtype).max
        narrowed = values.clamp(-largest, largest).to(dtype)  # torch's own conversion does not saturate
    else:
        narrowed = values.to(dtype)
    number = ~values.isnan().numpy()
    want = narrowed.view(torch.uint8 if bits is np.uint8 else torch.uint16).numpy()
    assert np.array_equal(got[number], want[number])
    assert torch.from_numpy(got[~number].copy()).view(dtype).float().isnan().all()


def test_the_scale_of_a_block_is_the_oracles(program: Path) -> None:
    largest = sweep(torch.float16).abs()
    largest = torch.cat([largest[largest.isfinite()], torch.tensor([1e-30, 0.9e-30, 1.1e-30, 0.0])])
    got = np.frombuffer(run(program, "scale", given=largest.numpy().tobytes()), np.float32)
    want = (largest.clamp(min=1e-30) / 448).numpy()
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
