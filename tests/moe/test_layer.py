"""ExpertParallelMoE against a dense layer in float32, between processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import putget
from putget.balancer import PlanOptions
from putget.moe import ExpertParallelMoE, SoftmaxRouting
from tests.harness import Rank, run_ranks
from tests.moe.dense import Dense, relative_error
from tests.moe.layers import load_kernels, make_layer, options_of, tolerance

# Different numbers of tokens on every rank, none on some, and none at all.
ROUNDS = ((3, 0, 8, 1), (8, 5, 0, 0), (0, 0, 0, 0), (1, 1, 1, 1))

GOT = putget.tuning.Tuning(combine=putget.tuning.Launch(sentinel_rows=False))


def play(rank: Rank, dense: Dense, changes: dict[str, Any]) -> list[Tensor]:
    """A body: the outputs of all rounds."""
    with make_layer(rank, dense, **changes) as layer:
        outputs = []
        for index, tokens in enumerate(ROUNDS):
            x = dense.tokens(rank.rank, tokens[rank.rank], index).to(rank.device)
            outputs.append(layer(x).cpu())
        layer.check()
        return outputs


@pytest.mark.parametrize(
    ("size", "dense", "changes"),
    [
        (2, Dense(), {}),
        (4, Dense(groups=(4, 2), shared=256, top_k=3), {}),
        (4, Dense(groups=(4, 2), shared=128, top_k=4, gate="gelu"), {"overlap_shared": False}),
        (2, Dense(fp8=True, hidden=256), {}),
        (4, Dense(fp8=True, groups=(2, 1), shared=128, num_experts=12, intermediate=256), {}),
        (4, Dense(fp8=True, groups=(2, 1), shared=128, hidden=256), {"row_dtype": torch.bfloat16}),
        # Two experts on ranks 0 and 1, one on rank 2, none on rank 3; rows of other than whole blocks.
        (4, Dense(num_experts=5, hidden=72, intermediate=40, top_k=4), {}),
        (
            4,
            Dense(shared=128),
            {
                "expert_to_rank": [3, 1, 3, 0, 0, 1, 3, 3],
                "tuning": putget.tuning.Tuning(combine=putget.tuning.Launch(sentinel_rows=False)),
            },
        ),
    ],
    ids=[
        "bf16",
        "groups and shared",
        "one after the other",
        "fp8",
        "fp8 groups shared",
        "fp8 of bf16 rows",
        "uneven",
        "placed",
    ],
)
def test_equals_a_dense_layer(size: int, dense: Dense, changes: dict[str, Any]) -> None:
    for rank, outputs in enumerate(run_ranks(size, play, dense, changes)):
        for index, got in enumerate(outputs):
            want = dense.forward(dense.tokens(rank, ROUNDS[index][rank], index))
            assert got.dtype == torch.bfloat16
            assert relative_error(got, want) <= tolerance(dense), (rank, index)


def test_rows_are_quantised_before_or_behind_to_the_same_bits() -> None:
    dense = Dense(fp8=True, shared=128, hidden=256)
    before, behind = (run_ranks(2, play, dense, {"row_dtype": kind}) for kind in (None, torch.bfloat16))
    for outputs, expected in zip(behind, before, strict=True):
        for got, want in zip(outputs, expected, strict=True):
            assert torch.equal(got, want)


def test_the_comparison_can_fail() -> None:
    """Another weight of one expert, which 1 token in 4 has, is found."""
    dense = Dense()
    (got, *_), *_ = run_ranks(2, play, dense, {})
    x = dense.tokens(0, ROUNDS[0][0])
    ids, _ = dense.route(x)
    state = dense.state()
    state[f"experts.{int(ids[0, 0])}.down_proj.weight"] *= 1.1
    object.__setattr__(dense, "state", lambda: state)
    assert relative_error(got, dense.forward(x)) > tolerance(dense)


def padded(rank: Rank, dense: Dense, valid: int) -> Tensor:
    """A body: a batch whose tokens from `valid` on are padding."""
    with make_layer(rank, dense) as layer:
        return layer(dense.tokens(rank.rank, 6), num_valid_tokens=torch.tensor([valid], dtype=torch.int32))


def test_padding_goes_to_no_routed_expert() -> None:
    dense = Dense(shared=128)
    for rank, got in enumerate(run_ranks(2, padded, dense, 4)):
        assert relative_error(got, dense.forward(dense.tokens(rank, 6), num_valid=4)) <= tolerance(dense)


def told(rank: Rank, dense: Dense, busiest: int | None) -> tuple[Tensor, int, list[int]]:
    """A body: no token, or one, beside ranks with eight. The output, and what experts and combine were told."""
    expected: list[int] = []
    with make_layer(rank, dense) as layer:
        run_experts = layer.run_experts

        def spy(grouped: Any, tokens: int, *more: Any) -> Tensor:
            expected.append(tokens)
            return run_experts(grouped, tokens, *more)

        layer.run_experts = spy  # type: ignore[method-assign]
        out = layer(dense.tokens(rank.rank, (0, 1, 8)[rank.rank]), busiest_tokens=busiest)
        return out, layer.a2a._native._combine_args.busiest_tokens, expected


def test_the_busiest_rank_changes_the_launch_alone() -> None:
    dense = Dense(fp8=True, hidden=256)
    alone, informed = (run_ranks(3, told, dense, busiest) for busiest in (None, 8))
    assert [(combine, experts) for _, combine, experts in alone] == [(0, [0]), (0, [1]), (0, [8])]
    assert [(combine, experts) for _, combine, experts in informed] == [(8, [8])] * 3
    for (got, *_), (want, *_) in zip(informed, alone, strict=True):
        assert torch.equal(got, want)


def wrong_inputs(rank: Rank, dense: Dense) -> tuple[list[str], Tensor]:
    """A body: calls that are refused on this rank alone, and a round after them."""
    messages = []
    with make_layer(rank, dense) as layer:
        good = dense.tokens(rank.rank, 3)
        for x in (dense.tokens(0, 9), good.float(), good[:, :-1].contiguous(), good.T, [1.0], good[0]):
            if rank.rank == 0:
                with pytest.raises(ValueError) as caught:
                    layer(x)
                messages.append(str(caught.value))
        return messages, layer(good)


def test_wrong_inputs_have_no_effect() -> None:
    dense = Dense()
    results = run_ranks(2, wrong_inputs, dense)
    messages, _ = results[0]
    assert messages[0] == "x has 9 tokens, max_tokens_per_rank is 8"
    assert messages[1] == "x has dtype float32, expected bfloat16"
    assert messages[2] == "x has shape [3, 127], expected [3, 128]"
    assert messages[3] == "x has shape [128, 3], expected [128, 128]"
    assert messages[4] == "x is a list, expected a tensor"
    assert messages[5] == "x has shape [128], expected [128, 128]"
    for rank, (_, got) in enumerate(results):
        assert relative_error(got, dense.forward(dense.tokens(rank, 3))) <= tolerance(dense)


def in_layers(rank: Rank, dense: Dense) -> Tensor:
    """A body: two layers on one workspace and one memory for rows, one after the other."""
    with make_layer(rank, dense) as first:
        shared = {"workspace": first.a2a.workspace, "grouped_memory": first.grouped_memory}
        with make_layer(rank, dense, **shared) as second:
            return second(first(dense.tokens(rank.rank, 4 + rank.rank)))


def test_layers_share_memory() -> None:
    dense = Dense()
    for rank, got in enumerate(run_ranks(2, in_layers, dense)):
        between = dense.forward(dense.tokens(rank, 4 + rank)).bfloat16()
        # The second router sees rows that are a little wrong: a token whose experts are nearly equal may go elsewhere.
        good = [relative_error(got[t : t + 1], dense.forward(between[t : t + 1])) <= 0.05 for t in range(len(got))]
        assert sum(good) >= len(good) - 1


def refused_calls(rank: Rank, dense: Dense) -> list[str]:
    """A body: calls that are refused count no expert, and are not recorded."""
    said, recorded = [], []
    with make_layer(rank, dense, count_experts=True) as layer:
        layer.record = lambda ids, _: recorded.append(len(ids))
        x = dense.tokens(rank.rank, 3)
        wrong: tuple[dict[str, Any], ...] = (
            {"num_valid_tokens": torch.tensor([2])},
            {"num_valid_tokens": torch.tensor([2, 2], dtype=torch.int32)},
            {"busiest_tokens": -1},
            {"busiest_tokens": 1.5},
        )
        for options in wrong:
            with pytest.raises(ValueError) as caught:
                layer(x, **options)
            said.append(str(caught.value))
        assert layer.expert_load is not None
        assert not recorded
        assert layer.expert_load.sum() == 0
        layer(x)
        assert layer.expert_load.sum() == 3 * dense.top_k
    with make_layer(rank, dense, num_slots=10) as layer:
        one, two = (layer(x, num_valid_tokens=torch.tensor(count, dtype=torch.int32)) for count in ([2], 2))
        assert torch.equal(one, two)  # a number without a dimension
    return said


def test_a_refused_call_counts_nothing() -> None:
    for said in run_ranks(2, refused_calls, Dense()):
        assert [text.split()[0] for text in said] == ["num_valid_tokens"] * 2 + ["busiest_tokens"] * 2


def with_others_memory(rank: Rank, dense: Dense) -> list[str]:
    """A body: rank 1 gives memory that does not fit, and then all have a layer."""
    said = []
    with make_layer(rank, dense, max_tokens_per_rank=2) as small:
        for other in (small.grouped_memory, torch.zeros(8)):
            with (
                pytest.raises(ValueError) as caught,
                make_layer(
                    rank, dense, timeout_s=20.0, **({"grouped_memory": other} if rank.rank == 1 else {})
                ) as layer,
            ):
                layer(dense.tokens(rank.rank, 4))
            said.append(str(caught.value))
    with make_layer(rank, dense) as layer:
        layer(dense.tokens(rank.rank, 4))
    return said


def test_memory_of_another_size_is_refused_before_a_round() -> None:
    for told in run_ranks(2, with_others_memory, Dense()):
        assert "grouped_memory is made for max_rows 2, expected" in told[0]
        assert "grouped_memory is a Tensor, expected" in told[1]


def constructed(rank: Rank, options: dict[str, Any]) -> str:
    """A body: why the constructor refuses."""
    with pytest.raises(ValueError) as caught:
        ExpertParallelMoE(rank.comm, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_dtype": torch.float16}, "weight_dtype is torch.float16"),
        (
            {"row_dtype": torch.float8_e4m3fn},
            "row_dtype is torch.float8_e4m3fn, with weights of torch.bfloat16 expected torch.bfloat16",
        ),
        ({"gate": "relu"}, "gate is 'relu', allowed are 'silu' and 'gelu'"),
        ({"hidden_size": 100}, "hidden_size is 100, BF16 experts need a multiple of 8"),
        ({"weight_dtype": torch.float8_e4m3fn, "intermediate_size": 192}, "intermediate_size is 192"),
        ({"top_k": 9}, "top_k is 9"),
        ({"shared_intermediate_size": -1}, "shared_intermediate_size is -1"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank is 0"),
    ],
)
def test_wrong_options(changes: dict[str, Any], message: str) -> None:
    options = options_of(Dense(), device="cpu")
    for text in run_ranks(2, constructed, {**options, **changes}):
        assert message in text


def differing(rank: Rank, options: dict[str, Any], changes: dict[str, Any]) -> str:
    """A body: the last rank's layer is another one; then a layer that is the same on all."""
    with pytest.raises(ValueError) as caught:
        ExpertParallelMoE(rank.comm, **{**options, **(changes if rank.rank == 1 else {})})
    with ExpertParallelMoE(rank.comm, **options) as layer:
        layer(torch.zeros(rank.rank, options["hidden_size"], dtype=torch.bfloat16))
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate": "gelu"}, "gate differs between ranks: rank 0 has silu, rank 1 has gelu"),
        ({"intermediate_size": 512}, "intermediate_size differs between ranks"),
        ({"shared_intermediate_size": 256}, "shared_intermediate_size differs between ranks"),
        ({"routing": SoftmaxRouting(scale=2.0)}, "routing differs between ranks"),
        ({"hidden_size": 512}, "differs between ranks"),
    ],
)
def test_ranks_with_other_options_hear_about_it(changes: dict[str, Any], message: str) -> None:
    options = options_of(Dense(), device="cpu")
    for text in run_ranks(2, differing, options, changes):
        assert message in text


