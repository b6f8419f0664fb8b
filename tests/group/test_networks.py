"""Networks between domains: what is refused, and where rows may wait for them."""

from __future__ import annotations

import pytest
import torch

import putget
from putget.group.networks import NativeNetwork
from tests.harness import Rank, run_ranks


def test_networks_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="provider is 'ib', expected one of auto, verbs"):
        putget.Network("ib")
    with pytest.raises(ValueError, match="staging is 'gpu', expected one of auto, host, device"):
        putget.Network(staging="gpu")
    words = "provider 'tcp' reaches host memory alone; GPUs are reached by 'sim', 'nvlink', 'verbs', 'efa'"
    with pytest.raises(ValueError, match=words):
        putget.Network("tcp", staging="device")
    with pytest.raises(ValueError, match="staging is 'host', but provider 'nvlink' reaches memory of GPUs alone"):
        putget.Network("nvlink", staging="host")
    with pytest.raises(ValueError, match="domain_size is 0, expected None or an int from 1 to 128"):
        putget.Network(domain_size=0)
    with pytest.raises(ValueError, match="provider is 'verbs', ranks of one process have 'sim', 'tcp' and 'host'"):
        putget.Communicator.local(2, network=putget.Network("verbs"))
    with pytest.raises(ValueError, match="nics has 0 names, allowed are 1 to 4"):
        putget.Network("tcp", nics=())
    with pytest.raises(ValueError, match=r"nics is \('mlx5_0',\), but provider 'host' has none to choose from"):
        putget.Network("host", nics=("mlx5_0",))
    with pytest.raises(ValueError, match=r"network is 2, expected None or a putget\.Network"):
        putget.Communicator.local(2, network=2)  # type: ignore[arg-type]


def test_rows_of_a_cpu_do_not_wait_on_a_gpu() -> None:
    def body(rank: Rank) -> None:
        with pytest.raises(ValueError, match="network staging is 'device', but the object's device is cpu"):
            rank.all_to_all()

    run_ranks(2, body, mode="thread", network=putget.Network("sim", domain_size=1, staging="device"))


def test_native_objects_of_a_cpu_do_not_wait_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C functions do not rely on their caller's look at the device."""
    monkeypatch.setattr(NativeNetwork, "waits_on", lambda self, device: True)

    def body(rank: Rank) -> None:
        with pytest.raises(ValueError, match="inbox or the object is memory of a CPU: rows wait on a GPU"):
            rank.all_to_all()

    run_ranks(2, body, mode="thread", network=putget.Network("sim", domain_size=1))


def test_memory_of_another_gpu_is_refused() -> None:
    network_of = NativeNetwork("auto")
    network_of.gpu = 1
    with pytest.raises(ValueError, match="device is cuda:0, but the network copies with cuda:1, the current device"):
        network_of.waits_on(torch.device("cuda", 0))
    with pytest.raises(ValueError, match="reaches cuda:1 alone, but the object's device is cpu"):
        network_of.waits_on(torch.device("cpu"))
