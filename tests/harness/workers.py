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


# Files that take minutes, the longest first: begun last, one would run alone at the end.
LONGEST = (
    "protocol/test_model.py",
    "protocol/test_ctas.py",
    "transfer/test_verbs.py",
    "protocol/test_thread_sanitizer.py",
    "bench/test_programs.py",
    "protocol/test_landing.py",
    "alltoall/test_faults_agreement.py",
    "examples/test_examples.py",
    "alltoall/test_sentinel_rows.py",
    "bench/test_peers.py",
    "docs/test_blocks.py",
    "alltoall/test_domains_faults.py",
    "alltoall/test_domains.py",
    "bench/test_commands.py",
    "protocol/test_domains_rounds.py",
    "protocol/test_halves.py",
    "alltoall/test_faults.py",
    "alltoall/test_recover.py",
    "project/test_wheel.py",
    "protocol/test_domains_threads.py",
    "transfer/test_weights_processes.py",
    "transfer/test_kv_decoders.py",
    "transfer/test_kv_processes.py",
    "bench/test_ablate.py",
    "bench/test_hosts.py",
    "bench/test_doctor.py",
    "bench/test_no_sync.py",
    "moe/test_layer_benchmark.py",
)


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests in the order in which workers get them, by file.

    The longest files first; then by how many ranks a test takes from a pool, so that a worker's share needs few pools.
    """
    return sorted(items, key=lambda item: (_place(item), _num_ranks(item)))


def _place(item: pytest.Item) -> int:
    name = item.nodeid.partition("::")[0].removeprefix("tests/")
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def _num_ranks(item: pytest.Item) -> int:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    size = parameters.get("ranks", parameters.get("peers"))
    return size if isinstance(size, int) else 0
