"""Networks that join the domains of a test, and the devices of its ranks."""

from __future__ import annotations

import pytest

from tests.harness.domains import World

# Networks of threads, and transfer engines over sockets and shared memory.
PROVIDERS = ("sim", "tcp", "host")


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> str:
    if request.param != "sim":
        pytest.importorskip("putget_transfer._native", reason="putget_transfer is not built: see `make transfer`")
    return str(request.param)


@pytest.fixture
def world(provider: str, device: str) -> World:
    return World(provider, device)


@pytest.fixture
def sim(device: str) -> World:
    return World("sim", device)
