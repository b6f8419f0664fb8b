"""Loads of experts that ranks tell each other in the statistics of rounds, and where they are added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from putget import _abi_balancer
from putget._arguments import as_kind, check_int, check_tensor, shown

FIRST_LOAD = 2
"""Numbers of a rank's statistics in front of its loads: the batch that has landed, and how far its host has planned."""
_MOST_INTERVAL = 1 << 24


class LoadGathering:
    """Adds up the loads of all ranks, window by window. All ranks see the same sums, without a collective.

    In each iteration a rank tells ``num_stats - 2`` loads. A window's loads travel in as many iterations as that takes,
    while the next window is counted.

    Args:
        loads: int32 [num_experts] of each layer, on the device: what this rank's tokens add to.
        ep_size: ranks.
        num_stats: numbers of a rank in the statistics of a round, 3 or more.
        interval: the fewest iterations of a window, 1 or more.
        device: where the loads are.

    Attributes:
        stats: int32 [num_stats] on the device: what this rank tells in its next rounds.
        told: int32 [ep_size, num_stats] on the device: what an iteration's rounds have told; zeros where nothing was.

    Raises:
        ValueError: An argument is wrong.
    """

    def __init__(
        self, loads: Sequence[Tensor], ep_size: int, num_stats: int, interval: int, device: torch.device
    ) -> None:
        as_kind("device", device, torch.device)
        _require_loads(loads)
        check_int("ep_size", ep_size, 1, _abi_balancer.MAX_GPUS)
        check_int("num_stats", num_stats, FIRST_LOAD + 1, 1 << 16)
        check_int("interval", interval, 1, _MOST_INTERVAL)
        num_experts = loads[0].numel()
        for index, load in enumerate(loads):
            check_tensor(f"layers[{index}].expert_load", load, (num_experts,), (torch.int32,), device)
        self._loads = list(loads)
        self._shape = (len(loads), num_experts)
        self._interval = interval
        count = len(loads) * num_experts
        self.stats = torch.zeros(num_stats, dtype=torch.int32, device=device)
        self.told = torch.zeros(ep_size, num_stats, dtype=torch.int32, device=device)
        self._addresses = torch.tensor([load.data_ptr() for load in loads], dtype=torch.int64, device=device)
        self._before = torch.zeros(count, dtype=torch.int32, device=device)
        self._of_window = torch.zeros(count, dtype=torch.int32, device=device)
        self._state = torch.zeros(4, dtype=torch.int32, device=device)
        self._sums = host_words(count, device)
        self.begin()

    @property
    def num_stats(self) -> int:
        """Numbers of a rank in the statistics of a round."""
        return self.stats.numel()

    @property
    def landed(self) -> Tensor:
        """The first number of `stats`, which the landing area's kernels write."""
        return self.stats[:1]

    def hear(self, told: Tensor) -> None:
        """Keeps what a round's statistics were, int32 [ep_size, num_stats], for the step that ends the iteration."""
        self.told.copy_(told)

    def configuration(self) -> str:
        """The values that must be the same on all ranks."""
        layers, experts = self._shape
        return f"{layers} layers of {experts} experts, {self.num_stats} statistics, every {self._interval} iterations"

    def begin(self) -> None:
        """Forgets what was told and counted; the first window begins here. No kernel of a step may run."""
        self.told.zero_()
        self.stats.zero_()
        self.stats[1] = 1
        self._before.copy_(torch.cat(self._loads))
        self._state.copy_(torch.tensor([0, self._before.numel(), 0, 0], dtype=torch.int32))

    def sums(self) -> NDArray[np.int64]:
        """The loads of the window that the landing's progress names, int64 [num_layers, num_experts]."""
        return self._sums.numpy().view(np.uint32).astype(np.int64).reshape(self._shape)

    def native(self) -> _abi_balancer.Gathering:
        """The description of this memory for the native object."""
        return _abi_balancer.Gathering(
            told=self.told.data_ptr(),
            stats=self.stats.data_ptr(),
            load=self._addresses.data_ptr(),
            before=self._before.data_ptr(),
            of_window=self._of_window.data_ptr(),
            sums=self._sums.data_ptr(),
            state=self._state.data_ptr(),
            num_experts=self._shape[1],
            num_loads=self._before.numel(),
            num_stats=self.num_stats,
            interval=self._interval,
        )


def _require_loads(loads: Any) -> None:
    if not isinstance(loads, Sequence) or not loads or not isinstance(loads[0], Tensor):
        raise ValueError(f"loads is {shown(loads)}, expected the expert_load of each layer, one or more tensors")


class LandingTables:
    """Tables that batches change: where each one's next words wait, in host memory that kernels read.

    Args:
        tables: contiguous tensors on the device, whose bytes are a multiple of 4 at a multiple of 4.
        device: where they are.

    Raises:
        ValueError: A table is of another form.
    """

    def __init__(self, tables: Sequence[Tensor], device: torch.device) -> None:
        self._tables = list(tables)
        for index, table in enumerate(tables):
            if table.device != device or not table.is_contiguous() or table.nbytes % 4 or table.data_ptr() % 4:
                raise ValueError(
                    f"tables[{index}] is {table.dtype} {list(table.shape)} on {table.device}; it must be contiguous, "
                    f"of words of 4 bytes, on {device}"
                )
        self._next = [host_words(table.nbytes // 4, device) for table in tables]
        entries = (_abi_balancer.Table * len(self._tables))(
            *(
                _abi_balancer.Table(table.data_ptr(), words.data_ptr(), words.numel())
                for table, words in zip(self._tables, self._next, strict=True)
            )
        )
        raw = np.frombuffer(bytes(entries), np.uint8)
        self.entries = torch.from_numpy(raw.copy()).to(device)
        """The native table of tables, on the device."""

    def __len__(self) -> int:
        return len(self._tables)

    def check(self, index: int, words: Tensor) -> None:
        """Raises ValueError unless `words` can be what a table holds next."""
        if not 0 <= index < len(self):
            raise ValueError(f"tables has number {index}, there are {len(self)}")
        table = self._tables[index]
        if words.dtype != table.dtype or words.numel() != table.numel() or words.device.type != "cpu":
            raise ValueError(
                f"tables[{index}] is {words.dtype} {list(words.shape)} on {words.device}; "
                f"it must be {table.dtype} {list(table.shape)} on cpu"
            )

    def stage(self, index: int, words: Tensor) -> None:
        """Leaves what the table holds next where kernels find it. No batch that changes it may be open."""
        self._next[index].copy_(words.contiguous().view(-1).view(torch.int32))

    def write(self, index: int, words: Tensor) -> None:
        """Writes the table at once, in the current stream's order."""
        self._tables[index].copy_(words.view(self._tables[index].shape))


def host_words(count: int, device: torch.device) -> Tensor:
    """int32 [count], zeros, in memory of the host that kernels of the device read and write."""
    return torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda")
