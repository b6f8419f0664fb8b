"""A connector for vLLM: KV caches go from prefill servers to decode servers by `putget_transfer.kv`.

Written for vLLM 0.33. An installed package registers it by the entry point `vllm.general_plugins`; otherwise
`kv_connector_module_path` names this module. Nothing of vLLM is imported before it asks.
"""

from typing import Any

NAME = "PutgetConnector"

__all__ = ["NAME", "register"]


def register() -> None:
    """Tell vLLM the connector's name. vLLM calls it in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, __name__, NAME)


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from putget_transfer.adapters.vllm.connector import PutgetConnector

    return PutgetConnector