def cast(rank: Rank, dense: Dense) -> tuple[Tensor, Tensor]:
    """A body: the layer before and behind the casts that a model around it may get."""
    with make_layer(rank, dense) as layer:
        x = dense.tokens(rank.rank, 4)
        before = layer(x)
        model = torch.nn.Sequential(layer, torch.nn.Linear(2, 2))
        dtypes = [tensor.dtype for tensor in layer.state_dict().values()]
        for convert in (model.bfloat16, model.half, model.float, lambda: model.to(torch.float16), model.cpu):
            convert()
        assert [tensor.dtype for tensor in layer.state_dict().values()] == dtypes
        assert model[1].weight.dtype == torch.float16
        with pytest.raises(ValueError, match="this layer is on cpu, where its workspace is, and cannot move to meta"):
            model.to("meta")
        return before, layer(x)


@pytest.mark.parametrize("dense", [Dense(groups=(4, 2), shared=128), Dense(fp8=True, shared=128)], ids=["bf16", "fp8"])
def test_casts_of_a_model_leave_the_layer_as_it_is(dense: Dense) -> None:
    for before, behind in run_ranks(2, cast, dense):
        assert torch.equal(before, behind)


def test_wrong_communicator() -> None:
    with pytest.raises(ValueError, match=r"comm is None, expected a putget.Communicator"):
        ExpertParallelMoE(None, **options_of(Dense(), device="cpu"))  # type: ignore[arg-type]


