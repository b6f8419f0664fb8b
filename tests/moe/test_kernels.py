"""Expand, gated activation and finalize by themselves: against the oracle, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import putget
from putget import reference_moe
from putget.moe import expand, finalize, gated_activation

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn
# Error of the kernels' approximate exponentials and quotients, relative to the gate times the up value.
FLOAT32_TOLERANCE = 1e-5


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def groups(counts: list[int], alignment: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(offsets, num_rows, end) of aligned groups."""
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + -(-count // alignment) * alignment)
    return torch.tensor(offsets, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32), offsets[-1]


def valid_mask(counts: list[int], offsets: torch.Tensor, rows: int) -> torch.Tensor:
    mask = torch.zeros(rows, dtype=torch.bool)
    for group, count in enumerate(counts):
        mask[offsets[group] : offsets[group] + count] = True
    return mask


# --- expand -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_bytes", [1, 3, 4, 12, 16, 56, 224, 1040, 3584, 7168, 14336])
def test_rows_of_every_width(device: str, row_bytes: int) -> None:
    source = torch.randint(256, (19, row_bytes), generator=generator(row_bytes), dtype=torch.uint8)
    index = torch.randint(-1, 20, (41,), generator=generator(1), dtype=torch.int32)  # 19 is out of range
    before = torch.full((41, row_bytes), 7, dtype=torch.uint8)
    got = expand(source.to(device), index.to(device), out=before.to(device))
    assert torch.equal(got.cpu(), reference_moe.expand(source, index, before))


def test_rows_at_odd_addresses(device: str) -> None:
    source = torch.arange(256, dtype=torch.uint8).repeat(20)
    index = torch.tensor([3, 0, -1, 2, 3], dtype=torch.int32)
    for shift in (1, 2, 4, 8):
        rows = source[shift : shift + 4 * 1024].view(4, 1024)
        given = source.to(device)[shift : shift + 4 * 1024].view(4, 1024)
        out = torch.zeros(5 * 1024 + 1, dtype=torch.uint8, device=device)[1:].view(5, 1024)
        expected = reference_moe.expand(rows, index, torch.zeros(5, 1024, dtype=torch.uint8))
        assert torch.equal(expand(given, index.to(device), out=out).cpu(), expected)


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_quantised_rows_travel_with_their_scales(device: str, recipe: str) -> None:
    widths = {"fp8": (7168, 224), "nvfp4": (3584, 448)}[recipe]
    sources = [torch.randint(256, (33, width), generator=generator(width), dtype=torch.uint8) for width in widths]
    typed = [sources[0].view(FP8) if recipe == "fp8" else sources[0], sources[1]]
    index = torch.randperm(33, generator=generator(2)).int()
    got = expand([one.to(device) for one in typed], index.to(device))
    assert isinstance(got, tuple)
    for one, source in zip(got, sources, strict=True):
        assert torch.equal(one.cpu().view(torch.uint8), source[index.long()])


@pytest.mark.parametrize("widths", [(7168, 224), (16, 512, 16), (8192, 16, 32, 48, 500, 512, 528, 3), (224, 12000)])
def test_short_rows_travel_with_long_ones(device: str, widths: tuple[int, ...]) -> None:
    """Also more of them than long ones have segments, and none that are long."""
    sources = [torch.randint(256, (21, width), generator=generator(width), dtype=torch.uint8) for width in widths]
    index = torch.randint(-1, 21, (50,), generator=generator(3), dtype=torch.int32)
    before = [torch.full((50, width), 9, dtype=torch.uint8, device=device) for width in widths]
    got = expand([one.to(device) for one in sources], index.to(device), out=before)
    for one, source in zip(got, sources, strict=True):
        expected = reference_moe.expand(source, index, torch.full_like(one, 9, device="cpu"))
        assert torch.equal(one.cpu(), expected)


def test_only_valid_rows_are_written(device: str) -> None:
    source = torch.randn(8, 20, generator=generator())
    index = torch.randint(8, (64,), generator=generator(1), dtype=torch.int32)
    before = torch.full((64, 20), -5.0)
    counts = [3, 0, 16, 1, 9]
    offsets, num_rows, _ = groups(counts, 8)
    choices: list[tuple[Any, torch.Tensor]] = [
        (None, torch.ones(64, dtype=torch.bool)),
        (torch.tensor([10], dtype=torch.int32, device=device), torch.arange(64) < 10),
        (torch.tensor(0, dtype=torch.int32, device=device), torch.arange(64) < 0),
        (torch.tensor([-3], dtype=torch.int32, device=device), torch.arange(64) < 0),
        (torch.tensor([99], dtype=torch.int32, device=device), torch.ones(64, dtype=torch.bool)),
        ((offsets.to(device), num_rows.to(device)), valid_mask(counts, offsets, 64)),
        ((offsets[:-1].to(device), num_rows.to(device)), valid_mask(counts, offsets, 64)),
    ]
    for num_valid, mask in choices:
        got = expand(source.to(device), index.to(device), num_valid=num_valid, out=before.to(device)).cpu()
        assert torch.equal(got[mask], source[index[mask].long()])
        assert torch.equal(got[~mask], before[~mask])


def test_groups_that_do_not_lie_in_the_tensor_are_left_out(device: str) -> None:
    offsets = torch.tensor([0, -4, 60, 8], dtype=torch.int32, device=device)
    num_rows = torch.tensor([2, 3, 5, -1], dtype=torch.int32, device=device)
    index = torch.zeros(64, dtype=torch.int32, device=device)
    got = expand(
        torch.ones(1, 4, device=device), index, num_valid=(offsets, num_rows), out=index.new_zeros(64, 4).float()
    )
    assert got.sum(dim=1).nonzero()[:, 0].tolist() == [0, 1]


def test_many_groups(device: str) -> None:
    counts = [group % 3 for group in range(4096)]
    offsets, num_rows, end = groups(counts, 2)
    index = torch.zeros(end, dtype=torch.int32, device=device)
    out = torch.zeros(end, 4, device=device)
    got = expand(torch.ones(1, 4, device=device), index, num_valid=(offsets.to(device), num_rows.to(device)), out=out)
    assert torch.equal(got[:, 0].cpu() == 1, valid_mask(counts, offsets, end))
    more = torch.zeros(4097, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="num_rows has 4097 groups, allowed are 4096"):
        expand(out, index, num_valid=(more, more))


def test_nothing_to_expand(device: str) -> None:
    none = torch.zeros(0, dtype=torch.int32, device=device)
    assert expand(torch.ones(3, 4, device=device), none).shape == (0, 4)
    some = torch.zeros(2, dtype=torch.int32, device=device)
    kept = expand(torch.ones(0, 4, device=device), some, out=torch.full((2, 4), 3.0, device=device))
    assert kept.tolist() == [[3.0] * 4] * 2


# --- gated activation -------------------------------------------------------------------------------------------------


def gate_and_up(rows: int, n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small and large values of both signs, zeros among them."""
    x = torch.randn(rows, 2 * n, generator=generator(seed)) * 2.0 ** torch.randint(
        -6, 5, (rows, 2 * n), generator=generator(seed + 1)
    )
    return torch.where(torch.rand(rows, 2 * n, generator=generator(seed + 2)) < 0.02, -0.0, x).to(dtype)


def allowed_error(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounding once to dtype, and the tolerance of the float32 result."""
    gate, up = x.float().chunk(2, dim=1)
    size = (gate * up).abs()
    return size * (torch.finfo(dtype).eps / 2 + FLOAT32_TOLERANCE) + torch.finfo(dtype).smallest_normal


@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [1, 5, 8, 129, 256, 2048, 2056])
def test_activation(device: str, gate: Any, dtype: torch.dtype, n: int) -> None:
    x = gate_and_up(11, n, dtype, n)
    got = gated_activation(x.to(device), gate).cpu()
    want = reference_moe.gated_activation(x, gate)
    assert got.dtype == dtype
    assert ((got.float() - want).abs() <= allowed_error(x, dtype)).all()


def test_activation_of_what_is_not_finite(device: str) -> None:
    values = [float("-inf"), float("nan"), 100.0, -100.0, 3e38, -3e38, float("inf")]
    for gate in ("silu", "gelu"):
        if gate == "gelu":
            values.pop()  # torch's vectorised gelu says NaN, its scalar one infinity
        x = torch.tensor([[*values, *([2.0] * len(values))]])
        got = gated_activation(x.to(device), gate).cpu()  # type: ignore[call-overload]
        want = reference_moe.gated_activation(x, gate)
        same = (got == want) | (got.isnan() & want.isnan()) | ((got - want).abs() < 1e-30)
        assert same.all(), (gate, got, want)


@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [16, 128, 144, 512, 2048])
def test_quantised_activation(device: str, gate: Any, dtype: torch.dtype, n: int) -> None:
    """Scales within the tolerance, and each value the nearest E4M3 to its float32 result, or nearly so at a tie."""
    x = gate_and_up(9, n, dtype, n)
    x[3] = 0
    got, scales = gated_activation(x.to(device), gate, quantise="fp8_block")
    got, scales = got.cpu(), scales.cpu()
    exact = reference_moe.gated_activation(x, gate)
    want, want_scales = reference_moe.quantised_blocks(exact)
    assert got.dtype == FP8
    assert scales.shape == want_scales.shape
    largest = (allowed_error(x, torch.float32) * 2).amax() / 448
    assert ((scales - want_scales).abs() <= want_scales * 1e-4 + largest).all()
    apart = (got.view(torch.uint8).int() - want.view(torch.uint8).int()).abs()
    zeros = (got.float() == 0) & (want.float() == 0)  # the sign of zero may differ
    assert (apart.masked_fill(zeros, 0) <= 1).all()
    assert (apart.masked_fill(zeros, 0) > 0).float().mean() < 0.01
    assert (got[3].view(torch.uint8) & 0x7F == 0).all()


