"""FlashInfer's names on putget: ``MoeAlltoAll`` and the functions ``moe_a2a_*``.

Either import them instead of FlashInfer's,

    from putget.adapters.flashinfer import MoeAlltoAll, moe_a2a_get_workspace_size_per_rank

or call ``install()`` once, which puts putget's in the place of FlashInfer's, the functions ``moe_a2a_*`` included.
FlashInfer itself need not be installed for the former. ``functions`` has all the functions, and ``moe_ep`` registers
putget with ``flashinfer.moe_ep``.
"""

from putget.adapters.flashinfer.layout import moe_a2a_get_workspace_size_per_rank
from putget.adapters.flashinfer.moe_alltoall import MoeAlltoAll, install

__all__ = ["MoeAlltoAll", "install", "moe_a2a_get_workspace_size_per_rank"]
