"""Hosts for a test: network namespaces with a cable between each of them and a bridge. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CLONE_NEWNET = 0x40000000
NIC = "nic0"
NETWORK = "10.78.0"


class Hosts:
    """Network namespaces, as long as `made` lasts.

    Attributes:
        names: of the namespaces.
    """

    def __init__(self, count: int) -> None:
        self._prefix = f"pg{os.getpid()}"
        self.names = [f"{self._prefix}h{index}" for index in range(count)]

    def make(self) -> None:
        switch = self._prefix
        _ip(f"netns add {switch}")
        _ip(f"-n {switch} link add switch type bridge")
        _ip(f"-n {switch} link set switch up")
        for index, name in enumerate(self.names):
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link add {NIC} type veth peer name port{index} netns {switch}")
            _ip(f"-n {switch} link set port{index} master switch up")
            _ip(f"-n {name} addr add {NETWORK}.{index + 1}/24 dev {NIC}")
            _ip(f"-n {name} link set {NIC} up")

    def end(self) -> None:
        for name in [*self.names, self._prefix]:
            with contextlib.suppress(subprocess.CalledProcessError):  # one that was never made
                _ip(f"netns del {name}")

    def pull(self, index: int) -> None:
        """Takes a host's cable out of the switch."""
        _ip(f"-n {self._prefix} link set port{index} down")

    def put_back(self, index: int) -> None:
        _ip(f"-n {self._prefix} link set port{index} up")

    def interrupt(self, seconds: float) -> float:
        """Lets the switch drop what hosts send each other, for so long; returns how long it was at most.

        No link goes down. When one comes up again beside busy processes, the kernel may take many seconds until it lets
        packets through.
        """
        begin = time.monotonic()
        self._isolate("on")
        time.sleep(seconds)
        self._isolate("off")
        return time.monotonic() - begin

    def _isolate(self, on_or_off: str) -> None:
        for index in range(len(self.names)):
            _ip(f"-n {self._prefix} link set port{index} type bridge_slave isolated {on_or_off}")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def made(count: int) -> Iterator[Hosts]:
    """Hosts; the test skips, with the reason, where they cannot be had."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    hosts = Hosts(count)
    try:
        try:
            hosts.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be had: {' '.join(error.cmd)}: {error.stderr.strip()}")
        yield hosts
    finally:
        hosts.end()


def run_on(name: str, body: Callable[[], Any]) -> Any:
    """A function's findings in a process on a host."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()

    def run() -> None:
        enter(name)
        theirs.send(body())

    process = context.Process(target=run)
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join(10)


def enter(name: str) -> None:
    """Moves this thread, and those that it starts, to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    folders = (Path("/run/netns"), Path("/var/run/netns"))  # one, but where /var/run is a folder of its own
    path = next(folder / name for folder in folders if (folder / name).exists())
    with path.open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")
