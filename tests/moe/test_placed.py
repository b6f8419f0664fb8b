"""ExpertParallelMoE with replicas: the oracle's bits for the placement of each round, in BF16 and in FP8."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from putget import PeerLeft, PutgetError, reference, reference_moe
from putget.balancer import Placement, ReplicaChoice
from putget.moe import ExpertParallelMoE
from putget.moe.experts import Bf16Experts, Fp8Experts
from putget.moe.loading import DenseState, load_networks
from tests.harness import Rank, run_ranks
from tests.moe.dense import Dense, relative_error
from tests.moe.layers import make_layer, options_of, tolerance

ROUNDS = ((3, 0, 8, 1), (8, 5, 0, 0), (0, 0, 0, 0), (7, 8, 8, 6))
MOST = 8  # tokens of a rank
VALID = 5  # in the last round the rest is padding


def placement_of(num_experts: int, num_slots: int, step: int) -> Placement:
    """Every expert somewhere, the rest at random, an empty slot where there is room for one."""
    rng = np.random.default_rng(step)
    slots = np.concatenate([np.arange(num_experts), rng.integers(0, num_experts, num_slots - num_experts)])
    if num_slots > num_experts + 1:
        slots[-1] = -1
    return Placement.of(rng.permutation(slots), num_experts)


def flat(rows: Tensor) -> Tensor:
    """[ep_size, max_rows, ...] as the workspace has it: slot-major."""
    return rows.transpose(0, 1).flatten(0, 1)


def experts_of(layer: ExpertParallelMoE, placement: Placement, rank: int, dense: Dense) -> Bf16Experts | Fp8Experts:
    """A rank's experts, made anew."""
    each = placement.num_replicas // layer.a2a.ep_size
    held = placement.physical_to_logical[0].tolist()[rank * each :][:each]
    sizes = (each, dense.hidden, dense.intermediate, dense.gate, layer.device)
    kind = type(layer.experts)
    experts = kind(*sizes, row_dtype=layer.experts.row_dtype) if isinstance(layer.experts, Fp8Experts) else kind(*sizes)
    load_networks(experts, [f"experts.{e}" if e >= 0 else None for e in held], DenseState(dense.state()))
    return experts


def oracle(
    layer: ExpertParallelMoE, dense: Dense, placement: Placement, inputs: list[Tensor], num_valid: int | None
) -> list[Tensor]:
    """Each rank's result by putget.reference: routes, groups and sums in plain torch."""
    ranks = range(layer.a2a.ep_size)
    each = placement.num_replicas // len(ranks)
    sent, addends = [], []
    for rank, x in zip(ranks, inputs, strict=True):
        ids, weights = layer.router(x)
        slots = ReplicaChoice(placement, how=layer.choose.how, ep_size=len(ranks), ep_rank=rank)(
            ids, num_valid_tokens=None if num_valid is None else torch.tensor([num_valid], dtype=torch.int32)
        )
        payloads = layer.experts.prepare(x)
        sent.append(reference.Sent(slots, weights, payloads, num_valid))
        addends.append(layer.run_shared(payloads))
    owners = torch.arange(placement.num_replicas) // each
    routings, arrived = reference.dispatch(sent, owners, max_rows=MOST)
    rows = []
    for rank in ranks:
        came = arrived[rank]
        grouped = reference_moe.expert_major(came.topk_ids, came.topk_weights, came.num_tokens, owners, rank)
        taken = [flat(p)[grouped.source_rows.clamp(min=0).long()] for p in came.payloads]
        out = experts_of(layer, placement, rank, dense)(taken, grouped, 1)
        summed = reference_moe.finalize(out, grouped.positions, flat(came.topk_weights))
        rows.append(summed.view(MOST, len(ranks), -1).transpose(0, 1))
    return [reference.combine(routings[rank], rows, rank, addends[rank]) for rank in ranks]


