"""Several pytest processes (pytest-xdist's workers) that share this machine's GPUs."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import pytest


def spread_gpus(num_gpus: int, environment: MutableMapping[str, str]) -> None:
    """Has every worker begin with another GPU, since a test with few ranks takes the first ones.

    All workers see all GPUs: they have to collect the same tests. To be called before CUDA starts.

    Args:
        num_gpus: GPUs that this process sees.
        environment: CUDA_VISIBLE_DEVICES is read and set here, PYTEST_XDIST_WORKER read; without it nothing is done.
    """
    worker = environment.get("PYTEST_XDIST_WORKER", "")
    if num_gpus < 2 or not worker.startswith("gw"):
        return
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(gpu) for gpu in range(num_gpus)] if visible is None else visible.split(",")[:num_gpus]
    # Steps of two first: workers that use two GPUs each then share none.
    first = 2 * int(worker[2:])
    first = (first + first // num_gpus) % num_gpus
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


def neighbours_share_ranks(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests in the order of how many ranks they take from a pool, so that a worker's share needs few pools."""
    return sorted(items, key=_num_ranks)


def _num_ranks(item: pytest.Item) -> int:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    size = parameters.get("ranks", parameters.get("peers"))
    return size if isinstance(size, int) else 0
