"""The connector's scheduler half: what requests say of other servers comes from HTTP, and may be anything."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import numpy as np

import putget_transfer as pt
from putget_transfer import kv
from putget_transfer.adapters.options import Options
from tests.adapters.packages import stand_in
from tests.harness import Rank, fresh_ranks


def load() -> None:
    """Put stand-ins for vLLM into this process."""
    connector = "vllm.distributed.kv_transfer.kv_connector"
    shells = ("vllm", "vllm.v1", "vllm.v1.metrics", "vllm.distributed", "vllm.distributed.kv_transfer", connector)
    for name in (*shells, f"{connector}.v1", "vllm.model_executor", "vllm.model_executor.models"):
        stand_in(name, __version__="0.33.0")

    def kinds(*names: str) -> dict[str, type]:
        return {name: type(name, (), {}) for name in names}

    results = type("KVConnectorTransferResults", (), {})
    results.__init__ = lambda self: self.__dict__.update(  # type: ignore[misc]
        finished_sending=set(), finished_recving=set(), failed_recving=set()
    )
    bases = kinds("KVConnectorHandshakeMetadata", "KVConnectorMetadata")
    stand_in(f"{connector}.v1.base", KVConnectorTransferResults=results, **bases)
    stats = type("KVConnectorStats", (), {"__init__": lambda self, data: self.__dict__.update(data=data)})
    stand_in(f"{connector}.v1.metrics", KVConnectorStats=stats, KVConnectorPromMetrics=object)
    stand_in("vllm.v1.metrics.utils", create_metric_per_engine=None)
    stand_in("vllm.logger", init_logger=logging.getLogger)
    stand_in("vllm.model_executor.models.utils", extract_layer_index=None)
    specs = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "UniformTypeKVCacheSpecs")
    stand_in("vllm.v1.kv_cache_interface", **kinds(*specs))
    stand_in("vllm.v1.request", **kinds("RequestStatus"))


def scheduler() -> Any:
    from putget_transfer.adapters.vllm.scheduler import Scheduler

    return Scheduler(SimpleNamespace(transfer_groups=[]), Options())


def names_that_are_taken(_rank: Rank) -> dict[str, bool]:
    """Return which names a prefill server hands over under."""
    load()
    found = {}
    for name in ("a name", None, 5, "", ["a"], {}, True):
        one = scheduler()
        params = {"do_remote_decode": True} if name is None else {"do_remote_decode": True, "transfer_id": name}
        one.new_request(SimpleNamespace(request_id="r", num_prompt_tokens=3, kv_transfer_params=params))
        found[repr(name)] = params["do_remote_decode"]
        # vLLM keeps the rest of what it knows of a request apart.
        assert bool(one.prefills) == bool(one.names) == params["do_remote_decode"]
    return found


def test_a_prefill_server_takes_names_that_are_text() -> None:
    with fresh_ranks(1) as ranks:
        found = ranks.call(names_that_are_taken)[0]
    assert [name for name, taken in found.items() if taken] == ["'a name'", "None"]


def a_name_of_two_lives(_rank: Rank) -> tuple[set[str], set[str], set[str]]:
    """Return which requests' blocks come back: after the first life, with the second, and once a decoder has it."""
    load()
    from putget_transfer.adapters.vllm.metadata import Metadata, Work
    from putget_transfer.adapters.vllm.steps import Steps
    from putget_transfer.adapters.vllm.worker import Worker

    network = pt.SimNetwork(5)
    engines = [pt.Engine.builder().group(pt.DeviceGroup.sim(network, 1)).build() for _ in range(2)]
    shape = {"layout": "BNC", "page_tokens": 4, "num_kv_heads": 1, "packed": False}
    caches = [kv.KvCache(engine, {"layer": np.zeros([16, 4, 32], np.uint8)}, **shape) for engine in engines]
    worker = Worker(None, None, Options(), 0)
    worker.prefiller, decoder = kv.Prefiller(caches[0]), kv.Decoder(caches[1])
    worker.layers, worker.steps = SimpleNamespace(pages=list), Steps(worker.prefiller, {"layer": 0})
    step = Metadata(work=[Work("t", 8, ([0, 1],))])

    def computed() -> None:
        worker.begin(step)
        worker.layer_done("layer")
        worker.step_done()

    # Its blocks are taken away, and then it is aborted.
    computed()
    worker.hand_over(None, "t", "its prefill was aborted")
    first = worker.results().finished_sending
    # The client tries again under the same name.
    computed()
    worker.hand_over("again", "t", None)
    second = worker.results().finished_sending
    decoder.request(decoder.sources([worker.prefiller.source()]), "t", [[2, 3]], tokens=8, deadline_s=10).wait(30)
    third, end = set(second), time.monotonic() + 30
    while not third and time.monotonic() < end:
        third |= worker.results().finished_sending
    for engine in engines:
        engine.close()
    return first, second, third


def test_a_name_that_was_aborted_without_blocks_is_handed_over_again() -> None:
    with fresh_ranks(1) as ranks:
        assert ranks.call(a_name_of_two_lives)[0] == (set(), set(), {"again"})
