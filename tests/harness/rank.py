"""A test body's view of the rank that it runs on."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

import putget


@dataclass
class Rank:
    """One rank of a test.

    Attributes:
        rank: this rank.
        size: number of ranks.
        device: where its tensors live.
        state: kept between the calls of one rank process; empty at the start of every test that uses a pool.
    """

    rank: int
    size: int
    device: torch.device
    state: dict[str, Any] = field(default_factory=dict)
    _comm: putget.Communicator | None = None
    _barrier: threading.Barrier | None = None

    @property
    def comm(self) -> putget.Communicator:
        """The communicator over all ranks; in a process it is made at the first use, which is collective."""
        if self._comm is None:
            self._comm = putget.Communicator()
        return self._comm

    @property
    def shares_gpu(self) -> bool:
        """Whether other ranks' kernels, which may wait for this rank, run on the same GPU."""
        return self._barrier is not None

    def meet(self) -> None:
        """Waits for the other ranks where all share one GPU; elsewhere ranks run freely and this does nothing.

        An allocation may wait for all kernels of its GPU, also for another rank's that waits for what this rank does
        next. So emulated ranks allocate first, meet, and then launch.
        """
        if self._barrier is not None:
            self._barrier.wait(30)

    def wait(self) -> None:
        """Waits for what has been launched; on CPUs that is over.

        A copy to memory that is not pinned waits as well. But where another thread made its first call of CUDA
        meanwhile, a network's that copies by CUDA, that call waited too, and kernels waited for its bytes.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def all_to_all(self, **options: Any) -> putget.AllToAll:
        """An AllToAll on this rank's device, with small defaults and test-sized deadlines."""
        defaults: dict[str, Any] = {
            "num_experts": 2 * self.size,
            "top_k": 2,
            "max_tokens_per_rank": 8,
            "payloads": [putget.Payload((4,), torch.float32)],
            "output": putget.Payload((4,), torch.float32),
            "device": self.device,
            "timeout_s": 20.0,
            "warmup_timeout_s": 20.0,
        }
        table = options.get("expert_to_rank")
        if isinstance(table, torch.Tensor):
            options["expert_to_rank"] = table.to(self.device)
        if self.device.type == "cpu" and self.comm.network is None:
            # Where the rule never has them: here ranks stand for GPUs. Across domains there are none.
            defaults["tuning"] = putget.tuning.Tuning(combine=putget.tuning.Launch(sentinel_rows=True))
        return putget.AllToAll(self.comm, **{**defaults, **options})
