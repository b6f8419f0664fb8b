"""By which address other hosts reach this one: what is named, what leads to the others, and neither."""

from __future__ import annotations

import ipaddress
import os

import pytest

from putget.group import reach
from tests.harness import hosts


def test_the_interface_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth9")
    assert reach.own_address() == "127.0.0.1"


@pytest.mark.parametrize("name", ["nic_of_nobody", "a name that is longer than those of the kernel"])
def test_an_interface_that_is_not_there_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    with pytest.raises(ValueError, match=f"GLOO_SOCKET_IFNAME is '{name}': "):
        reach.own_address()


def towards(found: dict[str, str | None], monkeypatch: pytest.MonkeyPatch, master: str = "") -> str | None:
    """The address of a host whose packets leave from these."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setattr(reach, "_address_towards", lambda other: found.get(other))
    return reach.own_address()


def test_the_address_that_leads_to_the_master_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str | None] = {"node0": "10.1.0.7", reach._ELSEWHERE: "172.17.0.1"}
    assert towards(found, monkeypatch, "node0") == "10.1.0.7"
    assert towards(found, monkeypatch) == "172.17.0.1"
    assert towards(found, monkeypatch, "unknown") == "172.17.0.1"


def test_a_loopback_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str | None] = {"localhost": "127.0.0.1", reach._ELSEWHERE: "10.1.0.7"}
    assert towards(found, monkeypatch, "localhost") == "10.1.0.7"
    assert towards({"localhost": "127.0.0.1"}, monkeypatch, "localhost") is None


def test_nothing_is_sent_to_learn_it() -> None:
    found = reach._address_towards("127.0.0.9")
    assert found is not None
    assert ipaddress.ip_address(found).is_loopback
    assert reach._address_towards("no name of a host") is None


def test_hosts_without_a_default_route() -> None:
    """In a namespace of its own: an interface has an address, and nothing leads elsewhere."""
    with hosts.made(1) as made:
        assert hosts.run_on(made.names[0], seen_from) == [f"{hosts.NETWORK}.1", None, f"{hosts.NETWORK}.1"]


def seen_from() -> list[str | None]:
    found = []
    for interface, master in ((hosts.NIC, ""), ("", ""), ("", f"{hosts.NETWORK}.2")):
        os.environ.update(GLOO_SOCKET_IFNAME=interface, MASTER_ADDR=master)
        found.append(reach.own_address())
    return found
