"""Options of the adapters, and the engine that follows from them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import putget_transfer as pt

NETWORKS = ("tcp", "host", "nvlink", "verbs")
COUNTS = {"segment_tokens": (1 << 64) - 1, "max_requests": (1 << 32) - 1}
"""Options that are whole numbers, and the most that each may be."""
VARIABLE = "PUTGET_KV_OPTIONS"
"""The environment's variable with options in JSON, for engines that have no place for them."""


@dataclass(frozen=True)
class Options:
    """Options by the names that users give them.

    Attributes:
        networks: Some of "tcp", "host" (shared memory), "nvlink" and "verbs", separated by commas. Between two servers
            the best that both have is taken. None: "tcp" for a CPU; "nvlink,verbs" for a GPU.
        address: This machine's address for "tcp"; None is the one that leads to other machines.
        lease_s: How long the pages of a finished prefill wait for a decode server.
        deadline_s: Time from a decode server's question to the prompt's last page.
        confirm_s: How long a prefill server may take to confirm a cancel before it is fenced.
        segment_tokens: Tokens that leave together as soon as they are computed.
        heartbeat_s: How often peers are asked whether they live.
        timeout_s: The silence after which they count as down.
        max_requests: Requests under way at a time.
    """

    networks: str | None = None
    address: str | None = None
    lease_s: float = 30.0
    deadline_s: float = 300.0
    confirm_s: float = 5.0
    segment_tokens: int = 1024
    heartbeat_s: float = 0.5
    timeout_s: float = 5.0
    max_requests: int = 4096

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str = "kv_connector_extra_config") -> Options:
        """Read options.

        Args:
            given: Options by name.
            where: The place where the user wrote them, for errors.

        Raises:
            ValueError: A name or a value is not known.
        """
        known = {field.name: field for field in fields(cls)}
        fitting: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"{where}: {name!r} came; {', '.join(known)} are known")
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            number = number and 0 < value <= COUNTS.get(name, math.inf) and (name not in COUNTS or value % 1 == 0)
            if not (value is None or isinstance(value, str) if name in ("networks", "address") else number):
                raise ValueError(f"{where}: {name} {value!r} came; it does not fit")
            fitting[name] = int(value) if name in COUNTS else value
        options = cls(**fitting)
        wrong = [word for word in options.words("cpu") if word not in NETWORKS]
        if wrong:
            raise ValueError(f"{where}: networks {wrong} came; {', '.join(NETWORKS)} are known")
        return options

    @classmethod
    def from_environment(cls) -> Options:
        """Read options from `PUTGET_KV_OPTIONS`: an object in JSON.

        Raises:
            ValueError: The variable is not an object in JSON, or a name or a value is not known.
        """
        text = os.environ.get(VARIABLE, "") or "{}"
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {text!r} came; an object in JSON is needed: {error}") from error
        if not isinstance(given, dict):
            raise ValueError(f"{VARIABLE}: {text!r} came; an object in JSON is needed")
        return cls.of(given, VARIABLE)

    def words(self, device: str) -> list[str]:
        """Return the names of the networks for a device."""
        default = "tcp" if device == "cpu" else "nvlink,verbs"
        return [word.strip() for word in (self.networks or default).split(",")]

    def engine(self, device: str) -> pt.Engine:
        """Return an engine for memory of a device: "cpu" or "cuda:N".

        Peers that were lost, and not fenced, come back by themselves: a decode server that stood still goes on to ask.
        """
        builder = pt.Engine.builder()
        for word in self.words(device):
            if word == "tcp":
                group = pt.DeviceGroup.tcp([self.address])
            elif word == "host":
                group = pt.DeviceGroup.host()
            elif word == "nvlink":
                group = pt.DeviceGroup.nvlink(int(device.partition(":")[2] or 0))
            else:
                group = pt.DeviceGroup.verbs_near(pt.Topology(), device)
            builder = builder.group(group)
        return builder.heartbeat(self.heartbeat_s, self.timeout_s).readmit("lost").build()
