"""A warning for a layer whose experts were never given weights: it would return zeros without a word."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn


def warn_unwritten(experts: nn.Module) -> bool:
    """Looks whether weights are still the zeros that they were made as. Waits for the current stream.

    Args:
        experts: The experts of one rank.

    Returns:
        Whether it could look: not while a CUDA graph is captured.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    zeros = [name for name, weight in experts.named_parameters() if weight.numel() and _is_zero(weight)]
    if zeros:
        warnings.warn(
            f"the experts' weights {', '.join(zeros)} are all zeros, as the layer makes them, so it returns zeros: "
            "give it weights by from_dense, load_dense or load_state_dict before the first round",
            stacklevel=2,
        )
    return True


def _is_zero(weight: Tensor) -> bool:
    """By bytes, since not every device can compare FP8. The first row of each expert nearly always answers."""
    found = weight.detach().view(torch.uint8)
    return not bool(found[:, :1].any()) and not bool(found.any())
