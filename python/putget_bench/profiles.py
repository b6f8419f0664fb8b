"""Shapes of well-known models, and what one token looks like on the wire under each quantisation recipe."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from putget import Payload

FP8_GROUP = 128
NVFP4_GROUP = 16
QUANTS = ("bf16", "fp8", "nvfp4")
ROW_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Profile:
    """The shape of one mixture-of-experts layer.

    Attributes:
        hidden_size: values in one token's row.
        top_k: experts of one token.
        num_experts: experts of the layer, all ranks together.
        quant: what dispatch carries unless the user says otherwise.
    """

    hidden_size: int
    top_k: int
    num_experts: int
    quant: str = "fp8"


PROFILES = {
    "deepseek_v3": Profile(7168, 8, 256),
    "qwen3_235b": Profile(4096, 8, 128),
    "kimi_k2": Profile(7168, 8, 384),
    "gpt_oss_120b": Profile(2880, 4, 128),
    # No model's name: many experts and a large top_k on short rows.
    "h2048_k22_e512": Profile(2048, 22, 512, quant="nvfp4"),
}


def payloads(quant: str, hidden_size: int, row_dtype: torch.dtype = torch.bfloat16) -> list[Payload]:
    """The bytes that dispatch carries for one token.

    Args:
        quant: "bf16" (unquantised rows), "fp8" (e4m3 rows and one float32 scale per 128 values) or "nvfp4" (two
            values a byte and one e4m3 scale per 16 values).
        hidden_size: values in one row.
        row_dtype: element type of unquantised rows.

    Raises:
        ValueError: if quant is unknown, or nvfp4 rows do not divide into groups of 16 values.
    """
    if quant == "bf16":
        return [Payload((hidden_size,), row_dtype)]
    if quant == "fp8":
        return [
            Payload((hidden_size,), torch.float8_e4m3fn),
            Payload((-(-hidden_size // FP8_GROUP),), torch.float32),
        ]
    if quant == "nvfp4":
        if hidden_size % NVFP4_GROUP:
            raise ValueError(f"--hidden_size must be a multiple of {NVFP4_GROUP} for --quant nvfp4, got {hidden_size}")
        return [
            Payload((hidden_size // 2,), torch.uint8),
            Payload((hidden_size // NVFP4_GROUP,), torch.float8_e4m3fn),
        ]
    raise ValueError(f"--quant must be one of {', '.join(QUANTS)}, got {quant!r}")


def dispatch_row_bytes(carried: list[Payload], top_k: int) -> int:
    """Bytes that one (token, rank) row takes on the wire: payloads, int32 ids and float32 weights."""
    return sum(payload.row_bytes for payload in carried) + top_k * (4 + 4)
