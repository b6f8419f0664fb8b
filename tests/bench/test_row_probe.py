"""Probes of rows: refusals here; on GPUs `putget ablate --only floor` checks every byte that they move."""

from __future__ import annotations

import pytest
import torch

import putget
from putget_bench.row_probe import RowProbe
from tests.harness import Rank, run_ranks

LAUNCH = putget.tuning.Launch(1, 64, 512, 1)
SENDS = putget.tuning.Launch(1, 64, 512, 1, senders=1)


def refusals(rank: Rank) -> list[str]:
    """A body: what wrong arguments are answered with."""
    slots = torch.zeros(2, rank.size, dtype=torch.int32, device=rank.device)
    rows = torch.zeros(2, 32, dtype=torch.uint8, device=rank.device)
    complaints = []
    with putget.Workspace(rank.comm, 1 << 20, device=rank.device) as workspace:
        probe = RowProbe(workspace)
        for wrong in (
            {"way": "by hand"},
            {"slots": slots[:1]},
            {"slots": slots.long()},
            {"rows": rows.int()},
            {"rows": rows[:, :24].contiguous()},
            {"launch": putget.tuning.Launch(1, 64, 512)},
        ):
            with pytest.raises(ValueError, match=r".") as raised:
                probe.put(**{"slots": slots, "rows": rows, "launch": LAUNCH, **wrong})
            complaints.append(str(raised.value))
        counts = torch.zeros(rank.size, dtype=torch.int32, device=rank.device)
        for wrong in (
            {"num_rows": counts[:1]},
            {"num_rows": counts.long()},
            {"landing": 8},
            {"launch": LAUNCH},
            {"launch": putget.tuning.Launch(1, 64, 512, 1, senders=2)},
        ):
            right = {"num_rows": counts, "launch": SENDS, "offset": 0, "landing": 1024, "slots_of_rank": 2}
            with pytest.raises(ValueError, match=r".") as raised:
                probe.send(slots, out=rows, **{**right, **wrong})
            complaints.append(str(raised.value))
        probe.check()
        if rank.device.type == "cpu":
            with pytest.raises(putget.BackendUnavailable, match="a probe of rows needs memory on a GPU"):
                probe.get(slots, rows, LAUNCH)
            with pytest.raises(putget.BackendUnavailable, match="a probe of rows needs memory on a GPU"):
                probe.send(slots, counts, rows, SENDS, 0, 1024, 2)
    return complaints


def test_wrong_arguments_are_named(device: str) -> None:
    for complaints in run_ranks(2, refusals, mode="thread", device=device):
        words = [
            "way is 'by hand', allowed",
            "slots is (1, 2)",
            "slots is (2, 2) torch.int64",
            "rows is (2, 32) torch.int32",
        ]
        words += ["row_bytes is 24, offset 0 and landing 0, expected", "splits is 0, allowed are 1 to 128"]
        words += ["num_rows is (1,) torch.int32, expected (2,) torch.int32", "num_rows is (2,) torch.int64"]
        words += ["landing 8, expected multiples of 16"]
        words += [f"senders is {n}, allowed are 1 to 1" for n in (0, 2)]
        for complaint, said in zip(complaints, words, strict=True):
            assert said in complaint
