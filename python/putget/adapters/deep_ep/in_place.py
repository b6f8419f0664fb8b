"""DeepEP's adapter under DeepEP's own name, for code that imports ``deep_ep`` itself: engines and their overlaps.

vLLM's dual-batch overlap and SGLang's two-batch overlap ask for DeepEP by name. After ``install()`` they get
``Buffer``, whose calls have two halves: the hook of a low-latency call, and the event of a normal one.
Code for DeepEP 2.1 gets ``ElasticBuffer``.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType

from putget import BackendUnavailable
from putget.adapters.deep_ep import buffer
from putget.adapters.deep_ep.elastic import ElasticBuffer, EPHandle
from putget.adapters.deep_ep.rounds import EventOverlap

NAME = "deep_ep"


class Config:
    """DeepEP's launch configuration, which putget accepts and does not use: it chooses launches by size.

    Args:
        num_sms: SMs of a call.
        nvl_chunked: Most tokens that are sent at once, and the room for tokens, over NVLink and then over RDMA.
    """

    def __init__(self, num_sms: int = 20, *nvl_chunked: int) -> None:
        self.num_sms = num_sms
        self.nvl_chunked = nvl_chunked


def install() -> ModuleType:
    """Puts a module ``deep_ep`` in place whose buffers are putget's, and returns it. Idempotent.

    Call it before the engine imports DeepEP, in every process that does.

    Raises:
        BackendUnavailable: Another ``deep_ep`` has been imported already: who has taken its names would keep them.
    """
    there = sys.modules.get(NAME)
    if there is not None:
        if getattr(there, "Buffer", None) is buffer.Buffer:
            return there
        raise BackendUnavailable(
            f"{NAME} has been imported already, from {getattr(there, '__file__', 'nowhere')}: call install() first"
        )
    module = ModuleType(NAME, "DeepEP's names, on putget.")
    module.__spec__ = importlib.machinery.ModuleSpec(NAME, loader=None, origin=__file__, is_package=True)
    module.__path__ = []
    utils = ModuleType(f"{NAME}.utils", "DeepEP's utils, on putget.")
    utils.__spec__ = importlib.machinery.ModuleSpec(utils.__name__, loader=None, origin=__file__)
    utils.__dict__.update(EventOverlap=EventOverlap)
    names = (buffer.Buffer, ElasticBuffer, EPHandle, Config, EventOverlap)
    module.__dict__.update({kind.__name__: kind for kind in names}, utils=utils, topk_idx_t=buffer.topk_idx_t)
    sys.modules[NAME], sys.modules[utils.__name__] = module, utils
    return module
