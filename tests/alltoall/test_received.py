"""Received rows are of one round: what was returned in an earlier one is refused in a later one."""

from __future__ import annotations

import pytest
import torch

import putget
from tests.harness import Rank, run_ranks


def group_old_rows(rank: Rank) -> dict[str, str]:
    """A body: groups the rows of every kind of earlier round, then those of the open one."""
    said: dict[str, str] = {}
    ids = torch.tensor([[0, 2]], dtype=torch.int32, device=rank.device)
    row = torch.ones(1, 4, device=rank.device)
    weights = row[:, :2].contiguous()

    def expect(name: str, old: putget.Received) -> None:
        with pytest.raises(putget.ProtocolMisuse) as caught:
            old.expert_major()
        said[name] = str(caught.value)

    with rank.all_to_all() as a2a:
        first = a2a.dispatch(ids, weights, row)
        first.expert_major()
        a2a.combine()
        expect("ended", first)
        second = a2a.dispatch(ids, weights, row)
        expect("one round later", first)
        third = a2a.dispatch(ids, weights, row)  # ends the second by releasing it
        expect("two rounds later", first)
        expect("a round that was left open", second)
        assert third.flat.topk_ids.data_ptr() == first.flat.topk_ids.data_ptr()
        grouped = third.expert_major()
        assert grouped.num_rows.tolist() == third.expert_major().num_rows.tolist() == [rank.size, 0]
        a2a.combine()
        a2a.dispatch_start(ids, weights, row)
        expect("between halves", third)
        fourth = a2a.dispatch_finish()
        expect("behind halves", third)
        fourth.expert_major()
        a2a.dispatch_start(ids, weights, row)
        expect("started over an open round", fourth)
        fifth = a2a.dispatch_finish()
        a2a.release()
        expect("released", fifth)
        with rank.all_to_all(workspace=a2a.workspace) as other:
            sixth = a2a.dispatch(ids, weights, row)
            other.dispatch(ids, weights, row)
            expect("another object's round", sixth)
            other.release()
    return said


def test_rows_of_an_earlier_round_are_refused(device: str) -> None:
    for said in run_ranks(2, group_old_rows, mode="thread", device=device):
        assert len(said) == 9
        assert said["one round later"] == (
            "expert_major: these rows are of dispatch 1 of this object, open is dispatch 2: "
            "take what the last dispatch returned"
        )
        for name, words in said.items():
            assert words.startswith("expert_major: "), name
