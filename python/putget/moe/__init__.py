"""Around the experts: the kernels that stand between dispatch, grouped GEMMs and combine."""

from putget.moe.kernels import expand, finalize, gated_activation

__all__ = ["expand", "finalize", "gated_activation"]
