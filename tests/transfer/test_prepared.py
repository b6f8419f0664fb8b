"""Prepared writes, planes of pages, arrays of indices, templates and triggers, from Python."""

from __future__ import annotations

import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt

LONG_S = 60.0


@pytest.fixture
def pair() -> Iterator[tuple[pt.Engine, pt.Engine]]:
    network = pt.SimNetwork(seed=12)
    with (
        pt.Engine.builder().group(pt.DeviceGroup.sim(network, 2)).build() as a,
        pt.Engine.builder().group(pt.DeviceGroup.sim(network, 2)).build() as b,
    ):
        yield a, b


@pytest.mark.parametrize(
    "indices",
    [
        [3, 0, 5],
        (3, 0, 5),
        np.array([3, 0, 5]),
        np.array([3, 0, 5], dtype=np.int32),
        np.array([3, 0, 5], dtype=np.uint64),
        torch.tensor([3, 0, 5]),
        torch.tensor([3, 0, 5], dtype=torch.int32),
        array.array("I", [3, 0, 5]),
        range(0, 3),
    ],
    ids=lambda indices: f"{type(indices).__module__}.{getattr(indices, 'dtype', type(indices).__name__)}",
)
def test_page_indices_come_from_lists_and_arrays(indices: Any) -> None:
    assert pt.Pages(indices, 64).indices == list(indices)


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        (np.array([1.0]), "type 'd' with 1 dimensions"),
        (np.zeros((2, 2), dtype=np.int64), "2 dimensions"),
        (np.arange(8)[::2], "contiguous"),
        (np.array([4, -1]), "-1 came"),
        (torch.tensor([-2], dtype=torch.int32), "-2 came"),
        ([-1], "numbers from 0"),
        (np.array([1], dtype=np.int16), "type 'h'"),
    ],
)
def test_other_page_indices_are_refused(indices: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pt.Pages(indices, 64)


def test_planes_are_written_plane_by_plane(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    source = torch.randint(0, 255, (2, 8, 32), dtype=torch.uint8)
    target = torch.zeros(2, 10, 32, dtype=torch.uint8)
    (src, _), (_dst, desc) = a.reg_mr(source), b.reg_mr(target)
    come, go = torch.tensor([5, 1, 2]), np.array([0, 9, 4])
    from_pages = pt.Pages(come, 32, planes=2, plane_stride=8 * 32)
    to_pages = pt.Pages(go, 32, planes=2, plane_stride=10 * 32)
    prepared = a.prepare_paged_writes(32, (src, from_pages), (desc, to_pages))
    for count in (1, 2):
        target.zero_()
        a.submit_prepared(prepared, 1).wait(LONG_S)
        b.expect_imm_count(1, count, deadline_s=LONG_S).wait(LONG_S)
        assert torch.equal(target[:, go], source[:, come])
        assert int((target != 0).any(-1).sum()) <= 6
    with pytest.raises(ValueError, match="page 9 of plane 2"):
        a.submit_paged_writes(32, None, (src, from_pages), (desc, pt.Pages(go, 32, planes=3, plane_stride=10 * 32)))
    with pytest.raises(ValueError, match="another engine"):
        b.submit_prepared(prepared, 1)


def test_many_ranges_are_one_transfer_and_one_count(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    sources = [bytearray([at + 1]) * 100 for at in range(3)]
    targets = [bytearray(300) for _ in range(2)]
    handles = [a.reg_mr(source)[0] for source in sources]
    registered = [b.reg_mr(target) for target in targets]
    items = [(50, (handles[at % 3], at), (registered[at % 2][1], 50 * at)) for at in range(6)]
    a.submit_writes(7, items)
    b.expect_imm_count(7, 1, deadline_s=LONG_S).wait(LONG_S)
    for at in range(6):
        assert targets[at % 2][50 * at : 50 * at + 50] == bytes([at % 3 + 1]) * 50
    # Nothing counts a second time.
    a.submit_writes(7, items).wait(LONG_S)
    b.expect_imm_count(7, 2, deadline_s=LONG_S).wait(LONG_S)
    assert b.imm_count(7) == 2
    with pytest.raises(ValueError, match="items"):
        a.submit_writes(None, [])
    with pytest.raises(ValueError, match="src: bytes 60 to 110"):
        a.prepare_writes([(50, (handles[0], 60), (registered[0][1], 0))])
    with pytest.raises(ValueError, match="items"):
        a.prepare_writes([(-1, (handles[0], 0), (registered[0][1], 0))])


def test_a_template_takes_parts(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    source, target = bytearray(range(256)), bytearray(256)
    (src, _), (_dst, desc) = a.reg_mr(source), b.reg_mr(target)
    template = a.scatter_template(None, src, [desc, desc])
    a.submit_template(template, 3, [(10, 0, 100), (0, 0, 0)]).wait(LONG_S)
    a.submit_template(template, 3, [(5, 200, 0), (6, 40, 250)]).wait(LONG_S)
    b.expect_imm_count(3, 4, deadline_s=LONG_S).wait(LONG_S)
    assert target[100:110] == source[:10]
    assert target[:5] == source[200:205]
    assert target[250:] == source[40:46]
    with pytest.raises(ValueError, match="1 came; the template has 2"):
        a.submit_template(template, 3, [(1, 0, 0)])


def test_a_word_starts_prepared_writes(pair: tuple[pt.Engine, pt.Engine]) -> None:
    a, b = pair
    source, target = bytearray(b"later"), bytearray(5)
    (src, _), (_dst, desc) = a.reg_mr(source), b.reg_mr(target)
    prepared = a.prepare_writes([(5, (src, 0), (desc, 0))])
    word = a.alloc_uvm_watcher()
    waiting = a.submit_when(word, 2, prepared, 9, deadline_s=LONG_S)
    word.store(1)
    with pytest.raises(TimeoutError):
        waiting.wait(0.05)
    assert b.imm_count(9) == 0
    word.store(2)
    waiting.wait(LONG_S)
    b.expect_imm_count(9, 1, deadline_s=LONG_S).wait(LONG_S)
    assert target == source
    ended = a.submit_when(word, 3, prepared, 9, deadline_s=LONG_S)
    assert ended.cancel()
    with pytest.raises(pt.TransferFailed, match="cancelled"):
        ended.wait(LONG_S)
