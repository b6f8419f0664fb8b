"""Memory of experts: the bytes of one expert, a copy of all on each host, and experts on their way between ranks.

The balancer plans and asks; this package knows where the bytes lie. It imports nothing of the balancer.
"""

from putget.experts.blobs import Blob, ExpertBlobs
from putget.experts.exchange import ExpertExchange, travelling_bytes
from putget.experts.host_pages import HostSettings, host_settings
from putget.experts.store import HostStore
from putget.experts.store_report import HostStoreReport

__all__ = [
    "Blob",
    "ExpertBlobs",
    "ExpertExchange",
    "HostSettings",
    "HostStore",
    "HostStoreReport",
    "host_settings",
    "travelling_bytes",
]
