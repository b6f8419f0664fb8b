"""The grouped product's kernel under Triton's interpreter: TRITON_INTERPRET=1 python -m tests.moe.interpreted."""

from __future__ import annotations

import torch

from putget.moe import grouped_fp8_triton
from tests.moe.test_grouped_fp8 import PRODUCTS


def main() -> None:
    """Says "right" for every product and every kind of tiles."""
    for product in PRODUCTS:
        made = product.make()
        for expected_rows in (1, 16, 1000):
            out = torch.full((len(made["rows"]), product.n), float("nan"), dtype=torch.bfloat16)
            if len(out):
                grouped_fp8_triton.grouped_mm(**made, out=out, expected_rows=expected_rows, num_sms=None)
            belongs = torch.zeros(len(out), dtype=torch.bool)
            for start, count in zip(made["starts"].tolist(), product.counts, strict=True):
                belongs[start : start + count] = True
            untouched = bool(out[~belongs].isnan().all())
            wrong = product.wrong_rows(made, out)
            print("right" if untouched and not wrong else f"wrong: {product}, {expected_rows}, {wrong}, {untouched}")


if __name__ == "__main__":
    main()
