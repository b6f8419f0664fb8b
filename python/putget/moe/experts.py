"""The experts of one rank: gated feed-forward networks over rows grouped by expert, with no host knowledge of sizes."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn

from putget._arguments import check_int
from putget.moe import grouped_fp8, networks
from putget.moe.expert_rows import ExpertRows
from putget.moe.kernels import Gate, gated_activation
from putget.payload import Payload

_TRITON_ROWS = 256  # of a bfloat16 expert: up to there Triton's product is faster than torch's
_EAGER_ROWS = 16  # from there on it is, also where the host waits for the GPU
_loaded: set[tuple[object, ...]] = set()  # devices, shapes and tiles of Triton's product that have run


class Groups(Protocol):
    """Where each expert's rows are: what ``putget.ExpertMajor`` says.

    Attributes:
        offsets: [num_experts + 1] int32: starts, and the end.
        num_rows: [num_experts] int32: rows from each start on.
    """

    @property
    def offsets(self) -> Tensor: ...  # noqa: D102
    @property
    def num_rows(self) -> Tensor: ...  # noqa: D102


class Experts(Protocol):
    """A layer's request to its experts."""

    def payloads(self) -> list[Payload]:
        """The rows that dispatch moves."""

    def prepare(self, x: Tensor) -> tuple[Tensor, ...]:
        """The payloads of x [num_tokens, hidden_size]."""

    def load(self, expert: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        """Weights of one local expert in float32: [intermediate, hidden], the same, and [hidden, intermediate]."""

    def takes_scattered(self, expected_rows: int) -> bool:
        """Whether an expert with so many rows on average best takes them where they arrived."""

    def __call__(
        self, payloads: Sequence[Tensor], groups: Groups, expected_rows: int, source_rows: Tensor | None = None
    ) -> Tensor:
        """[capacity, hidden_size] bfloat16 of payloads [capacity, ...]; rows of no expert are undefined.

        expected_rows is what an expert has on average. With source_rows [capacity] int32, which takes_scattered has
        allowed, payloads are the rows as they arrived, and row i of the groups is the one of number source_rows[i].
        """


def layer_payloads(hidden_size: int, row_dtype: torch.dtype = torch.bfloat16) -> list[Payload]:
    """The payloads that the AllToAll of ``fused_layer`` is made with.

    Args:
        hidden_size: Elements of a token; a multiple of 8, with float8_e4m3fn of 128.
        row_dtype: Of the rows that travel: bfloat16, or float8_e4m3fn with a float32 scale for every 128 values.

    Raises:
        ValueError: An argument is none of these.
    """
    if row_dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        raise ValueError(f"row_dtype is {row_dtype}, allowed are torch.bfloat16 and torch.float8_e4m3fn")
    check_int("hidden_size", hidden_size, 1, 1 << 20)
    if row_dtype == torch.bfloat16:
        if hidden_size % 8:
            raise ValueError(f"hidden_size is {hidden_size}, BF16 rows need a multiple of 8")
        return [Payload((hidden_size,), torch.bfloat16)]
    grouped_fp8.check_multiple("hidden_size", hidden_size)
    return [Payload((hidden_size,), torch.float8_e4m3fn), Payload((hidden_size // grouped_fp8.GROUP,), torch.float32)]


def expected_rows(num_tokens: int, ep_size: int, top_k: int, num_experts: int) -> int:
    """The rows of an expert on average, if every rank has as many tokens, rounded up."""
    return -(-num_tokens * ep_size * top_k // num_experts)


class Bf16Experts(nn.Module):
    """BF16 rows and weights, through ``torch._grouped_mm`` on CUDA and one product for each expert on the CPU.

    Args:
        num_experts: Experts held here; may be 0.
        hidden_size: Elements of a row; a multiple of 8.
        intermediate_size: Elements between the two products; a multiple of 8.
        gate: "silu" or "gelu".
        device: Where the weights are.

    Attributes:
        gate_up: [num_experts, 2 * intermediate_size, hidden_size]: the gate's rows before those of the other factor.
        down: [num_experts, hidden_size, intermediate_size].
    """

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, gate: Gate, device: torch.device
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if size % 8:
                raise ValueError(f"{name} is {size}, BF16 experts need a multiple of 8: rows of whole 16 bytes")
        self.gate = gate
        self.hidden_size = hidden_size
        self.gate_up = _weight(num_experts, 2 * intermediate_size, hidden_size, torch.bfloat16, device)
        self.down = _weight(num_experts, hidden_size, intermediate_size, torch.bfloat16, device)

    def payloads(self) -> list[Payload]:
        """See ``Experts.payloads``."""
        return layer_payloads(self.hidden_size)

    def prepare(self, x: Tensor) -> tuple[Tensor, ...]:
        """See ``Experts.prepare``."""
        return (x,)

    def load(self, expert: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        """See ``Experts.load``."""
        self.gate_up[expert].copy_(torch.cat([gate, up]))
        self.down[expert].copy_(down)

    def takes_scattered(self, expected_rows: int) -> bool:
        """See ``Experts.takes_scattered``."""
        return False

    def forward(
        self, payloads: Sequence[Tensor], groups: Groups, expected_rows: int, source_rows: Tensor | None = None
    ) -> Tensor:
        """See ``Experts.__call__``."""
        assert source_rows is None
        return bf16_networks(payloads[0], groups, self.gate_up, self.down, self.gate, expected_rows)


class Fp8Experts(nn.Module):
    """Block-scaled FP8 rows and weights, as DeepSeek-V3 has them; see ``putget.moe.grouped_fp8``.

    Rows are quantised before they travel, or travel as BF16 and are quantised where they have arrived: the same codes.

    Args:
        num_experts: Experts held here; may be 0.
        hidden_size: Elements of a row; a multiple of 128.
        intermediate_size: Elements between the two products; a multiple of 128.
        gate: "silu" or "gelu".
        device: Where the weights are.
        row_dtype: Of the rows that travel: float8_e4m3fn or bfloat16.

    Attributes:
        gate_up: [num_experts, 2 * intermediate_size, hidden_size] float8_e4m3fn.
        gate_up_scales: [num_experts, 2 * intermediate_size / 128, hidden_size / 128] float32.
        down: [num_experts, hidden_size, intermediate_size] float8_e4m3fn.
        down_scales: [num_experts, hidden_size / 128, intermediate_size / 128] float32.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        gate: Gate,
        device: torch.device,
        row_dtype: torch.dtype = torch.float8_e4m3fn,
    ) -> None:
        super().__init__()
        grouped_fp8.check_multiple("hidden_size", hidden_size)
        grouped_fp8.check_multiple("intermediate_size", intermediate_size)
        self.gate = gate
        self.hidden_size = hidden_size
        self.row_dtype = row_dtype
        hidden, between = hidden_size // grouped_fp8.GROUP, intermediate_size // grouped_fp8.GROUP
        self.gate_up = _weight(num_experts, 2 * intermediate_size, hidden_size, torch.float8_e4m3fn, device)
        self.gate_up_scales = _weight(num_experts, 2 * between, hidden, torch.float32, device)
        self.down = _weight(num_experts, hidden_size, intermediate_size, torch.float8_e4m3fn, device)
        self.down_scales = _weight(num_experts, hidden, between, torch.float32, device)

    def payloads(self) -> list[Payload]:
        """See ``Experts.payloads``: rows; of FP8 ones their scales too."""
        return layer_payloads(self.hidden_size, self.row_dtype)

    def prepare(self, x: Tensor) -> tuple[Tensor, ...]:
        """See ``Experts.prepare``."""
        return (x,) if self.row_dtype == torch.bfloat16 else grouped_fp8.quantise_rows(x)

    def load(self, expert: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        """See ``Experts.load``."""
        for weight, scales, loaded in (
            (self.gate_up, self.gate_up_scales, torch.cat([gate, up])),
            (self.down, self.down_scales, down),
        ):
            codes, blocks = grouped_fp8.quantise_blocks(loaded)
            weight[expert].copy_(codes)
            scales[expert].copy_(blocks)

    def load_codes(self, expert: int, codes: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        """Weights that are quantised already: gate, up and down as E4M3, and scales [rows / 128, columns / 128]."""
        gate, up, down = codes
        self.gate_up[expert].copy_(_joined(gate, up))
        self.down[expert].copy_(down)
        self.gate_up_scales[expert].copy_(torch.cat([scales[0], scales[1]]))
        self.down_scales[expert].copy_(scales[2])

    def takes_scattered(self, expected_rows: int) -> bool:
        """See ``Experts.takes_scattered``."""
        return takes_scattered(self.down, expected_rows, self.row_dtype)

    def forward(
        self, payloads: Sequence[Tensor], groups: Groups, expected_rows: int, source_rows: Tensor | None = None
    ) -> Tensor:
        """See ``Experts.__call__``."""
        weights = self.gate_up, self.gate_up_scales, self.down, self.down_scales
        return fp8_networks(payloads, groups, weights, self.gate, expected_rows, source_rows)


def bf16_networks(
    rows: Tensor, groups: Groups, gate_up: Tensor, down: Tensor, gate: Gate, expected_rows: int
) -> Tensor:
    """Each expert's network over its rows: [capacity, hidden_size] bfloat16 of the same.

    Args:
        rows: [capacity, hidden_size] bfloat16.
        groups: Where each expert's rows are.
        gate_up: [num_experts, 2 * intermediate_size, hidden_size] bfloat16.
        down: [num_experts, hidden_size, intermediate_size] bfloat16.
        gate: "silu" or "gelu".
        expected_rows: Rows of an expert on average.
    """
    between = grouped_bf16_mm(rows, gate_up, groups, expected_rows)
    active = gated_activation(between, gate, num_valid=(groups.offsets, groups.num_rows))
    return grouped_bf16_mm(active, down, groups, expected_rows)


def fp8_networks(
    payloads: Sequence[Tensor],
    groups: Groups,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    gate: Gate,
    expected_rows: int,
    source_rows: Tensor | None = None,
) -> Tensor:
    """Likewise with block-scaled FP8. Few rows take one kernel where GPU and sizes allow it; the bits are the same.

    Args:
        payloads: Codes [capacity, hidden_size] float8_e4m3fn and scales [capacity, hidden_size / 128] float32; or rows
            [capacity, hidden_size] bfloat16, which are quantised.
        groups: Where each expert's rows are.
        weights: gate_up, its scales, down and its scales, as ``Fp8Experts`` has them.
        gate: "silu" or "gelu".
        expected_rows: Rows of an expert on average.
        source_rows: [capacity] int32, where ``takes_scattered`` allows it: row i of the groups is the one of this
            number in payloads, which are as they arrived.
    """
    gate_up, gate_up_scales, down, down_scales = weights
    if payloads[0].dtype == torch.bfloat16:
        codes, scales = grouped_fp8.quantise_rows(payloads[0], num_rows=groups.offsets[-1:])
    else:
        codes, scales = payloads
    starts, counts = groups.offsets[:-1], groups.num_rows
    # Groups without it are those of shared experts, which run beside dispatch: no kernel may take all SMs from it.
    progress: Tensor | None = getattr(groups, "progress", None)
    if progress is not None and len(codes) and networks.takes(down, expected_rows):
        rows = ExpertRows(codes, scales, starts, counts)
        return networks.run(rows, source_rows, weights, gate, progress)
    if source_rows is not None:
        raise ValueError(
            f"source_rows is given for {expected_rows} rows per expert, which takes_scattered does not allow"
        )
    active, active_scales = grouped_fp8.gated_fp8_mm(
        ExpertRows(codes, scales, starts, counts), gate_up, gate_up_scales, gate, expected_rows=expected_rows
    )
    return grouped_fp8.grouped_fp8_mm(
        ExpertRows(active, active_scales, starts, counts), down, down_scales, expected_rows=expected_rows
    )


def takes_scattered(down: Tensor, expected_rows: int, row_dtype: torch.dtype) -> bool:
    """Whether ``fp8_networks`` takes rows where they arrived, and that is the fastest way.

    Args:
        down: [num_experts, hidden_size, intermediate_size] float8_e4m3fn.
        expected_rows: Rows of an expert on average.
        row_dtype: Of rows that arrive.
    """
    few = expected_rows <= networks.MOST_SCATTERED and row_dtype == torch.float8_e4m3fn
    return few and networks.takes(down, expected_rows)


def grouped_bf16_mm(rows: Tensor, weights: Tensor, groups: Groups, expected_rows: int) -> Tensor:
    """Each expert's rows times the transpose of its weights, summed in float32.

    On CUDA few rows run by Triton's kernel of ``putget.moe.grouped_fp8``, many by ``torch._grouped_mm``, and so do the
    fewest outside of a graph: the same bits.

    Args:
        rows: [capacity, k] bfloat16.
        weights: [num_experts, n, k] bfloat16.
        groups: Where each expert's rows are.
        expected_rows: Rows of an expert on average. It changes the speed, not what is computed.

    Returns:
        [capacity, n] bfloat16; rows that belong to no expert are undefined.
    """
    if rows.is_cuda and len(rows) and len(weights):
        kernels = _triton_for(rows.device, weights, expected_rows)
        if kernels is not None:
            out = torch.empty((rows.shape[0], weights.shape[1]), dtype=rows.dtype, device=rows.device)
            few = ExpertRows(rows, None, groups.offsets[:-1], groups.num_rows)
            kernels.grouped_mm(few, weights, None, out, expected_rows, None)
            _loaded.add(_kind(kernels, weights, expected_rows))
            return out
        # Padding rows between groups count as rows of the expert before them: computed, and never looked at.
        product: Tensor = torch._grouped_mm(rows, weights.transpose(1, 2), offs=groups.offsets[1:])
        return product
    out = torch.empty((rows.shape[0], weights.shape[1]), dtype=rows.dtype, device=rows.device)
    if not rows.is_cuda:
        for expert, (start, count) in enumerate(zip(groups.offsets.tolist(), groups.num_rows.tolist(), strict=False)):
            if count:  # without rows, the conversion of the weights would be the whole cost
                span = slice(start, start + count)
                out[span] = (rows[span].float() @ weights[expert].float().T).to(out.dtype)
    return out


def _triton_for(device: torch.device, weights: Tensor, expected_rows: int) -> ModuleType | None:
    """Triton's kernels, where they are faster than torch's and take such weights; see benchmarks/grouped_fp8.py.

    A launch of Triton's costs the host 0.1 ms more. So eager calls with few rows are torch's, once the kernel has been
    loaded for graphs.
    """
    _, n, k = weights.shape
    if expected_rows > _TRITON_ROWS or n % 128 or k % 64 or weights.numel() // k >= 1 << 31:
        return None
    if not grouped_fp8.has_tensor_copies(device):
        return None
    kernels = grouped_fp8.triton_kernels()
    if kernels is None or expected_rows >= _EAGER_ROWS or torch.cuda.is_current_stream_capturing():
        return kernels
    return None if _kind(kernels, weights, expected_rows) in _loaded else kernels


def _kind(kernels: ModuleType, weights: Tensor, expected_rows: int) -> tuple[object, ...]:
    """The products that one load of Triton's kernel serves."""
    return weights.device, tuple(weights.shape), kernels.tiles_for(expected_rows, scaled=False)


def _weight(num_experts: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.zeros(num_experts, rows, columns, dtype=dtype, device=device), requires_grad=False)


def _joined(gate: Tensor, up: Tensor) -> Tensor:
    """Both one above the other, by bytes: not every device can concatenate FP8."""
    return torch.cat([gate.view(torch.uint8), up.view(torch.uint8)]).view(gate.dtype)
