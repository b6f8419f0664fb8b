"""Weights in pinned memory of a trainer, into a model on a GPU: stages overlap, and the bytes are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt
from putget_transfer import weights
from putget_transfer.weights import _kernel

WAIT_S = 60.0
SHAPE = (384, 256)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("watermark", [100_000, 10_000_000])
def test_offloaded_parameters_are_prepared_on_the_gpu(pinned: bool, watermark: int) -> None:
    source = {name: torch.empty(SHAPE, dtype=torch.bfloat16, pin_memory=pinned) for name in "abcd"}
    source["e"] = torch.empty(SHAPE, device="cuda")  # it is read where it lies
    model: dict[str, Any] = {
        "a": torch.zeros(SHAPE, dtype=torch.float8_e4m3fn, device="cuda"),
        "a_scale_inv": torch.zeros(3, 2, device="cuda"),
        "b": torch.zeros(SHAPE, device="cuda"),
        "c": torch.zeros(SHAPE, dtype=torch.float8_e4m3fn, device="cuda"),
        "c_scale_inv": torch.zeros(3, 2, device="cuda"),
        "d": torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda"),
        "e": torch.zeros(SHAPE, dtype=torch.float8_e4m3fn, device="cuda"),
        "e_scale_inv": torch.zeros(3, 2, device="cuda"),
    }

    def load(checkpoint: Any) -> None:
        for name, tensor in checkpoint:
            model[name].copy_(tensor)

    params = weights.describe(source, rank=0)
    slots = weights.record(model, weights.checkpoint(params, quantised=["a", "c", "e"]), load=load)
    schedule = weights.plan(params, [slots], task_bytes=40_000)
    assert len(schedule.tasks(0)) > 4
    engines = [pt.Engine.builder().group(pt.DeviceGroup.nvlink(0)).build() for _ in range(2)]
    rollout = weights.Rollout(engines[1], slots, schedule, 0)
    assert _kernel.is_loaded("cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    trainer = weights.Trainer(engines[0], schedule, 0, source, watermark_bytes=watermark, device="cuda")
    for version in (1, 2):
        for name, tensor in source.items():
            made = torch.Generator().manual_seed(10 * version + ord(name))
            tensor.copy_(torch.randn(SHAPE, generator=made))
        offers = rollout.expect(version, {0: trainer.address()}, WAIT_S)
        torch.cuda.reset_peak_memory_stats()
        report = trainer.publish(version, WAIT_S, offers=[offers[0]])
        # By torch's own count, in units of 512 bytes: nothing comes on top of what is counted.
        most = max(watermark, *(work.total for work in trainer._works))
        assert report.peak_bytes <= most
        assert torch.cuda.max_memory_allocated() - before <= most + 512
        assert rollout.ready(WAIT_S)
        rollout.commit(version)
        torch.cuda.synchronize()
        for name in "ace":
            wanted, scales = weights.quantise(source[name].cpu())
            assert torch.equal(model[name].cpu().view(torch.uint8), wanted.view(torch.uint8))
            assert torch.equal(model[name + "_scale_inv"].cpu(), scales)
        for name in "bd":
            assert torch.equal(model[name].cpu(), source[name].to(model[name].dtype))
        # By the GPU's own clock: calls return before copies and kernels are done.
        assert report.gather_s > 0
        assert report.prepare_s > 0
    for engine in engines:
        engine.close()
