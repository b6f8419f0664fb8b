"""The cost of fewer bytes: the error of combine with quantised rows, on Gaussian rows and on rows with outliers.

    python benchmarks/combine_error.py

Needs no GPU: putget.reference makes the bits that both backends make. Prints the table of docs/performance/results.md.
"""

import torch

from putget import reference

TOKENS, HIDDEN, ROWS_OF_A_TOKEN = 256, 7168, 8
OUTLIERS, FACTOR = 0.001, 100.0  # the share of elements that are this much larger


def rows_of(kind: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """[ROWS_OF_A_TOKEN, TOKENS, HIDDEN] bfloat16, and [TOKENS, HIDDEN] bool: sums without an outlier."""
    rows = torch.randn(ROWS_OF_A_TOKEN, TOKENS, HIDDEN, generator=generator)
    is_outlier = torch.rand(rows.shape, generator=generator) < (OUTLIERS if kind == "outliers" else 0.0)
    return torch.where(is_outlier, rows * FACTOR, rows).bfloat16(), ~is_outlier.any(0)


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over the norm of the exact sums."""
    return float((got.double() - exact).norm() / exact.norm())


def main() -> None:
    """Prints a row for each kind of rows and each way to send them."""
    print("| rows | sent as | relative error of all sums | of sums without an outlier |\n|---|---|---|---|")
    for kind in ("Gaussian", "outliers"):
        rows, plain = rows_of(kind, torch.Generator().manual_seed(0))
        exact = rows.double().sum(0)
        ways = {
            "BF16": rows.float(),
            "FP8, a scale for 128 elements": reference.quantised(rows),
        }
        for name, sent in ways.items():
            got = reference.tree_sum(list(sent.float())).bfloat16()
            errors = relative_error(got, exact), relative_error(got[plain], exact[plain])
            print(f"| {kind} | {name} | {errors[0]:.2e} | {errors[1]:.2e} |")


if __name__ == "__main__":
    main()