def closed(rank: Rank, dense: Dense) -> str:
    """A body: what a closed layer says."""
    layer = make_layer(rank, dense)
    layer.close()
    layer.close()
    with pytest.raises(ValueError) as caught:
        layer(dense.tokens(rank.rank, 1))
    return str(caught.value)


def test_closed() -> None:
    assert run_ranks(1, closed, Dense()) == ["this AllToAll is closed"]


def alone(rank: Rank, dense: Dense) -> str:
    """A body: the other rank does not come to a round."""
    with make_layer(rank, dense, timeout_s=0.2, warmup_timeout_s=20.0) as layer:
        layer(dense.tokens(rank.rank, 2))
        if rank.rank == 0:
            with pytest.raises(putget.PeerTimeout) as caught:
                layer(dense.tokens(0, 2))
            return str(caught.value)
        return ""


def test_a_missing_rank_is_named() -> None:
    text, _ = run_ranks(2, alone, Dense(shared=128))
    assert "dispatch" in text
    assert "rank 0" in text


def under_autocast(rank: Rank, dense: Dense, types: tuple[torch.dtype, ...]) -> list[tuple[torch.dtype, bool]]:
    """A body: for each type of autocast and of rows, the result's type, and whether it is that without autocast."""
    kinds = (torch.bfloat16, torch.float32, torch.float16)
    with make_layer(rank, dense, overlap_shared=not rank.shares_gpu) as layer:
        x = dense.tokens(rank.rank, 4).to(rank.device)
        load_kernels(layer, x, (1,))
        assert all(torch.equal(x.to(rows).to(x.dtype), x) for rows in kinds)
        rank.wait()
        rank.meet()
        found = []
        for autocast in types:
            for rows in kinds:
                want = layer(x)
                with torch.autocast(rank.device.type, dtype=autocast):
                    got = layer(x.to(rows))
                    assert torch.is_autocast_enabled(rank.device.type)
                found.append((got.dtype, torch.equal(got, want)))
        with torch.autocast(rank.device.type), pytest.raises(ValueError, match="x has dtype int32"):
            layer(torch.zeros(4, dense.hidden, dtype=torch.int32, device=rank.device))
        with pytest.raises(ValueError, match="x has dtype float32"):  # outside, types are not changed silently
            layer(dense.tokens(rank.rank, 4).float().to(rank.device))
        return found


@pytest.mark.parametrize("dense", [Dense(groups=(4, 2), shared=128), Dense(fp8=True, shared=128, hidden=256)])
def test_autocast_changes_no_bit(dense: Dense, device: str) -> None:
    """Values of BF16 survive the way through float32; float16 holds these tokens too."""
    for found in run_ranks(2, under_autocast, dense, (torch.bfloat16, torch.float16), device=device):
        assert found == [(torch.bfloat16, True)] * 6


def test_a_typing_error_is_named() -> None:
    (comm,) = putget.Communicator.local(1)
    options = options_of(Dense(), device="cpu")
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_slot'"):
        ExpertParallelMoE(comm, **options, num_slot=8)
    with pytest.raises(TypeError, match="'num_expert'"):
        putget.AllToAll(comm, num_expert=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'interwal'"):
        PlanOptions(interwal=4)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="slots is 8, expected a SlotOptions"):
        ExpertParallelMoE(comm, **options, slots=8)
