"""Block-scaled FP8: quantisation, and the grouped matrix product of rows with the weights of their experts.

The recipe is that of DeepSeek-V3 (technical report, section 3.3.2): weights are E4M3 with one float32 scale per
128x128 block, activations E4M3 with one float32 scale per row and 128 values. A product of 128 values is scaled, and
added up in float32. On CUDA the product of many rows is the library's kernel where GPU and sizes allow it. Otherwise,
and for quantisation, Triton's kernels run, which are imported at the first call. Both products give the same bits.
Triton's product takes bfloat16 rows and weights, too: ``putget.moe.experts`` uses it for few rows.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from putget import _abi, _abi_moe
from putget._arguments import check_tensor
from putget._log import logger
from putget.errors import BackendUnavailable
from putget.memory.workspace import current_stream
from putget.moe.expert_rows import ExpertRows
from putget.moe.kernels import GATES, Gate, gated_activation

GROUP = 128
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST = 448.0  # of E4M3
_NATIVE_CAPABILITY = (9, 0)  # the library's kernel has machine code for no other
_NATIVE_EXPERTS = 1024
_NATIVE_ROWS = 256  # of an expert: with fewer, Triton's product is as fast or faster (benchmarks/grouped_fp8.py)
_SMALLEST = 1e-12  # amax of a group: one of zeros must not divide by zero


def _kernels() -> ModuleType:
    """The Triton kernels.

    Raises:
        BackendUnavailable: There is no Triton.
    """
    try:
        return importlib.import_module("putget.moe.grouped_fp8_triton")
    except ImportError as error:
        raise BackendUnavailable(
            f"FP8 experts on CUDA need Triton, which torch for CUDA comes with: {error}"
        ) from error


def require_triton() -> None:
    """Raises BackendUnavailable where there is no Triton."""
    _kernels()


def triton_kernels() -> ModuleType | None:
    """The same; None where there is no Triton."""
    try:
        return _kernels()
    except BackendUnavailable:
        return None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def has_tensor_copies(device: torch.device) -> bool:
    """Whether the GPU has what Triton's product reads tiles with: compute capability 9.0 on."""
    return _capability(device) >= _NATIVE_CAPABILITY


@functools.cache
def is_native(device: torch.device) -> bool:
    """Whether the library's kernels of experts have machine code for this GPU."""
    return device.type == "cuda" and _capability(device) == _NATIVE_CAPABILITY


def check_multiple(name: str, size: int) -> None:
    """Raises ValueError where a size cannot be divided into blocks."""
    if size % GROUP:
        raise ValueError(f"{name} is {size}, FP8 blocks need a multiple of {GROUP}")


def quantise_rows(
    x: Tensor, out: Tensor | None = None, scales: Tensor | None = None, num_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows as E4M3 with one scale per 128 values; the same bytes on CPU and CUDA.

    Args:
        x: [num_rows, columns] bfloat16, float16 or float32, contiguous; columns a multiple of 128.
        out: [num_rows, columns] float8_e4m3fn to write into, or None.
        scales: [num_rows, columns / 128] float32 to write into, or None.
        num_rows: One int32 on the device: the rows before it are quantised, the others left alone. None: all.

    Returns:
        out and scales: a value is its code times the scale of its group.

    Raises:
        ValueError: An argument has another shape, dtype or layout, or columns is not a multiple of 128.
    """
    if not isinstance(x, Tensor) or x.dim() != 2:
        raise ValueError(f"x is {type(x).__name__} of shape {list(getattr(x, 'shape', []))}, expected 2 dimensions")
    rows, columns = x.shape
    check_multiple("columns of x", columns)
    check_tensor("x", x, (rows, columns), _FLOATS, x.device)
    if num_rows is not None:
        check_tensor("num_rows", num_rows, (1,), (torch.int32,), x.device)
    num_groups = columns // GROUP
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device) if out is None else out
    scales = torch.empty((rows, num_groups), device=x.device) if scales is None else scales
    check_tensor("out", out, (rows, columns), (torch.float8_e4m3fn,), x.device)
    check_tensor("scales", scales, (rows, num_groups), (torch.float32,), x.device)
    if x.is_cuda:
        _kernels().quantise_rows(x, out, scales, num_rows)
        return out, scales
    counted = slice(None if num_rows is None else int(num_rows))
    groups = x[counted].float().view(-1, num_groups, GROUP)
    scales[counted] = groups.abs().amax(dim=2).clamp(min=_SMALLEST) / _LARGEST
    # A cast on the CPU overflows to NaN where CUDA saturates.
    out[counted] = (groups / scales[counted, :, None]).clamp(-_LARGEST, _LARGEST).flatten(1).to(out.dtype)
    return out, scales


def quantise_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as E4M3 with one scale per 128x128 block.

    Args:
        weight: [rows, columns] of any float type; both multiples of 128.

    Returns:
        [rows, columns] float8_e4m3fn and [rows / 128, columns / 128] float32.

    Raises:
        ValueError: A size is not a multiple of 128.
    """
    rows, columns = weight.shape
    check_multiple("rows of weight", rows)
    check_multiple("columns of weight", columns)
    blocks = weight.float().view(rows // GROUP, GROUP, columns // GROUP, GROUP)
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=_SMALLEST) / _LARGEST
    codes = (blocks / scales[:, None, :, None]).clamp(-_LARGEST, _LARGEST).view(rows, columns)
    return codes.to(torch.float8_e4m3fn), scales


def dequantise_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """[..., columns] float32 of codes [..., columns] and scales [..., columns / 128]."""
    return (codes.float().view(*scales.shape, GROUP) * scales[..., None]).flatten(-2)


def dequantise_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """[rows, columns] float32 of codes [rows, columns] and scales [rows / 128, columns / 128]."""
    return codes.float() * scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)


