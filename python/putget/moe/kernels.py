"""Expand, gated activation and finalize: kernels over the rows that count, whose number the device reads itself.

Each launches persistent blocks over the valid rows only, so that the cost follows the rows that came to a rank and not
the slots that could have. On CUDA every function enqueues one kernel on the current stream and can be captured in a
graph; on CPU it runs at once. Valid rows are given as ``num_valid``:

- ``None``: all rows.
- one int32 on the device: the rows before it.
- an ``ExpertMajor``, or a pair (offsets, num_rows) of int32 tensors on the device: num_rows[g] rows from row offsets[g]
  on, for each group g, at most 4096 groups.

Rows that are not valid are neither read nor written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, overload

import torch

from putget import _abi, _abi_moe
from putget._arguments import check_apart, check_int, check_row_bytes, check_tensor
from putget.core.expert_major import ExpertMajor
from putget.core.geometry import OUTPUT_TYPES
from putget.memory.workspace import current_stream

ValidRows: TypeAlias = torch.Tensor | ExpertMajor | tuple[torch.Tensor, torch.Tensor] | None

MAX_GROUPS = 4096
MAX_COLUMNS = _abi.MAX_ROW_BYTES // 4
SCALE_BLOCK = 128  # values that share a scale
QUANTISED_PACK = 16  # a quantised row has a multiple of this many values

Gate: TypeAlias = Literal["silu", "gelu"]
GATES: dict[str, int] = {"silu": _abi.SILU, "gelu": _abi.GELU}


def expand(
    source: torch.Tensor | Sequence[torch.Tensor],
    source_rows: torch.Tensor,
    *,
    num_valid: ValidRows = None,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Copies rows to their places: out[i] = source[source_rows[i]] for each valid row i.

    Rows are opaque bytes: FP8 or NVFP4 rows travel with their scales as a second tensor of `source`. Rows whose size
    and addresses are multiples of 16 bytes move at full speed.

    Args:
        source: [num_source_rows, *shape], contiguous, any dtype; or 1 to 8 of them, with equal num_source_rows.
        source_rows: [num_rows] int32 on the same device; a row with -1 (or any index out of range) is left alone.
        num_valid: Which rows count; see the module.
        out: Where to write, contiguous [num_rows, *shape] of the same dtype, one for each of `source`; by default new
            tensors, which are not initialised.

    Returns:
        `out`: a tensor for a tensor, a tuple for a sequence.

    Raises:
        ValueError: An argument is wrong; nothing has been written.
    """
    if not isinstance(source, torch.Tensor | Sequence):
        raise ValueError(f"source is a {type(source).__name__}, expected a tensor or a sequence of them")
    sources = (source,) if isinstance(source, torch.Tensor) else tuple(source)
    if not 1 <= len(sources) <= _abi.MAX_PAYLOADS:
        raise ValueError(f"source has {len(sources)} tensors, allowed are 1 to {_abi.MAX_PAYLOADS}")
    for index, one in enumerate(sources):
        if not isinstance(one, torch.Tensor) or one.dim() < 1:
            raise ValueError(f"source[{index}] is {one!r}, expected a tensor [num_source_rows, *shape]")
    device, count = sources[0].device, sources[0].shape[0]
    for index, one in enumerate(sources):
        check_tensor(f"source[{index}]", one, (count, *one.shape[1:]), (one.dtype,), device)
        if one.numel() == 0 and count:
            raise ValueError(f"source[{index}] has shape {list(one.shape)}, expected rows of at least one element")
        if count:
            check_row_bytes(f"source[{index}]", one[0].numel() * one.element_size())
    check_int("rows of source", count, 0, _abi.MAX_ROWS)
    rows = _count_rows("source_rows", source_rows)
    check_tensor("source_rows", source_rows, (rows,), (torch.int32,), device)
    wanted = [(rows, *one.shape[1:]) for one in sources]
    if out is None:
        outs = [torch.empty(shape, dtype=one.dtype, device=device) for shape, one in zip(wanted, sources, strict=True)]
    else:
        outs = [out] if isinstance(out, torch.Tensor) else list(out)
        if len(outs) != len(sources):
            raise ValueError(f"out has {len(outs)} tensors, source has {len(sources)}")
        for index, (one, shape, like) in enumerate(zip(outs, wanted, sources, strict=True)):
            check_tensor(f"out[{index}]", one, shape, (like.dtype,), device)
            for other, read in enumerate(sources):
                check_apart(f"out[{index}]", one, f"source[{other}]", read)
    args = _abi_moe.MoeExpandArgs(
        device=_device_kind(device),
        ordinal=device.index or 0,
        valid=_valid_rows(num_valid, rows, device),
        source_rows=source_rows.data_ptr(),
        num_source_rows=count,
        num_payloads=len(sources),
        stream=current_stream(device),
    )
    if rows and count:
        for index, (one, to) in enumerate(zip(sources, outs, strict=True)):
            args.from_rows[index] = one.data_ptr()
            args.to_rows[index] = to.data_ptr()
            args.row_bytes[index] = one[0].numel() * one.element_size()
        _abi.call("putget_moe_expand", ctypes.byref(args))
    return outs[0] if isinstance(source, torch.Tensor) else tuple(outs)


