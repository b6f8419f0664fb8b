"""Objects of one engine are refused by every other, before any effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt

LONG_S = 60.0


class Mine(NamedTuple):
    """Objects that an engine hands out."""

    engine: pt.Engine
    handle: pt.MrHandle
    desc: pt.MrDesc
    group: pt.PeerGroup
    prepared: pt.Prepared
    template: pt.ScatterTemplate
    watcher: pt.UvmWatcher


def make(network: pt.SimNetwork) -> Mine:
    engine = pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build()
    handle, desc = engine.alloc_mr(64)
    group, connected = engine.add_peer_group([engine.main_address()], deadline_s=LONG_S)
    connected.wait(LONG_S)
    prepared = engine.prepare_writes([(8, (handle, 0), (desc, 0))])
    return Mine(
        engine, handle, desc, group, prepared, engine.scatter_template(None, handle, [desc]), engine.alloc_uvm_watcher()
    )


@pytest.fixture
def two() -> Iterator[tuple[Mine, Mine]]:
    network = pt.SimNetwork(seed=3)
    a, b = make(network), make(network)
    yield a, b
    a.engine.close()
    b.engine.close()


PAGES = pt.Pages([0], 8)
# By the argument that is refused: calls of engine `b` with something of `a`.
CALLS: dict[str, Callable[[Mine, Mine], object]] = {
    "handle: dereg_mr": lambda a, b: b.engine.dereg_mr(a.handle),
    "handle: dereg_mrs": lambda a, b: b.engine.dereg_mrs([b.handle, a.handle]),
    "handle: mirror_imm": lambda a, b: b.engine.mirror_imm(1, a.handle, 0),
    "handle: mirror_imms": lambda a, b: b.engine.mirror_imms(1, 2, a.handle, 0),
    "src: submit_single_write": lambda a, b: b.engine.submit_single_write(8, 1, (a.handle, 0), (b.desc, 0)),
    "src: submit_paged_writes": lambda a, b: b.engine.submit_paged_writes(8, 1, (a.handle, PAGES), (b.desc, PAGES)),
    "src: submit_writes": lambda a, b: b.engine.submit_writes(1, [(8, (a.handle, 0), (b.desc, 0))]),
    "src: prepare_writes": lambda a, b: b.engine.prepare_writes([(8, (a.handle, 0), (b.desc, 0))]),
    "src: prepare_paged_writes": lambda a, b: b.engine.prepare_paged_writes(8, (a.handle, PAGES), (b.desc, PAGES)),
    "dst: submit_read": lambda a, b: b.engine.submit_read(8, 1, (b.desc, 0), (a.handle, 0)),
    "dst: submit_paged_reads": lambda a, b: b.engine.submit_paged_reads(8, 1, (b.desc, PAGES), (a.handle, PAGES)),
    "dst: submit_reads": lambda a, b: b.engine.submit_reads(1, [(8, (b.desc, 0), (a.handle, 0))]),
    "src: submit_scatter": lambda a, b: b.engine.submit_scatter(None, 1, a.handle, [pt.ScatterDst(8, 0, (b.desc, 0))]),
    "group: submit_scatter": lambda a, b: b.engine.submit_scatter(
        a.group, 1, b.handle, [pt.ScatterDst(8, 0, (a.desc, 0))]
    ),
    "group: submit_barrier": lambda a, b: b.engine.submit_barrier(a.group, 1, [a.desc]),
    "group: scatter_template": lambda a, b: b.engine.scatter_template(a.group, b.handle, [a.desc]),
    "src: scatter_template": lambda a, b: b.engine.scatter_template(None, a.handle, [a.desc]),
    "template: submit_template": lambda a, b: b.engine.submit_template(a.template, 1, [(8, 0, 0)]),
    "prepared: submit_prepared": lambda a, b: b.engine.submit_prepared(a.prepared, 1),
    "prepared: submit_when": lambda a, b: b.engine.submit_when(b.watcher, 1, a.prepared, 1),
    "watcher: submit_when": lambda a, b: b.engine.submit_when(a.watcher, 1, b.prepared, 1),
}


@pytest.mark.parametrize("what", CALLS)
def test_another_engine_s_is_a_value_error_without_effect(what: str, two: tuple[Mine, Mine]) -> None:
    a, b = two
    before = [re.findall(r"submitted_total \d+", one.engine.metrics_text()) for one in two]
    with pytest.raises(ValueError, match=rf"^{what.split(':')[0]}: another engine's came"):
        CALLS[what](a, b)
    assert [re.findall(r"submitted_total \d+", one.engine.metrics_text()) for one in two] == before
    # Both registrations are in force, and each engine still ends its own.
    for one, other in ((a, b), (b, a)):
        other.engine.submit_single_write(8, 7, (other.handle, 0), (one.desc, 0)).wait(LONG_S)
        one.engine.expect_imm_count(7, 1, deadline_s=LONG_S).wait(LONG_S)
        assert one.engine.imm_count(1) == 0
    b_handle, _ = b.engine.alloc_mr(8)
    b.engine.dereg_mr(b_handle)


def test_a_closed_engine_refuses_another_one_s_handle_too(two: tuple[Mine, Mine]) -> None:
    a, b = two
    own, _ = b.engine.alloc_mr(8)
    b.engine.close()
    with pytest.raises(ValueError, match="another engine's"):
        b.engine.dereg_mr(a.handle)
    b.engine.dereg_mr(own)
    a.engine.submit_single_write(8, None, (a.handle, 0), (a.desc, 0)).wait(LONG_S)


OVERLAPS: dict[str, tuple[pt.Pages, pt.Pages]] = {
    "page 1 came twice": (pt.Pages([0, 2, 3], 8), pt.Pages([1, 0, 1], 8)),
    "page 5 came twice": (pt.Pages([0, 2], 8), pt.Pages([5, 5], 0)),
    r"pages of 8 bytes at 4 and 8 came": (pt.Pages([0, 2], 8), pt.Pages([1, 2], 4)),
    r"pages of 8 bytes at 16 and 16 came": (
        pt.Pages([0, 1], 8, planes=2, plane_stride=16),
        pt.Pages([1, 2], 16, planes=2),
    ),
    r"pages of 8 bytes at 0 and 4 came": (
        pt.Pages([0, 1], 8, planes=2, plane_stride=16),
        pt.Pages([0, 1], 16, planes=2, plane_stride=4),
    ),
}


@pytest.mark.parametrize("words", OVERLAPS)
def test_target_pages_that_share_bytes_are_a_value_error(words: str, two: tuple[Mine, Mine]) -> None:
    a, b = two
    sources, targets = OVERLAPS[words]
    for call in (
        lambda: a.engine.submit_paged_writes(8, 1, (a.handle, sources), (b.desc, targets)),
        lambda: a.engine.prepare_paged_writes(8, (a.handle, sources), (b.desc, targets)),
        lambda: a.engine.submit_paged_reads(8, 1, (b.desc, sources), (a.handle, targets)),
    ):
        with pytest.raises(ValueError, match=f"^dst: {words}"):
            call()
    assert b.engine.imm_count(1) == 0
    # The same page may be read twice, and planes may lie inside each other.
    a.engine.submit_paged_writes(8, 1, (a.handle, pt.Pages([1, 1], 8)), (b.desc, pt.Pages([1, 0], 8))).wait(LONG_S)
    inside = pt.Pages([1, 0], 16, planes=2, plane_stride=8)
    a.engine.submit_paged_writes(8, 1, (a.handle, inside), (b.desc, inside)).wait(LONG_S)
