"""The bytes of an expert: described once, moved whole, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from putget.balancer import ExpertBlobs

SLOTS = 4


def experts() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "gate_up": torch.randn(SLOTS, 6, 5, generator=generator).bfloat16(),
        "down": torch.randn(SLOTS, 5, 3, generator=generator).to(torch.float8_e4m3fn),
        "down_scales": torch.randn(SLOTS, 1, generator=generator),
        "bias": torch.arange(SLOTS, dtype=torch.float64),
    }


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(SLOTS, -1).view(torch.uint8)


def test_an_expert_moves_with_all_of_its_tensors() -> None:
    tensors = experts()
    before = {name: as_bytes(one).clone() for name, one in tensors.items()}
    blobs = ExpertBlobs(tensors)
    packed = blobs.pack(1)
    assert packed.dtype == torch.uint8
    assert len(packed) == blobs.slot_bytes >= 60 + 15 + 4 + 8
    blobs.unpack(3, packed)
    for name, one in tensors.items():
        assert torch.equal(as_bytes(one)[3], before[name][1])
        assert torch.equal(as_bytes(one)[:3], before[name][:3])


def test_every_blob_begins_at_16_bytes() -> None:
    blobs = ExpertBlobs(experts())
    assert [(blob.name, blob.offset, blob.num_bytes) for blob in blobs.layout] == [
        ("gate_up", 0, 60),
        ("down", 64, 15),
        ("down_scales", 80, 4),
        ("bias", 96, 8),
    ]
    assert blobs.slot_bytes == 112
    assert blobs.num_slots == SLOTS


def test_pack_takes_memory_of_the_caller() -> None:
    blobs = ExpertBlobs(experts())
    out = torch.zeros(blobs.slot_bytes, dtype=torch.uint8)
    assert blobs.pack(0, out=out) is out
    assert torch.equal(out, blobs.pack(0))


class Experts(nn.Module):
    """As engines have them: parameters, buffers, and tensors that are neither, also in modules inside."""

    def __init__(self) -> None:
        super().__init__()
        tensors = experts()
        self.gate_up = nn.Parameter(tensors["gate_up"], requires_grad=False)
        self.register_buffer("down", tensors["down"], persistent=False)
        self.quant = nn.Module()
        self.quant.scales = tensors["down_scales"]  # a plain attribute
        self.router = nn.Linear(7, 3)

    def named(self) -> dict[str, torch.Tensor]:
        return {"gate_up": self.gate_up, "down": self.down, "scales": self.quant.scales}


def test_a_module_whose_tensors_are_all_named() -> None:
    module = Experts()
    assert ExpertBlobs(module.named(), module=module).slot_bytes
    views = {name: one.data.view(SLOTS, -1) for name, one in module.named().items()}
    assert ExpertBlobs(views, module=module).slot_bytes  # the same memory by another view


@pytest.mark.parametrize(("left_out", "name"), [("gate_up", "gate_up"), ("down", "down"), ("scales", "quant.scales")])
def test_a_tensor_that_would_stay_behind_is_named(left_out: str, name: str) -> None:
    module = Experts()
    named = module.named()
    del named[left_out]
    with pytest.raises(ValueError, match=f"module has {name}, .*first dimension of {SLOTS}, which would stay behind"):
        ExpertBlobs(named, module=module)
    assert ExpertBlobs(named, module=module, shared=(name,)).slot_bytes


def test_a_list_of_tensors_is_looked_into() -> None:
    module = Experts()
    module._extra = [torch.zeros(SLOTS, 2), {"x": torch.zeros(SLOTS, 3)}]
    with pytest.raises(ValueError, match=r"module has _extra\[0\], "):
        ExpertBlobs(module.named(), module=module)
    with pytest.raises(ValueError, match=r"module has _extra\[1\]\['x'\], "):
        ExpertBlobs(module.named(), module=module, shared=("_extra[0]",))


def test_what_shared_names_must_be_there() -> None:
    module = Experts()
    with pytest.raises(ValueError, match="shared names 'nothing', which module does not have"):
        ExpertBlobs(module.named(), module=module, shared=("nothing",))
    with pytest.raises(ValueError, match="shared is given without module"):
        ExpertBlobs(module.named(), shared=("x",))


base = torch.zeros(SLOTS, 6)
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "there is no tensor"),
    ({"a": torch.zeros(SLOTS, 2), "b": torch.zeros(3, 2)}, r"b is \[3, 2\]; a has 4 slots"),
    ({"a": torch.zeros(6, SLOTS).t()}, r"a is \[4, 6\] with strides \[1, 4\]; it must be contiguous"),
    ({"a": torch.tensor(1.0)}, r"a is \[\]; its first dimension must be the slots"),
    ({"a": torch.zeros(SLOTS, 0)}, r"a is \[4, 0\], which has no bytes"),
    ({"a": base, "b": base[:, :]}, "b and a are the same memory"),
    ({"a": torch.zeros(SLOTS), "b": torch.zeros(SLOTS, device="meta")}, "b is on meta, a on cpu"),
    ({"a": [1]}, "a is a list; it must be a tensor"),
]


@pytest.mark.parametrize(("tensors", "message"), BAD)
def test_bad_tensors_are_named(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertBlobs(tensors)


def test_bad_calls_are_named() -> None:
    blobs = ExpertBlobs(experts())
    for slot in (-1, SLOTS):
        with pytest.raises(ValueError, match=f"slot is {slot}, allowed are 0 to 3"):
            blobs.pack(slot)
    for wrong in (torch.zeros(3, dtype=torch.uint8), torch.zeros(blobs.slot_bytes)):
        with pytest.raises(ValueError, match=r"packed is .*it must be contiguous torch.uint8 \[112\] on cpu"):
            blobs.unpack(0, wrong)
    with pytest.raises(ValueError, match="out is "):
        blobs.pack(0, out=torch.zeros(224, dtype=torch.uint8)[::2])
