"""Fixtures that all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Rank processes import test modules by name, so the checkout must be on the path however pytest was started.
sys.path.insert(0, str(Path(__file__).parent.parent))

# Emulated ranks wait for each other on one GPU: streams that share a hardware queue, or a module load that waits for
# the device, would stop one behind the other. Rank processes inherit both.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

from tests import harness
from tests.harness import proofs, warm
from tests.harness.run import reset_units
from tests.harness.workers import in_order, spread_gpus

spread_gpus(torch.cuda.device_count(), os.environ)

settings.register_profile("putget", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("putget")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prove", action="store_true", help="run tests of proved texts too, and record which have passed")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.prove and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(proofs.Recorder())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers of pytest-xdist get tests in an order of their own. Soaks run where they are asked for (`-m soak`)."""
    if "soak" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: make soak runs it"))
    proofs.heed(items, config.option.prove)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items[:] = in_order(items)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The backend under test; the CUDA half of a test is skipped where there is no GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return str(request.param)


@pytest.fixture(autouse=True)
def units() -> None:
    """Each test begins with what callers have, whatever layers the one before had on threads of this process."""
    reset_units()


@pytest.fixture(scope="session", autouse=True)
def rank_pools() -> Iterator[None]:
    """Ends the rank processes that tests share, and keeps the ranks from crowding each other's cores."""
    torch.set_num_threads(1)
    yield
    harness.close_pools()
    warm.close()