@functools.cache
def _say(device: torch.device, num_experts: int, n: int, k: int, why: str) -> None:
    """Says once for each shape that the library's kernel does not run, and why."""
    logger.info("FP8 experts [%d, %d, %d] on %s: %s, so products are Triton's", num_experts, n, k, device, why)


def _takes(device: torch.device, num_experts: int, n: int, k: int, expected_rows: int) -> bool:
    """Whether the library's kernel takes weights of these sizes. Where it does not, the log says so."""
    if num_experts > _NATIVE_EXPERTS:
        why = f"a rank has more than {_NATIVE_EXPERTS} experts"
    elif n * num_experts >= 1 << 31:
        why = "the weights have 2^31 rows or more"
    elif _capability(device) != _NATIVE_CAPABILITY:
        why = "compute capability is {}.{}, not {}.{}".format(*_capability(device), *_NATIVE_CAPABILITY)
    elif expected_rows < _NATIVE_ROWS:
        why = f"an expert gets fewer than {_NATIVE_ROWS} rows"
    else:
        return True
    _say(device, num_experts, n, k, why)
    return False


def _native_product(
    rows: ExpertRows,
    weights: Tensor,
    weight_scales: Tensor,
    out: Tensor,
    out_scales: Tensor | None,
    gate: str,
    expected_rows: int,
    num_sms: int | None,
) -> None:
    """The kernel of the library; writes into out. At least one row and one expert."""
    num_experts, n, k = weights.shape
    assert rows.scales is not None  # they are checked
    args = _abi_moe.MoeProductArgs(
        device=_abi.DEVICE_CUDA,
        ordinal=out.device.index or 0,
        rows=rows.codes.data_ptr(),
        row_scales=rows.scales.data_ptr(),
        weights=weights.data_ptr(),
        weight_scales=weight_scales.data_ptr(),
        out=out.data_ptr(),
        starts=rows.starts.data_ptr(),
        counts=rows.counts.data_ptr(),
        num_experts=num_experts,
        capacity=rows.capacity,
        n=n,
        k=k,
        expected_rows=max(1, expected_rows),
        num_sms=num_sms or 0,
        out_scales=None if out_scales is None else out_scales.data_ptr(),
        gate=GATES[gate],
        stream=current_stream(out.device),
    )
    _abi.call("putget_moe_product", ctypes.byref(args))