def test_codes_of_quantised_values_are_exact(device: str) -> None:
    """Where the float32 result is known to the bit, so are the codes: gates so large that silu is the identity."""
    n = 256
    up = torch.randn(20, n, generator=generator(3)) * 2.0 ** torch.randint(-4, 5, (20, n), generator=generator(4))
    x = torch.cat([torch.full((20, n), 64.0), up], dim=1)
    want, want_scales = reference_moe.quantised_blocks(64.0 * up)
    got, scales = gated_activation(x.to(device), quantise="fp8_block")
    if device == "cpu":
        assert torch.equal(scales, want_scales)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        return
    assert torch.allclose(scales.cpu(), want_scales, rtol=1e-6)
    assert (got.cpu().view(torch.uint8) != want.view(torch.uint8)).float().mean() < 1e-3


@pytest.mark.parametrize("quantise", [None, "fp8_block"])
def test_only_valid_rows_are_activated(device: str, quantise: Any) -> None:
    x = gate_and_up(64, 128, BF16, 5)
    counts = [1, 0, 7, 16, 2]
    offsets, num_rows, _ = groups(counts, 8)
    mask = valid_mask(counts, offsets, 64)
    whole = gated_activation(x.to(device), quantise=quantise)
    out = torch.full((64, 128), 3.0, device=device).to(BF16 if quantise is None else FP8)
    scales = None if quantise is None else torch.full((64, 1), 3.0, device=device)
    valid = (offsets.to(device), num_rows.to(device))
    got = gated_activation(x.to(device), num_valid=valid, quantise=quantise, out=out, scales=scales)
    pairs = [(got, whole)] if quantise is None else list(zip(got, whole, strict=True))
    for one, all_rows in pairs:
        assert torch.equal(one.cpu().float()[mask], all_rows.cpu().float()[mask])
        assert (one.cpu().float()[~mask] == 3.0).all()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(0, 9), min_size=0, max_size=12),
    alignment=st.sampled_from([1, 2, 5, 16]),
    spare=st.integers(0, 20),
    n=st.sampled_from([3, 16, 40]),
)
def test_any_groups(counts: list[int], alignment: int, spare: int, n: int, device: str) -> None:
    offsets, num_rows, end = groups(counts, alignment)
    rows = end + spare
    mask = valid_mask(counts, offsets, rows)
    x = gate_and_up(rows, n, torch.float32, 1)
    out = torch.full((rows, n), -9.0, device=device)
    valid = (offsets.to(device), num_rows.to(device))
    got = gated_activation(x.to(device), num_valid=valid, out=out).cpu()
    want = reference_moe.gated_activation(x, "silu")
    assert ((got - want).abs() <= allowed_error(x, torch.float32))[mask].all()
    assert (got[~mask] == -9.0).all()


