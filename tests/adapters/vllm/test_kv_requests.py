"""The connector's scheduler half: what requests say of other servers comes from HTTP, and may be anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
from tests.adapters.packages import stand_in
from tests.harness import Rank, fresh_ranks


def scheduler() -> Any:
    """Return one in a process that has stand-ins for vLLM."""
    logger = SimpleNamespace(warning=lambda *_words: None)
    kinds = {name: type(name, (), {}) for name in ("FullAttentionSpec", "UniformTypeKVCacheSpecs", "RequestStatus")}
    bases = {name: type(name, (), {}) for name in ("KVConnectorHandshakeMetadata", "KVConnectorMetadata")}
    for name in ("vllm", "vllm.v1", "vllm.distributed"):
        stand_in(name)
    for name in ("vllm.distributed.kv_transfer", "vllm.distributed.kv_transfer.kv_connector"):
        stand_in(name)
    stand_in("vllm.distributed.kv_transfer.kv_connector.v1")
    stand_in("vllm.distributed.kv_transfer.kv_connector.v1.base", **bases)
    stand_in("vllm.logger", init_logger=lambda _name: logger)
    stand_in("vllm.v1.kv_cache_interface", **kinds)
    stand_in("vllm.v1.request", **kinds)
    from putget_transfer.adapters.options import Options
    from putget_transfer.adapters.vllm.scheduler import Scheduler

    return Scheduler(SimpleNamespace(transfer_groups=[]), Options())


def names_that_are_taken(_rank: Rank) -> dict[str, bool]:
    """Return which names a prefill server hands over under."""
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
