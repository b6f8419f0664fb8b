"""By which address other hosts reach this one."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct

from putget import config

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of linux/sockios.h
_REQUEST_BYTES = 40  # of struct ifreq: the interface's name, then a struct sockaddr
_NAME_BYTES = 16
_ELSEWHERE = "192.0.2.1"  # an address for documentation (RFC 5737): nothing is sent there


def own_address() -> str | None:
    """An IPv4 address, or None where only the host's name is known.

    That of the interface that ``GLOO_SOCKET_IFNAME`` names; else that from which packets go to ``MASTER_ADDR``, or else
    by the default route. A name alone says little: hosts of a cluster need not know each other's.

    Raises:
        ValueError: There is no such interface, or it has no IPv4 address.
    """
    named = config.socket_interface()
    if named is not None:
        return _address_of(named)
    for other in (config.master(), _ELSEWHERE):
        found = None if other is None else _address_towards(other)
        if found is not None and not ipaddress.ip_address(found).is_loopback:
            return found
    return None


def _address_of(interface: str) -> str:
    request = struct.pack(f"{_REQUEST_BYTES}s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            socket.if_nametoindex(interface)  # not another one, where the name is too long for a request
            answer = fcntl.ioctl(sock.fileno(), _ADDRESS_OF_INTERFACE, request)
        except OSError as error:
            raise ValueError(f"GLOO_SOCKET_IFNAME is {interface!r}: {error.strerror}") from error
    return socket.inet_ntoa(answer[_NAME_BYTES + 4 : _NAME_BYTES + 8])  # behind family and port


def _address_towards(other: str) -> str | None:
    """Where packets to another host leave from. A datagram socket that is connected has sent nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.connect((other, 9))
        return str(sock.getsockname()[0])
    return None
