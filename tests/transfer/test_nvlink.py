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
import sys
import torch
import torch.distributed._symmetric_memory as symmetric
import putget_transfer as pt

length, there = 45 << 20, f"cuda:{torch.cuda.device_count() - 1}"
empty = symmetric.empty if sys.argv[1] == "symmetric" else torch.empty
source = empty(length, dtype=torch.uint8, device="cuda:0").random_(0, 256)
target = empty(length, dtype=torch.uint8, device=there).zero_()
torch.cuda.synchronize(0)
torch.cuda.synchronize(there)
builder = pt.Engine.builder
with (
    builder().group(pt.DeviceGroup.nvlink(0)).build() as a,
    builder().group(pt.DeviceGroup.nvlink(torch.device(there).index)).build() as b,
):
    try:
        (src, _), (dst, desc) = a.reg_mr(source), b.reg_mr(target)
    except pt.Unavailable as error:
        print("refused:", error)
        # The engine goes on: host memory is another matter.
        a.alloc_mr(64)
    else:
        a.submit_single_write(length - 5, 1, (src, 5), (desc, 2)).wait(60.0)
        b.expect_imm_count(1, 1, deadline_s=60.0).wait(60.0)
        assert torch.equal(target[2 : length - 3], source[5:].to(there)) and int(target[:2].sum()) == 0
        print("shared")
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("allocator", ["expandable_segments:True", "symmetric", "backend:cudaMallocAsync"])
def test_memory_of_other_allocators_is_shared_or_refused_by_name(allocator: str) -> None:
    environment = dict(os.environ)
    if ":" in allocator:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    ran = subprocess.run(
        [sys.executable, "-c", OTHER_MEMORY, allocator],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    print(f"{allocator}: {ran.stdout}")
    if allocator == "backend:cudaMallocAsync":
        assert ran.stdout.startswith("refused:")
        assert "cudaMalloc " in ran.stdout
        assert "cudaMallocAsync" in ran.stdout
    elif not ran.stdout.startswith("shared"):
        # Whether torch asks for file descriptors depends on its version and the machine.
        assert ran.stdout.startswith("refused:")
        assert "file descriptor" in ran.stdout