# --- what is refused --------------------------------------------------------------------------------------------------

ROWS = torch.zeros(4, 8)
INDEX = torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((ROWS, INDEX.long()), "source_rows has dtype int64, expected int32"),
        ((ROWS, INDEX.view(2, 2)), r"source_rows is \[2, 2\]"),
        ((ROWS.t(), INDEX), r"source\[0\] has strides"),
        (([ROWS, ROWS[:2]], INDEX), r"source\[1\] has shape \[2, 8\], expected \[4, 8\]"),
        (([], INDEX), "source has 0 tensors, allowed are 1 to 8"),
        (([ROWS] * 9, INDEX), "source has 9 tensors"),
        ((torch.zeros(4, 0), INDEX), "expected rows of at least one element"),
        ((3, INDEX), "source is a int, expected a tensor or a sequence"),
    ],
)
def test_expand_refuses(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        expand(*arguments)


@pytest.mark.parametrize(
    ("num_valid", "words"),
    [
        (torch.zeros(2, dtype=torch.int32), r"num_valid has shape \[2\]"),
        (torch.zeros(1), "num_valid has dtype float32, expected int32"),
        (3, "num_valid is 3, expected"),
        ((INDEX, INDEX[:2]), "offsets has 4 entries, expected 2 or 3"),
        ((INDEX, INDEX.long()), "num_rows has dtype int64"),
        ((INDEX.view(2, 2), INDEX), "offsets is"),
    ],
)
def test_valid_rows_are_refused(num_valid: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        expand(ROWS, INDEX, num_valid=num_valid)
    with pytest.raises(ValueError, match=words):
        gated_activation(ROWS, num_valid=num_valid)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gate": "relu"}, "gate is 'relu', allowed are 'silu' and 'gelu'"),
        ({"quantise": "int8"}, "quantise is 'int8'"),
        ({"x": torch.zeros(4, 7)}, r"x is \[4, 7\], expected a tensor \[rows, 2 \* n\]"),
        ({"x": torch.zeros(8)}, r"x is \[8\]"),
        ({"x": ROWS.int()}, "x has dtype int32, expected bfloat16 or float16 or float32"),
        ({"x": torch.zeros(8, 4).t()}, "x has strides"),
        ({"out": torch.zeros(4, 3)}, r"out has shape \[4, 3\], expected \[4, 4\]"),
        ({"out": torch.zeros(4, 4, dtype=BF16)}, "out has dtype bfloat16, expected float32"),
        ({"scales": torch.zeros(4, 1)}, "scales came, but quantise is None"),
        ({"quantise": "fp8_block"}, r"x has 2 \* 4 columns: quantised rows have a multiple of 16"),
        (
            {"x": torch.zeros(4, 32), "quantise": "fp8_block", "scales": torch.zeros(4, 2)},
            r"scales has shape \[4, 2\], expected \[4, 1\]",
        ),
        (
            {"x": torch.zeros(4 * 32 + 1)[1:].view(4, 32), "quantise": "fp8_block"},
            "x begins at an address that is no multiple of 16 bytes",
        ),
    ],
)
def test_activation_refuses(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gated_activation(**{"x": ROWS, **changes})


def test_finalize_fills_combine_input_or_out() -> None:
    with putget.AllToAll(
        putget.Communicator.local(1)[0],
        num_experts=4,
        top_k=2,
        max_tokens_per_rank=8,
        payloads=[putget.Payload((4,), torch.float32)],
        output=putget.Payload((6,), torch.float32),
        device="cpu",
    ) as a2a:
        ids = torch.tensor([[0, 3], [1, 1], [2, -1]], dtype=torch.int32)
        weights = torch.rand(3, 2)
        grouped = a2a.dispatch(ids, weights, torch.rand(3, 4)).expert_major()
        rows = torch.randn(grouped.capacity, 6)
        want = reference_moe.finalize(rows, grouped.positions[:3], weights)
        out = torch.full((8, 6), 5.0)
        assert finalize(rows, grouped, out) is out
        assert torch.equal(out[:3], want)
        assert (out[3:] == 5.0).all()
        assert finalize(rows, grouped).data_ptr() == a2a.combine_input.data_ptr()
        assert torch.equal(a2a.combine(), want)
        a2a.dispatch(ids, weights, torch.rand(3, 4))
        with pytest.raises(putget.ProtocolMisuse, match="layout is of dispatch 1"):
            finalize(rows, grouped)
        with pytest.raises(ValueError, match="grouped is a Tensor"):
            finalize(rows, rows)  # type: ignore[arg-type]


def test_finalize_refuses_other_shapes() -> None:
    with putget.AllToAll(
        putget.Communicator.local(1)[0],
        num_experts=4,
        top_k=2,
        max_tokens_per_rank=8,
        payloads=[putget.Payload((4,), torch.float32)],
        output=putget.Payload((6,), torch.float32),
        device="cpu",
    ) as a2a:
        ids = torch.zeros(3, 2, dtype=torch.int32)
        grouped = a2a.dispatch(ids, torch.rand(3, 2), torch.rand(3, 4)).expert_major()
        rows = torch.zeros(grouped.capacity, 6)
        with pytest.raises(ValueError, match=r"rows has shape \[3, 6\], expected"):
            finalize(rows[:3], grouped)
        with pytest.raises(ValueError, match=r"out has shape \[3, 6\], expected \[8, 6\]"):
            finalize(rows, grouped, rows[:3])
        with pytest.raises(ValueError, match="out overlaps rows, expected memory of its own"):
            finalize(rows, grouped, rows[:8])


def test_rows_may_not_lie_in_what_they_are_summed_into() -> None:
    with putget.AllToAll(
        putget.Communicator.local(1)[0],
        num_experts=4,
        top_k=1,
        max_tokens_per_rank=8,
        payloads=[putget.Payload((4,), torch.float32)],
        output=putget.Payload((6,), torch.float32),
        device="cpu",
    ) as a2a:
        ids = torch.tensor([[2], [0], [1]], dtype=torch.int32)
        grouped = a2a.dispatch(ids, torch.ones(3, 1), torch.rand(3, 4)).expert_major()
        rows = a2a.combine_input.flat.view(-1)[: grouped.capacity * 6].view(grouped.capacity, 6)
        assert len(rows) == grouped.capacity  # one row for each that came: they could be taken for each other
        with pytest.raises(ValueError, match="combine_input overlaps x, expected memory of its own"):
            a2a.combine(rows, layout=grouped)
        own = torch.arange(grouped.capacity).float()[:, None].expand(-1, 6).contiguous()
        assert a2a.combine(own, layout=grouped)[:, 0].tolist() == [2.0, 0.0, 1.0]


def test_kernels_do_not_write_where_they_read(device: str) -> None:
    whole = torch.arange(64.0, device=device).view(8, 8)
    index = torch.arange(4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"out\[0\] overlaps source\[1\], expected memory of its own"):
        expand([torch.ones(4, 8, device=device), whole[:4]], index, out=[whole[3:7], torch.zeros(4, 8, device=device)])
    with pytest.raises(ValueError, match="out overlaps x, expected memory of its own"):
        gated_activation(whole[:4], out=whole.view(-1)[:16].view(4, 4))
    assert torch.equal(expand(whole[:4], index, out=whole[4:]), whole[:4])  # neighbours share nothing
