"""Plug-ins for vLLM: KV caches from prefill servers to decode servers, and weights from trainers to workers.

The connector of KV caches is here, that of weights in `putget_transfer.adapters.vllm.weights`. Written for vLLM 0.33.
An installed package registers both by the entry point `vllm.general_plugins`; otherwise `kv_connector_module_path`
names this module. Nothing of vLLM is imported before it asks.
"""

from typing import Any

NAME = "PutgetConnector"

__all__ = ["NAME", "register"]


def register() -> None:
    """Tell vLLM the names. vLLM calls it in each of its processes."""
    from putget_transfer.adapters.vllm import weights

    weights.register()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, __name__, NAME)


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from putget_transfer.adapters.vllm.connector import PutgetConnector

    return PutgetConnector
