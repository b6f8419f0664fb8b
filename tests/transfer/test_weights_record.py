"""Recorded slots against plain loads, views against plain slicing, and what a recording refuses by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import torch

from putget_transfer import weights
from putget_transfer.weights._views import compose, locate
from tests.transfer import weights_models as models

Weights = Iterable[tuple[str, torch.Tensor]]


def carried_out(slots: weights.Slots, values: dict[str, torch.Tensor]) -> None:
    """Copy values to the memory of slots."""
    for slot in slots:
        dtype = getattr(torch, slot.dtype)
        flat = slots.tensors[slot.memory].view(dtype)
        strides = [stride // dtype.itemsize for stride in slot.strides]
        part = tuple(slice(start, start + size) for start, size in zip(slot.start, slot.size, strict=True))
        flat.as_strided(slot.size, strides, slot.offset // dtype.itemsize).copy_(values[slot.name][part])


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_recorded_slots_are_a_plain_load(tp: int, rank: int) -> None:
    engine = models.Engine(tp, rank)
    for param in engine.parameters():
        param.data.fill_(7.0)
    slots = weights.record(engine, weights.checkpoint(weights.describe(models.Source(), rank=0)))
    assert all((param == 7.0).all() for param in engine.parameters())  # nothing was copied
    carried_out(slots, models.values(1))
    assert models.version_of(engine, [1]) == [1]


class Loader(torch.nn.Module):
    """A model with one parameter and a loader of its own."""

    def __init__(self, shape: tuple[int, ...], load: Any) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(shape))
        self.load = load

    def load_weights(self, weights: Weights) -> None:
        for _, tensor in weights:
            self.load(self.w.data, tensor)


LOADS = {
    "transposed": ((6, 4), lambda own, new: own.copy_(new.t())),
    "contiguous": ((6, 4), lambda own, new: own.copy_(new.t().contiguous())),
    "a part of a copy": ((6, 2), lambda own, new: own.copy_(new.t().contiguous()[:, 1:3])),
    "flat": ((24,), lambda own, new: own.copy_(new.reshape(-1))),
    "interleaved": ((2, 2, 6), lambda own, new: own.copy_(new.view(2, 2, 6).transpose(0, 1))),
    "another type first": ((4, 6), lambda own, new: own.copy_(new.to(torch.float64))),
    "rows in reverse": ((4, 6), lambda own, new: [own[3 - at].copy_(new[at]) for at in range(4)]),
    "padded": ((5, 6), lambda own, new: (own[:4].copy_(new), own[4:].fill_(0))),
    "one more dimension": ((1, 4, 6), lambda own, new: own.copy_(new.unsqueeze(0))),
    "twice": ((4, 6), lambda own, new: (own.copy_(new), own.copy_(new))),
}


@pytest.mark.parametrize("name", LOADS)
def test_loaders_may_slice_and_reorder(name: str) -> None:
    shape, load = LOADS[name]
    values = {"w": torch.randn(4, 6)}
    recorded, plain = Loader(shape, load), Loader(shape, load)
    slots = weights.record(recorded, weights.describe(values, rank=0))
    carried_out(slots, values)
    plain.load_weights(values.items())
    assert torch.equal(recorded.w, plain.w)


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (lambda own, new: own.copy_(new * 2), "computed from the checkpoint's"),
        (lambda own, new: own.copy_(torch.cat([new[:2], new[2:]])), "computed from the checkpoint's"),
        (lambda own, new: own.add_(new), "aten::add_.Tensor changes the model"),
        (lambda own, new: own.fill_(new[0, 0].item()), "its loader needs more"),
        (lambda own, new: own.copy_(new[:1]), "'w'"),
        (lambda own, new: None, "nothing for 'w'"),
    ],
)
def test_loaders_that_compute_are_refused(load: Any, words: str) -> None:
    model = Loader((4, 6), load)
    with pytest.raises(ValueError, match=words):
        weights.record(model, weights.describe({"w": torch.zeros(4, 6)}, rank=0))
    assert not model.w.any()


def test_parameters_that_no_checkpoint_has_are_named_or_ignored() -> None:
    model = {"w": torch.zeros(4), "extra": torch.zeros(2)}
    entries = weights.describe({"w": torch.zeros(4)}, rank=0)
    with pytest.raises(ValueError, match="nothing for 'extra'"):
        weights.record(model, entries)
    slots = weights.record(model, entries, ignored=["extra"])
    assert (len(slots), slots.memory) == (1, [("w", 16)])
    with pytest.raises(ValueError, match="'b' came"):
        weights.record(model, weights.describe({"b": torch.zeros(4)}, rank=0))
    with pytest.raises(ValueError, match="no parameter is called 'b'"):
        weights.checkpoint(entries, quantised=["b"])
    norm = weights.Param("norm", (8,), "float32", weights.Layout(()))
    with pytest.raises(ValueError, match=r"quantised: 'norm' of shape \(8,\) came; blocks have 2 dimensions"):
        weights.checkpoint([norm], quantised=["norm"])
    with pytest.raises(ValueError, match="scale: 'e8m0' came"):
        weights.checkpoint([norm], scale="e8m0")


def test_quantised_parameters_have_slots_for_values_and_scales() -> None:
    params = weights.describe({"w": torch.zeros(200, 300)}, rank=0)
    model = {"w": torch.zeros(200, 300, dtype=torch.float8_e4m3fn), "w_scale_inv": torch.zeros(2, 3)}
    slots = weights.record(model, weights.checkpoint(params, quantised=["w"], scale="ue8m0"))
    assert [(slot.name, slot.recipe, slot.size) for slot in slots] == [
        ("w", "fp8_ue8m0", (200, 300)),
        ("w", "fp8_ue8m0_scale", (2, 3)),
    ]


@st.composite
def viewed(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor:
    """Return some view of the numbers of a tensor's elements."""
    view = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["narrow", "transpose", "unsqueeze", "join", "split"]))
        dim = draw(st.integers(0, view.dim() - 1))
        size = view.shape[dim]
        if kind == "narrow":
            start = draw(st.integers(0, size - 1))
            view = view.narrow(dim, start, draw(st.integers(1, size - start)))
        elif kind == "transpose":
            view = view.transpose(0, dim)
        elif kind == "unsqueeze":
            view = view.unsqueeze(dim)
        elif kind == "join" and dim and view.stride(dim - 1) == size * view.stride(dim):
            view = view.flatten(dim - 1, dim)
        elif kind == "split":
            view = view.unflatten(dim, (draw(st.sampled_from([at for at in range(1, size + 1) if size % at == 0])), -1))
    return view


SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_view_is_the_boxes_that_it_falls_into(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    base = torch.arange(torch.Size(shape).numel()).reshape(shape)
    view = data.draw(viewed(shape))
    try:
        parts = locate(view, shape)
    except ValueError:
        assume(False)
    found = torch.full(view.shape, -1)
    for part in parts:
        strides, offset = part.strides(found.stride())
        box = tuple(slice(start, start + size) for start, size in zip(part.start, part.size, strict=True))
        place = found.as_strided(part.size, strides, offset)
        assert (place == -1).all()
        place.copy_(base[box])
    assert torch.equal(found, view)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_part_of_a_copy_is_found_in_what_was_copied(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    base = torch.arange(torch.Size(shape).numel()).reshape(shape)
    view = data.draw(viewed(shape))
    part = data.draw(viewed(tuple(view.shape)))
    try:
        (through,) = locate(view, shape)
        boxes = [compose(box, through) for box in locate(part, tuple(view.shape))]
    except ValueError:
        assume(False)
    copy = view.contiguous().flatten()[part.flatten()].reshape(part.shape)
    found = torch.full(part.shape, -1)
    for box in boxes:
        strides, offset = box.strides(found.stride())
        own = tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))
        found.as_strided(box.size, strides, offset).copy_(base[own])
    assert torch.equal(found, copy)
