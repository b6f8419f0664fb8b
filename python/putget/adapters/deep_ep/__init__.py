"""DeepEP's signatures on putget: ``Buffer``, and ``ElasticBuffer`` of DeepEP 2.1.

    from putget.adapters import deep_ep    # instead of: import deep_ep
    buffer = deep_ep.Buffer(group, num_nvl_bytes, num_rdma_bytes, low_latency_mode=True, ...)

Code that imports ``deep_ep`` itself gets the same classes after ``install()``. ``buffer`` and ``elastic`` say what each
class supports.
"""

from putget.adapters.deep_ep.buffer import Buffer, Handle, topk_idx_t
from putget.adapters.deep_ep.elastic import ElasticBuffer, EPHandle
from putget.adapters.deep_ep.in_place import install
from putget.adapters.deep_ep.rounds import Config, EventOverlap

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventOverlap", "Handle", "install", "topk_idx_t"]
