"""The nvlink provider from Python: torch's memory on GPUs, and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt

LONG_S = 60.0


def build(gpu: int) -> pt.Engine:
    return pt.Engine.builder().group(pt.DeviceGroup.nvlink(gpu)).build()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_driver_it_says_so() -> None:
    with pytest.raises(pt.Unavailable, match="CUDA"):
        build(0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_travel_between_gpus() -> None:
    there = torch.cuda.device_count() - 1
    source = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8, device="cuda:0")
    target = torch.zeros(3 << 20, dtype=torch.uint8, device=f"cuda:{there}")
    torch.cuda.synchronize()
    with build(0) as a, build(there) as b:
        (src, _), (dst, desc) = a.reg_mr(source), b.reg_mr(target)
        words, _ = b.alloc_mr(4096)
        b.mirror_imm(1, words, 0)
        a.submit_single_write(1 << 20, 1, (src, 7), (desc, 9)).wait(LONG_S)
        order = torch.randperm(512).tolist()
        pages = pt.Pages(list(range(512)), 2048), pt.Pages(order, 2048, 1 << 20)
        a.submit_paged_writes(2048, 1, (src, pages[0]), (desc, pages[1])).wait(LONG_S)
        b.expect_imm_count(1, 2, deadline_s=LONG_S).wait(LONG_S)
        assert words.load_word(0) == 2
        b.dereg_mr(dst)
        with pytest.raises(pt.TransferFailed, match="not registered"):
            a.submit_single_write(1, 1, (src, 0), (desc, 0)).wait(LONG_S)
    right = torch.zeros(3 << 20, dtype=torch.uint8, device=f"cuda:{there}")
    right[9 : 9 + (1 << 20)] = source[7 : 7 + (1 << 20)].to(right.device)
    right[1 << 20 : 2 << 20].view(512, 2048)[torch.tensor(order)] = source[: 1 << 20].view(512, 2048).to(right.device)
    assert torch.equal(target, right)


OTHER_MEMORY = """
import torch
import putget_transfer as pt

with pt.Engine.builder().group(pt.DeviceGroup.nvlink(0)).build() as engine:
    memory = torch.ones(4 << 20, dtype=torch.uint8, device="cuda:0")
    try:
        engine.reg_mr(memory)
    except pt.Unavailable as error:
        print("refused:", error)
    assert int(memory.sum()) == 4 << 20
    # The engine goes on: host memory is another matter.
    engine.alloc_mr(64)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("allocator", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_memory_that_cuda_cannot_share_is_refused_by_name(allocator: str) -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": allocator}
    ran = subprocess.run(
        [sys.executable, "-c", OTHER_MEMORY],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    name = allocator.split(":")[allocator.startswith("backend")]
    assert ran.stdout.startswith("refused:"), ran.stdout
    assert name in ran.stdout
    assert "cudaMalloc" in ran.stdout