@overload
def gated_activation(
    x: torch.Tensor,
    gate: Gate = "silu",
    *,
    num_valid: ValidRows = None,
    quantise: None = None,
    out: torch.Tensor | None = None,
    scales: None = None,
) -> torch.Tensor: ...


@overload
def gated_activation(
    x: torch.Tensor,
    gate: Gate = "silu",
    *,
    num_valid: ValidRows = None,
    quantise: Literal["fp8_block"],
    out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def gated_activation(
    x: torch.Tensor,
    gate: str = "silu",
    *,
    num_valid: ValidRows = None,
    quantise: str | None = None,
    out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """act(x[:, :n]) * x[:, n:] in float32, rounded once.

    SwiGLU and GeGLU of Shazeer, "GLU Variants Improve Transformer". "gelu" is the exact one, with erf. On CUDA
    exponentials and quotients are approximate, within 1e-5 relative.

    Args:
        x: [rows, 2 * n] bfloat16, float16 or float32, contiguous: the gate's half, then the up half.
        gate: "silu" or "gelu".
        num_valid: Which rows count; see the module.
        quantise: "fp8_block": the float32 result as E4M3 (OCP 8-bit floating point specification), with one float32
            scale for each 128 values, max(|y|) / 448; n is a multiple of 16. None: in the dtype of x.
        out: Where to write, contiguous [rows, n], of the dtype of x or float8_e4m3fn; by default a new tensor, which
            is not initialised.
        scales: With quantise: contiguous [rows, ceil(n / 128)] float32; likewise.

    Returns:
        `out`; with quantise (out, scales).

    Raises:
        ValueError: An argument is wrong; nothing has been written.
    """
    if gate not in GATES:
        raise ValueError(f"gate is {gate!r}, allowed are {' and '.join(map(repr, GATES))}")
    if quantise not in (None, "fp8_block"):
        raise ValueError(f"quantise is {quantise!r}, allowed are None and 'fp8_block'")
    if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.shape[1] < 2 or x.shape[1] % 2:
        came = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"x is {came}, expected a tensor [rows, 2 * n]")
    rows, n = x.shape[0], x.shape[1] // 2
    check_tensor("x", x, (rows, 2 * n), tuple(OUTPUT_TYPES), x.device)
    check_int("rows of x", rows, 0, _abi.MAX_ROWS)
    if n > MAX_COLUMNS:
        raise ValueError(f"x has 2 * {n} columns, allowed are 2 * {MAX_COLUMNS}")
    if quantise is None:
        if scales is not None:
            raise ValueError("scales came, but quantise is None")
        out = _given_or_new("out", out, (rows, n), x.dtype, x.device)
    else:
        if n % QUANTISED_PACK:
            raise ValueError(f"x has 2 * {n} columns: quantised rows have a multiple of {QUANTISED_PACK}")
        out = _given_or_new("out", out, (rows, n), torch.float8_e4m3fn, x.device)
        scales = _given_or_new("scales", scales, (rows, -(-n // SCALE_BLOCK)), torch.float32, x.device)
        for name, one in (("x", x), ("out", out)):
            if one.data_ptr() % 16:
                raise ValueError(f"{name} begins at an address that is no multiple of 16 bytes, which quantise needs")
    check_apart("out", out, "x", x)
    args = _abi_moe.MoeActivationArgs(
        device=_device_kind(x.device),
        ordinal=x.device.index or 0,
        valid=_valid_rows(num_valid, rows, x.device),
        x=x.data_ptr(),
        out=out.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
        elements=n,
        element_type=OUTPUT_TYPES[x.dtype],
        gate=GATES[gate],
        stream=current_stream(x.device),
    )
    if rows:
        _abi.call("putget_moe_activate", ctypes.byref(args))
    return out if scales is None else (out, scales)


def finalize(rows: torch.Tensor, grouped: ExpertMajor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The weighted sum of each received row's local experts, in float32 with k ascending, rounded once.

    ``AllToAll.combine(rows, layout=grouped)`` does this and then combines. By itself it fills ``combine_input``, for
    a ``combine()`` without arguments later in the round.

    Args:
        rows: [capacity, *shape] as experts wrote them in the layout, of the AllToAll's output dtype; contiguous.
        grouped: Of the round that is open.
        out: Contiguous [max_rows * ep_size, *shape]; rows of empty slots are left alone. None: ``combine_input``.

    Returns:
        `out`, or ``combine_input.flat``.

    Raises:
        ValueError: An argument is wrong; nothing has been written.
        ProtocolMisuse: The layout is of another round.
    """
    if not isinstance(grouped, ExpertMajor):
        raise ValueError(f"grouped is a {type(grouped).__name__}, expected what received.expert_major() returns")
    grouper = grouped._grouper
    grouper.check_rows(rows, grouper.check_layout(grouped), "rows", into_combine_input=out is None)
    if out is not None:
        check_tensor("out", out, (grouped.positions.shape[0], *rows.shape[1:]), (rows.dtype,), rows.device)
        check_apart("out", out, "rows", rows)
    return grouper.finalize(rows, grouped, out)


def _device_kind(device: torch.device) -> int:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"tensors are on {device}, expected cuda or cpu")
    return _abi.DEVICE_CUDA if device.type == "cuda" else _abi.DEVICE_CPU


def _count_rows(name: str, value: Any) -> int:
    if not isinstance(value, torch.Tensor) or value.dim() != 1:
        came = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"{name} is {came}, expected a tensor of one dimension")
    return check_int(f"entries of {name}", int(value.shape[0]), 0, _abi.MAX_ROWS)


def _given_or_new(
    name: str, given: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return check_tensor(name, given, shape, (dtype,), device)


def _valid_rows(num_valid: Any, limit: int, device: torch.device) -> _abi_moe.MoeRows:
    """For the C ABI.

    Raises:
        ValueError: num_valid is none of what it may be.
    """
    if num_valid is None:
        return _abi_moe.MoeRows(limit=limit)
    if isinstance(num_valid, torch.Tensor):
        if num_valid.numel() != 1:
            raise ValueError(f"num_valid has shape {list(num_valid.shape)}, expected one int32, or (offsets, num_rows)")
        check_tensor("num_valid", num_valid, tuple(num_valid.shape), (torch.int32,), device)
        return _abi_moe.MoeRows(count=num_valid.data_ptr(), limit=limit)
    if isinstance(num_valid, ExpertMajor):
        if num_valid.capacity != limit:
            raise ValueError(f"num_valid is of {num_valid.capacity} rows, the tensors have {limit}")
        offsets, num_rows = num_valid.offsets, num_valid.num_rows
    elif isinstance(num_valid, tuple) and len(num_valid) == 2:
        offsets, num_rows = num_valid
    else:
        raise ValueError(f"num_valid is {num_valid!r}, expected a tensor, (offsets, num_rows) or an ExpertMajor")
    groups = _count_rows("num_rows", num_rows)
    if groups > MAX_GROUPS:
        raise ValueError(f"num_rows has {groups} groups, allowed are {MAX_GROUPS}")
    check_tensor("num_rows", num_rows, (groups,), (torch.int32,), device)
    starts = _count_rows("offsets", offsets)
    if starts not in (groups, groups + 1):
        raise ValueError(f"offsets has {starts} entries, expected {groups} or {groups + 1}")
    check_tensor("offsets", offsets, (starts,), (torch.int32,), device)
    if groups == 0:
        return _abi_moe.MoeRows(limit=0)
    return _abi_moe.MoeRows(offsets=offsets.data_ptr(), num_rows=num_rows.data_ptr(), num_groups=groups, limit=limit)
