"""Set-up of the tests that need a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Read when the CUDA context is made. Emulated ranks wait for each other inside one context: a module that loads, or a
# launch that shares a hardware queue with another rank, would wait behind a waiting kernel until the deadline.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from tests.gpu.ranks import Ranks, close_emulated_ranks, shared_ranks

# Every size up to the number of GPUs has a process per GPU; above that, ranks are threads on one GPU.
SIZES = (1, 2, 4, 8)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks everything in this folder, and skips it where there is no GPU."""
    here = os.path.dirname(__file__)
    for item in items:
        if not str(item.path).startswith(here):
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(params=SIZES, ids=lambda size: f"ep{size}")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Ranks that are kept between tests, of every size."""
    return shared_ranks(request.param)


@pytest.fixture(params=SIZES[1:], ids=lambda size: f"ep{size}")
def peers(request: pytest.FixtureRequest) -> Ranks:
    """The same for tests that need somebody to wait for: two ranks or more."""
    return shared_ranks(request.param)


@pytest.fixture(scope="session", autouse=True)
def gpu_pools() -> Iterator[None]:
    """Ends the shared ranks."""
    yield
    close_emulated_ranks()
