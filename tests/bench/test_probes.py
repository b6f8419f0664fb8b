"""Probes of plain bytes and of rows: what they move, and what they refuse."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from putget_bench import probe_library
from putget_bench.copy_probe import CopyProbe
from tests.harness import Rank, run_ranks

KINDS = ("write", "read", "copy")
NUM_BYTES = 1024
RIGHT = {"row_bytes": 16, "num_tokens": 1, "blocks": 1, "threads": 32, "segment_bytes": 512, "splits": 1}


def meet(rank: Rank) -> None:
    rank.comm.synchronize(rank.device)
    rank.comm.compare("test", {}, 20.0)


def copy_between_ranks(rank: Rank, kind: str) -> tuple[int, list[int]]:
    """A body: how many bytes there are, and how many of each rank's number lie here after the probe."""
    probe = CopyProbe(rank.comm, NUM_BYTES, rank.device)
    memory = probe.workspace.memory.tensor()
    memory.fill_(rank.rank + 1)
    meet(rank)
    probe.move(kind, NUM_BYTES)
    meet(rank)
    here = [int((memory == src + 1).sum()) for src in range(rank.size)]
    meet(rank)
    probe.close()
    return len(memory), here


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_moves_its_bytes_and_no_others(kind: str, device: str) -> None:
    for rank, (num_bytes, here) in enumerate(run_ranks(3, copy_between_ranks, kind, mode="thread", device=device)):
        assert here == [num_bytes - 2 * NUM_BYTES if src == rank else NUM_BYTES for src in range(3)]


def copy_wrongly(rank: Rank) -> list[str]:
    complaints = []
    probe = CopyProbe(rank.comm, 16, rank.device)
    for kind, num_bytes, num_sms in (
        ("fetch", 16, None),
        *((kind, num_bytes, None) for kind in KINDS for num_bytes in (8, 1 << 30, -16)),
        ("write", 16, 0),
        ("write", 16, 1 << 17),
        ("write", 16, 1 << 32),
    ):
        with pytest.raises(ValueError, match=r".") as raised:
            probe.move(kind, num_bytes, num_sms)
        complaints.append(str(raised.value))
    with pytest.raises(ValueError, match=r"^bytes_per_peer is "):
        CopyProbe(rank.comm, 1 << 41, rank.device)
    probe.close()
    return complaints


def test_a_wrong_copy_is_named(device: str) -> None:
    for complaints in run_ranks(2, copy_wrongly, mode="thread", device=device):
        assert complaints[0].startswith("kind is 'fetch', expected one of")
        assert all(words.startswith("bytes_per_peer is ") for words in complaints[1:10]), complaints
        assert all(words.startswith("num_sms is ") for words in complaints[10:]), complaints


def memory_on_cpu() -> tuple[probe_library.ProbeMemory, torch.Tensor]:
    bytes_ = torch.zeros(1 << 16, dtype=torch.uint8)
    memory = probe_library.ProbeMemory(device=0, ep_size=1, ep_rank=0, num_bytes=len(bytes_))
    memory.base[0] = bytes_.data_ptr()
    return memory, bytes_


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("row_bytes", {"row_bytes": 1 << 27}),
        ("row_bytes", {"row_bytes": 24}),
        ("num_tokens", {"num_tokens": 1 << 30}),
        ("offset", {"offset": 1 << 60}),
        ("landing", {"landing": 1 << 60}),
        ("first_slot", {"first_slot": 1 << 31}),
        ("slots_of_rank", {"slots_of_rank": 1 << 31}),
        ("blocks", {"blocks": 257}),
        ("threads", {"threads": 800}),
        ("threads", {"threads": 33}),
        ("threads", {"splits": 3}),
        ("segment_bytes", {"segment_bytes": 1 << 31}),
        ("num_rows", {"kind": probe_library.SEND}),
        ("kind", {"kind": 3}),
    ],
)
def test_a_probe_of_rows_bounds_every_field(name: str, fields: dict[str, Any]) -> None:
    memory, _ = memory_on_cpu()
    args = probe_library.RowsArgs(**{**RIGHT, **fields})
    with pytest.raises(ValueError, match=rf"^{name} is "):
        probe_library.call("putget_probe_rows", ctypes.byref(memory), ctypes.byref(args))


@pytest.mark.parametrize(
    ("name", "fields"), [("ep_size", {"ep_size": 129}), ("ep_rank", {"ep_rank": 1}), ("base", {"ep_size": 2})]
)
def test_a_memory_is_checked(name: str, fields: dict[str, int]) -> None:
    memory, _ = memory_on_cpu()
    for field, value in fields.items():
        setattr(memory, field, value)
    args = probe_library.CopyArgs(bytes_per_peer=16)
    with pytest.raises(ValueError, match=rf"^{name} is "):
        probe_library.call("putget_probe_copy", ctypes.byref(memory), ctypes.byref(args))


@pytest.mark.parametrize("structure", [probe_library.ProbeMemory, probe_library.CopyArgs, probe_library.RowsArgs])
def test_no_structure_takes_what_does_not_fit(structure: Any) -> None:
    whole = (ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64)
    names = [name for name, kind in structure._fields_ if kind in whole and name not in ("size", "magic")]
    assert names
    for name in names:
        with pytest.raises(ValueError, match=f"{name} is [0-9]+, which does not fit"):
            structure(**{name: (1 << 64) + 5})


@pytest.mark.parametrize("size", [0, 129, (1 << 32) - 1])
def test_flags_of_too_many_ranks_are_refused(size: int) -> None:
    assert probe_library.library().putget_probe_flag_bytes(size) == 0
    assert b"ep_size" in probe_library.library().putget_probe_last_error()


def test_another_version_is_refused() -> None:
    memory, _ = memory_on_cpu()
    memory.magic = 7
    with pytest.raises(ValueError, match="another version of the header"):
        probe_library.call("putget_probe_load", ctypes.byref(memory))