def play(rank: Rank, dense: Dense, num_slots: int, changes: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """A body: what came and what should have; a placement for each round, of which the third moves no weights."""
    found = []
    first = placement_of(dense.num_experts, num_slots, 0)
    with make_layer(rank, dense, placement=first, count_experts=True, **changes) as layer:
        counted = torch.zeros(dense.num_experts, dtype=torch.int32)
        for index, tokens in enumerate(ROUNDS):
            placement = placement_of(dense.num_experts, num_slots, index)
            if index:
                layer.set_placement(placement, dense.state())
            num_valid = VALID if index == len(ROUNDS) - 1 else None
            inputs = [dense.tokens(r, tokens[r], index) for r in range(layer.a2a.ep_size)]
            count = None if num_valid is None else torch.tensor([num_valid], dtype=torch.int32)
            got = layer(inputs[rank.rank], num_valid_tokens=count)
            ids, _ = layer.router(inputs[rank.rank][:num_valid])
            counted += torch.bincount(ids.flatten(), minlength=dense.num_experts).int()
            assert torch.equal(layer.expert_load, counted)
            assert layer.local_experts == held_by(placement, rank.rank, layer.a2a.ep_size)
            found.append((got, oracle(layer, dense, placement, inputs, num_valid)[rank.rank]))
        layer.check()
    return found


def held_by(placement: Placement, rank: int, ep_size: int) -> list[int]:
    return placement.physical_to_logical[0].reshape(ep_size, -1)[rank].tolist()


@pytest.mark.parametrize(
    ("size", "num_slots", "dense", "changes"),
    [
        (2, 12, Dense(), {}),
        (4, 12, Dense(groups=(4, 2), shared=128, top_k=4), {"replica_choice": "balanced", "ranks_per_node": 2}),
        (4, 20, Dense(num_experts=16, top_k=3), {"replica_choice": "activated", "overlap_shared": False}),
        (2, 8, Dense(fp8=True, hidden=256), {"replica_choice": "nearest"}),
        (4, 16, Dense(fp8=True, shared=128), {"replica_choice": "hash", "row_dtype": torch.bfloat16}),
    ],
    ids=["bf16", "balanced", "activated", "fp8", "fp8 of bf16 rows"],
)
def test_equals_the_oracle_of_each_placement(size: int, num_slots: int, dense: Dense, changes: dict[str, Any]) -> None:
    for rank, rounds in enumerate(run_ranks(size, play, dense, num_slots, changes)):
        for index, (got, want) in enumerate(rounds):
            assert torch.equal(got, want), (rank, index)
            x = dense.tokens(rank, ROUNDS[index][rank], index)
            exact = dense.forward(x, VALID if index == len(ROUNDS) - 1 else None)
            some = slice(VALID if index == len(ROUNDS) - 1 and not dense.shared else None)
            assert relative_error(got[some], exact[some]) <= tolerance(dense), (rank, index)


def weights_of(rank: Rank, dense: Dense, num_slots: int) -> tuple[list[int], list[Tensor]]:
    """A body: experts of the slots, and their second weight, of a layer without a placement of its own."""
    with make_layer(rank, dense, num_slots=num_slots) as layer:
        assert layer.num_slots == num_slots
        return layer.local_experts, list(layer.experts.down)


def test_every_replica_has_its_experts_weights() -> None:
    dense = Dense()
    held = [], []
    for experts, weights in run_ranks(2, weights_of, dense, 12):
        held[0].extend(experts)
        held[1].extend(weights)
    assert held[0] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    for expert, weight in zip(*held, strict=True):
        assert torch.equal(weight, dense.state()[f"experts.{expert}.down_proj.weight"])


def by_hand(rank: Rank, dense: Dense) -> tuple[bool, bool, bool]:
    """A body: weights that the caller moves, and what happens if it does not."""
    before, after = (Placement.of(slots, 8) for slots in (range(8), [3, 1, 2, 0, 7, 5, 6, 4]))
    with make_layer(rank, dense, placement=before) as layer:
        x = dense.tokens(rank.rank, 8)
        want = layer(x)
        layer.set_placement(after, None)
        wrong = layer(x)
        names = [f"experts.{expert}" if slot in (0, 3) else None for slot, expert in enumerate(layer.local_experts)]
        load_networks(layer.experts, names, DenseState(dense.state()))
        right = layer(x)
        layer.set_placement(before, dense.state())
        return torch.equal(right, want), torch.equal(wrong, want), torch.equal(layer(x), want)


def test_weights_may_be_the_callers_affair() -> None:
    """Experts change places on their rank, so that the same rows are summed and rounded there."""
    for right, wrong, again in run_ranks(2, by_hand, Dense()):
        assert right
        assert not wrong
        assert again


class Read(dict[str, Tensor]):
    """A state that a file is read for. From some read on it fails on rank 0, once the other rank has come as far.

    Args:
        state: The weights.
        breaks: Whether reads fail.
        loading: A file that says that the other rank is loading.
    """

    def __init__(self, state: dict[str, Tensor], breaks: bool, loading: Path) -> None:
        super().__init__(state)
        self.reads, self.breaks, self.loading = 0, breaks, loading

    def __getitem__(self, name: str) -> Tensor:
        self.reads += 1
        if self.reads > 9:  # those of two experts, which are looked at first, and of the first of them again
            if not self.breaks:
                self.loading.touch()
            else:
                deadline = time.monotonic() + 30
                while not self.loading.exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
                raise OSError("the file is gone")
        return super().__getitem__(name)


def take_back(rank: Rank, dense: Dense, way: str, loading: Path) -> bool:
    """A body: a placement whose weights cannot be read to the end is taken back, by itself or with all weights."""
    before, after = (Placement.of(slots, 8) for slots in (range(8), [3, 1, 2, 0, 7, 5, 6, 4]))
    with make_layer(rank, dense, placement=before) as layer:
        x = dense.tokens(rank.rank, 8)
        want = layer(x)
        state = Read(dense.state(), rank.rank == 0, loading)
        with pytest.raises(OSError if rank.rank == 0 else PeerLeft, match="the file is gone") as caught:
            layer.set_placement(after, state)
        assert rank.rank == 0 or caught.value.peer == 0
        assert layer.local_experts == held_by(before, rank.rank, 2)  # as the tables still say
        for call in (lambda: layer(x), layer.check):
            with pytest.raises(PutgetError, match=r"slot\(s\) \[0, 3\] of rank . may have lost their expert"):
                call()
        if way == "set_placement":
            layer.set_placement(before, dense.state())
        else:
            layer.load_dense(dense.state())
        assert layer.local_experts == held_by(before, rank.rank, 2)
        return torch.equal(layer(x), want)


@pytest.mark.parametrize("way", ["set_placement", "load_dense"])
def test_a_placement_that_could_not_be_loaded_can_be_taken_back(way: str, tmp_path: Path) -> None:
    assert run_ranks(2, take_back, Dense(), way, tmp_path / "loading") == [True, True]


def interrupted(rank: Rank, dense: Dense) -> None:
    """A body: Ctrl-C on one rank, as its new placement is about to be in force; then all set it again."""
    before, after = (Placement.of(slots, 8) for slots in (range(8), [4, 1, 2, 3, 0, 5, 6, 7]))
    state = dense.state()
    with make_layer(rank, dense, placement=before) as layer:
        x = dense.tokens(rank.rank, 8)
        if rank.rank == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(layer, "_note_placement", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    layer.set_placement(after, state)
            with pytest.raises(PutgetError, match="may have lost their expert"):
                layer(x)
        else:
            layer.set_placement(after, state)
        layer.set_placement(after, state)
        assert relative_error(layer(x), dense.forward(x)) <= tolerance(dense)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_no_round_runs_where_a_placement_was_interrupted() -> None:
    run_ranks(2, interrupted, Dense())


def half(rank: Rank, dense: Dense, why: str) -> str:
    """A body: rank 1 alone is wrong; the former placement stays on all ranks, and a right call changes it on all."""
    before, after, other = (Placement.of(slots, 8) for slots in (range(8), [4, 1, 2, 3, 0, 5, 6, 7], range(7, -1, -1)))
    state = dense.state()
    with make_layer(rank, dense, placement=before) as layer:
        x = dense.tokens(rank.rank, 8)
        want = layer(x)
        lacks, given = state, after
        if rank.rank == 1 and why == "state":
            lacks = {name: tensor for name, tensor in state.items() if name != "experts.0.up_proj.weight"}
        if rank.rank == 1 and why == "other":
            given = other
        if rank.rank == 1 and why == "sizes":
            given = placement_of(8, 16, 0)
        with pytest.raises(ValueError) as caught:
            layer.set_placement(given, lacks)
        assert layer.local_experts == held_by(before, rank.rank, 2)
        assert torch.equal(layer(x), want)
        layer.set_placement(after, state)
        assert layer.local_experts == held_by(after, rank.rank, 2)
        assert relative_error(layer(x), want.float()) <= tolerance(dense)
        return str(caught.value)


@pytest.mark.parametrize(
    ("why", "message"),
    [
        ("state", "state has no experts.0.up_proj.weight"),
        ("sizes", "placement has 8 experts and 16 slots; the one in force has 8 and 8"),
        ("other", "placement differs between ranks: rank 0 has"),
    ],
)
def test_a_placement_that_one_rank_refuses_is_in_force_on_none(why: str, message: str) -> None:
    told = run_ranks(2, half, Dense(), why)
    assert message in told[1]
    assert told[0].startswith(message if why == "other" else f"rank 1: {message}")


def refused(rank: Rank, dense: Dense, kept: Placement, wrong: list[tuple[Placement, dict[str, Any]]]) -> list[str]:
    """A body: placements that the layer refuses, and a round as before them."""
    told = []
    with make_layer(rank, dense, placement=kept) as layer:
        x = dense.tokens(rank.rank, 4)
        want = layer(x)
        for placement, options in wrong:
            with pytest.raises(ValueError) as caught:
                layer.set_placement(placement, {}, **options)
            told.append(str(caught.value))
        assert torch.equal(layer(x), want)
    with make_layer(rank, dense) as plain, pytest.raises(ValueError) as caught:
        plain.set_placement(kept, None)
    return [*told, str(caught.value)]


def test_a_placement_that_is_refused_changes_nothing() -> None:
    kept = placement_of(8, 12, 0)
    wrong = [
        (placement_of(8, 16, 1), {}),
        (placement_of(7, 12, 1), {}),
        (placement_of(8, 12, 1), {"placement_layer": 2}),
        (placement_of(8, 12, 1), {"prefix": "a."}),
    ]
    for told in run_ranks(2, refused, Dense(), kept, wrong):
        assert told[0].startswith("placement has 8 experts and 16 slots; the one in force has 8 and 12")
        assert told[1].startswith("placement has 7 experts and 12 slots")
        assert told[2] == "layer is 2, allowed are 0 to 0"
        assert told[3].startswith("state has no a.experts.")
        assert told[4].startswith("this layer was made without slots")


def constructed(rank: Rank, changes: dict[str, Any], last: dict[str, Any]) -> str:
    """A body: why the constructor refuses."""
    options = options_of(Dense(), device="cpu", **changes, **(last if rank.rank == 1 else {}))
    with pytest.raises(ValueError) as caught:
        ExpertParallelMoE(rank.comm, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": 6}, "num_slots is 6, fewer than num_experts, 8"),
        ({"num_slots": 9}, "num_slots is 9, expected a multiple of ep_size, 2"),
        ({"num_slots": True}, "num_slots is True"),
        ({"num_slots": 10, "placement": placement_of(8, 12, 0)}, "12 slots; num_experts is 8, num_slots is 10"),
        ({"placement": placement_of(6, 12, 0)}, "placement has 6 experts and 12 slots; num_experts is 8"),
        ({"placement": [0, 1, 2]}, "placement is a list, expected a putget.balancer.Placement"),
        ({"placement": placement_of(8, 12, 0), "placement_layer": 1}, "layer is 1, allowed are 0 to 0"),
        ({"num_slots": 8, "replica_choice": "best"}, "how is 'best', allowed are nearest"),
        ({"num_slots": 8, "expert_to_rank": [0] * 8}, "expert_to_rank is given with slots"),
        ({"num_slots": 8, "ranks_per_node": 3}, "ranks_per_node is 3, allowed are 1 to 2"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    for text in run_ranks(2, constructed, changes, {}):
        assert message in text


@pytest.mark.parametrize(
    ("both", "last", "message"),
    [
        ({"num_slots": 12}, {"placement": placement_of(8, 12, 0)}, "placement differs between ranks"),
        ({"num_slots": 12}, {"replica_choice": "hash"}, "replica_choice differs between ranks"),
        ({}, {"num_slots": 12}, "num_experts differs between ranks"),
        ({}, {"num_slots": 8}, "placement differs between ranks"),
    ],
)
def test_ranks_with_other_placements_hear_about_it(both: dict[str, Any], last: dict[str, Any], message: str) -> None:
    for text in run_ranks(2, constructed, both, last):
        assert message in text