def check_rows(rows: ExpertRows, weights: Tensor, weight_scales: Tensor) -> None:
    """Raises ValueError where rows and weights of one product do not go together."""
    num_experts, n, k = weights.shape
    check_multiple("k", k)
    check_multiple("n", n)
    for name, tensor, shape, dtype in (
        ("codes", rows.codes, (rows.capacity, k), torch.float8_e4m3fn),
        ("scales", rows.scales, (rows.capacity, k // GROUP), torch.float32),
        ("starts", rows.starts, (num_experts,), torch.int32),
        ("counts", rows.counts, (num_experts,), torch.int32),
        ("weights", weights, (num_experts, n, k), torch.float8_e4m3fn),
        ("weight_scales", weight_scales, (num_experts, n // GROUP, k // GROUP), torch.float32),
    ):
        check_tensor(name, tensor, shape, (dtype,), rows.codes.device)


def grouped_fp8_mm(
    rows: ExpertRows, weights: Tensor, weight_scales: Tensor, *, expected_rows: int, num_sms: int | None = None
) -> Tensor:
    """Each expert's rows times the transpose of its weights.

    Nothing is read from the device by the host: the kernel is launched once and takes tiles of the rows that
    ``rows.counts`` says there are.

    Args:
        rows: With k a multiple of 128.
        weights: [num_experts, n, k] float8_e4m3fn, contiguous; n a multiple of 128.
        weight_scales: [num_experts, n / 128, k / 128] float32, contiguous.
        expected_rows: Rows of an expert that the tiles are chosen for. It changes the speed, not what is computed.
        num_sms: Most SMs that are used; None: all.

    Returns:
        [capacity, n] bfloat16; rows that belong to no expert are undefined.

    Raises:
        ValueError: An argument has another shape, dtype, device or layout, or k or n is not a multiple of 128.
    """
    check_rows(rows, weights, weight_scales)
    num_experts, n, k = weights.shape
    out = torch.empty((rows.capacity, n), dtype=torch.bfloat16, device=rows.codes.device)
    if out.is_cuda:
        if rows.capacity and num_experts:
            if _takes(out.device, num_experts, n, k, expected_rows):
                _native_product(rows, weights, weight_scales, out, None, "silu", expected_rows, num_sms)
            else:
                _kernels().grouped_mm(rows, weights, weight_scales, out, expected_rows, num_sms)
        return out
    for expert, (start, count) in enumerate(zip(rows.starts.tolist(), rows.counts.tolist(), strict=True)):
        if count:
            span = slice(start, start + count)
            assert rows.scales is not None
            left = dequantise_rows(rows.codes[span], rows.scales[span])
            out[span] = (left @ dequantise_blocks(weights[expert], weight_scales[expert]).T).bfloat16()
    return out


def gated_fp8_mm(
    rows: ExpertRows,
    weights: Tensor,
    weight_scales: Tensor,
    gate: Gate,
    *,
    expected_rows: int,
    num_sms: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``grouped_fp8_mm`` and ``gated_activation`` of its result, quantised: where possible in one kernel. Equal bits.

    Args:
        rows: As for ``grouped_fp8_mm``.
        weights: [num_experts, n, k]: the rows of the gate before those of the other factor; n a multiple of 256.
        weight_scales: As there.
        gate: "silu" or "gelu".
        expected_rows: As there.
        num_sms: As there, of the product.

    Returns:
        [capacity, n / 2] float8_e4m3fn and [capacity, n / 256] float32; rows that belong to no expert are undefined.

    Raises:
        ValueError: As there, or n is not a multiple of 256.
    """
    check_rows(rows, weights, weight_scales)
    num_experts, n, k = weights.shape
    if gate not in GATES:
        raise ValueError(f"gate is {gate!r}, allowed are {' and '.join(map(repr, GATES))}")
    if n % (2 * GROUP):
        raise ValueError(f"n is {n}, a gate and its other factor need a multiple of {2 * GROUP}")
    device = rows.codes.device
    if not (rows.capacity and num_experts and device.type == "cuda") or not _takes(
        device, num_experts, n, k, expected_rows
    ):
        between = grouped_fp8_mm(rows, weights, weight_scales, expected_rows=expected_rows, num_sms=num_sms)
        return gated_activation(between, gate, num_valid=(rows.starts, rows.counts), quantise="fp8_block")
    out = torch.empty((rows.capacity, n // 2), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((rows.capacity, n // (2 * GROUP)), device=device)
    _native_product(rows, weights, weight_scales, out, scales, gate, expected_rows, num_sms)
    return out, scales
