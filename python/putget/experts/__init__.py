"""Memory of experts: bytes, versions and movers of slots, a copy of all experts on each host, experts on their way.

The balancer plans and asks; this package knows where the bytes lie. It imports nothing of the balancer.
"""

from putget.experts.blobs import Blob, ExpertBlobs
from putget.experts.exchange import ExpertExchange, travelling_bytes
from putget.experts.host_pages import HostSettings, host_settings
from putget.experts.slots import ExpertSlots, SlotState
from putget.experts.store import HostStore
from putget.experts.store_report import HostStoreReport

__all__ = [
    "Blob",
    "ExpertBlobs",
    "ExpertExchange",
    "ExpertSlots",
    "HostSettings",
    "HostStore",
    "HostStoreReport",
    "SlotState",
    "host_settings",
    "travelling_bytes",
]
