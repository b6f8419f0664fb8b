"""A layer for engines that have their own router and weights: dispatch, the experts' products and combine."""

from __future__ import annotations

import torch
from torch import Tensor

from putget._arguments import check_tensor
from putget.alltoall import AllToAll
from putget.core.expert_major import ExpertMajorMemory
from putget.moe import grouped_fp8
from putget.moe.experts import bf16_networks, expected_rows, fp8_networks, layer_payloads, takes_scattered
from putget.moe.kernels import GATES, Gate
from putget.payload import Payload

_E4M3 = torch.float8_e4m3fn


@torch.no_grad()
def fused_layer(
    a2a: AllToAll,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    gate: Gate = "silu",
    addend: Tensor | None = None,
    out: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    busiest_tokens: int | None = None,
    memory: ExpertMajorMemory | None = None,
) -> Tensor:
    """A mixture-of-experts layer from routes, over the weights of vLLM's and SGLang's experts as they are.

    Every rank calls it for each round, with any number of its own tokens. Nothing waits for the host: after one eager
    call it can be captured in a CUDA graph. The kernels are those of ``ExpertParallelMoE``.

    Args:
        a2a: Made with ``payloads=layer_payloads(hidden_size, row_dtype)`` and ``output=Payload((hidden_size,),
            torch.bfloat16)``.
        x: [num_tokens, hidden_size] bfloat16, contiguous.
        topk_ids: [num_tokens, top_k] int32 or int64, global ids of experts; -1: none.
        topk_weights: [num_tokens, top_k] float32.
        gate_up: [num_local_experts, 2 * intermediate_size, hidden_size], bfloat16 or float8_e4m3fn, contiguous: the
            gate's rows before those of the other factor (``w13_weight``).
        down: [num_local_experts, hidden_size, intermediate_size] likewise (``w2_weight``).
        gate_up_scales: Of FP8: [num_local_experts, 2 * intermediate_size / 128, hidden_size / 128] float32
            (``w13_weight_scale_inv``).
        down_scales: Of FP8: [num_local_experts, hidden_size / 128, intermediate_size / 128] float32
            (``w2_weight_scale_inv``).
        gate: "silu" or "gelu".
        addend: [num_tokens, hidden_size] bfloat16, added last: the shared experts' output.
        out: [num_tokens, hidden_size] bfloat16, where to write; by default a new tensor.
        num_valid_tokens: One int32 on the device: tokens from there on go to no expert.
        busiest_tokens: Most tokens that any rank has in this round, where the caller knows. It changes the speed alone.
        memory: ``a2a.expert_major_memory()``, which layers may share; by default the object's own.

    Returns:
        [num_tokens, hidden_size] bfloat16.

    Raises:
        ValueError: An argument has another shape, dtype, device or layout, or does not go with the others; nothing has
            happened on any rank.
        BackendUnavailable: FP8 weights on CUDA need Triton; likewise.
        PeerTimeout: A rank is missing. On CUDA a later call raises it.
    """
    rows = _rows_of(a2a)
    weights = _check_weights(a2a, gate_up, down, gate_up_scales, down_scales, gate)
    num_tokens = len(x) if isinstance(x, Tensor) and x.dim() else 0
    check_tensor("x", x, (num_tokens, gate_up.shape[2]), (torch.bfloat16,), gate_up.device)
    if rows == _E4M3 and weights is None:  # codes would have to be made rows again
        raise ValueError("gate_up is bfloat16, with rows of float8_e4m3fn expected float8_e4m3fn weights")
    a2a.check_out(num_tokens, out, addend)
    memory = a2a.check_expert_major_memory(memory)  # with room for rows, which few need: one for batches of all sizes
    payloads = (x,) if rows == torch.bfloat16 else grouped_fp8.quantise_rows(x)
    received = a2a.dispatch(
        topk_ids, topk_weights, *payloads, num_valid_tokens=num_valid_tokens, busiest_tokens=busiest_tokens
    )
    busiest = max(num_tokens, busiest_tokens or 0) or received.payloads[0].shape[1]
    expected = expected_rows(busiest, a2a.ep_size, topk_ids.shape[1], len(a2a.expert_to_rank))
    scattered = weights is not None and takes_scattered(down, expected, rows)
    grouped = received.expert_major(memory=memory, copy_rows=not scattered)
    if weights is None:
        result = bf16_networks(grouped.payloads[0], grouped, gate_up, down, gate, expected)
    elif scattered:
        result = fp8_networks(received.flat.payloads, grouped, weights, gate, expected, grouped.source_rows)
    else:
        result = fp8_networks(grouped.payloads, grouped, weights, gate, expected)
    return a2a.combine(result, layout=grouped, out=out, addend=addend)


def _rows_of(a2a: AllToAll) -> torch.dtype:
    """The dtype of the rows that travel; raises ValueError where they are not a layer's."""
    hidden_size = a2a.output.shape[0] if a2a.output.shape else 1
    if a2a.output != Payload((hidden_size,), torch.bfloat16):
        raise ValueError(f"a2a has output {a2a.output}, expected bfloat16 rows of one dimension")
    for dtype in (torch.bfloat16, _E4M3):
        fits = hidden_size % (8 if dtype == torch.bfloat16 else grouped_fp8.GROUP) == 0
        if fits and list(a2a.payloads) == layer_payloads(hidden_size, dtype):
            return dtype
    raise ValueError(
        f"a2a has payloads {list(a2a.payloads)}, expected those of layer_payloads({hidden_size}, row_dtype)"
    )


def _check_weights(
    a2a: AllToAll, gate_up: Tensor, down: Tensor, gate_up_scales: Tensor | None, down_scales: Tensor | None, gate: str
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """The FP8 weights and their scales; None of BF16 ones."""
    if not isinstance(gate, str) or gate not in GATES:
        raise ValueError(f"gate is {gate!r}, allowed are {' and '.join(map(repr, GATES))}")
    experts, hidden_size = a2a.num_local_experts, a2a.output.shape[0]
    shape = gate_up.shape if isinstance(gate_up, Tensor) else ()
    intermediate = shape[1] // 2 if len(shape) == 3 else 0
    kinds = (gate_up.dtype,) if isinstance(gate_up, Tensor) and gate_up.dtype == _E4M3 else (torch.bfloat16,)
    device = a2a.expert_to_rank.device
    check_tensor("gate_up", gate_up, (experts, 2 * intermediate, hidden_size), kinds, device)
    check_tensor("down", down, (experts, hidden_size, intermediate), kinds, device)
    if kinds[0] == torch.bfloat16:
        for name, scales in (("gate_up_scales", gate_up_scales), ("down_scales", down_scales)):
            if scales is not None:
                raise ValueError(f"{name} is given, weights are bfloat16")
        if intermediate % 8:
            raise ValueError(f"intermediate_size is {intermediate}, BF16 experts need a multiple of 8")
        return None
    grouped_fp8.check_multiple("intermediate_size", intermediate)
    if device.type == "cuda":
        grouped_fp8.require_triton()
    wide, high = hidden_size // grouped_fp8.GROUP, intermediate // grouped_fp8.GROUP
    up = check_tensor("gate_up_scales", gate_up_scales, (experts, 2 * high, wide), (torch.float32,), device)
    back = check_tensor("down_scales", down_scales, (experts, wide, high), (torch.float32,), device)
    return gate_up, up, down, back
