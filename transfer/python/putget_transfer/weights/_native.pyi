"""Types of the compiled part. Lengths and offsets are in bytes."""

from collections.abc import Sequence
from typing import Any, final

from putget_transfer import Engine, MrHandle, NetAddr, Transfer

def make(
    params: Sequence[Any],
    slots: Sequence[tuple[Sequence[tuple[str, int]], Sequence[Any]]],
    replicas: int,
    task_bytes: int,
    unused: set[str],
) -> Schedule:
    """Plan; `putget_transfer.weights.plan` is the public name."""

@final
class Schedule:
    """The writes of an update: between which ranks, which bytes, in which order."""

    @property
    def digest(self) -> str:
        """The same where the whole schedule is."""
    @property
    def num_ranks(self) -> int:
        """Trainer ranks."""
    @property
    def num_targets(self) -> int:
        """Rollout ranks, over all replicas."""
    @property
    def replica_size(self) -> int:
        """Rollout ranks of a replica."""
    @property
    def num_bytes(self) -> int:
        """Bytes that cross the network in a full update."""
    @property
    def gathered_bytes(self) -> int:
        """Those of them that are brought together first."""
    @property
    def groups(self) -> list[str]:
        """The mesh groups, in their order."""
    @property
    def params(self) -> list[tuple[str, list[int], str]]:
        """Name, shape and type of each parameter."""
    def count(self, rank: int) -> int:
        """Return the writes that complete a version at a rollout rank.

        Raises:
            ValueError: If the schedule has no such rollout rank.
        """
    def received(self, rank: int) -> int:
        """Return the bytes that a rollout rank gets.

        Raises:
            ValueError: If the schedule has no such rollout rank.
        """
    def sent(self, rank: int) -> int:
        """Return the bytes that a trainer rank writes.

        Raises:
            ValueError: If the schedule has no such trainer rank.
        """
    def memory(self, rank: int) -> list[tuple[str, int]]:
        """Return name and bytes of each memory of a rollout rank.

        Raises:
            ValueError: If the schedule has no such rollout rank.
        """
    def slots(self, rank: int) -> list[tuple[str, list[int], list[int], int, int, list[int], str, str]]:
        """Return parameter, start, size, memory, offset, strides, type and recipe of each slot of a rollout rank.

        Raises:
            ValueError: If the schedule has no such rollout rank.
        """
    def senders(self, rank: int) -> list[int]:
        """Return the trainer ranks that write to a rollout rank.

        Raises:
            ValueError: If the schedule has no such rollout rank.
        """
    def tasks(self, rank: int) -> list[Task]:
        """Return the tasks of a trainer rank, in their order.

        Raises:
            ValueError: If the schedule has no such trainer rank.
        """
    def show(self) -> str:
        """Return a summary in words."""

@final
class Task:
    """A trainer rank's work in one step: slots to prepare and to write.

    `items` has parameter (by its place), recipe, type, start, size, whether it is gathered, offset among the task's
    bytes, and bytes of each area; an area of 0 bytes only takes part in gathering.
    """

    group: int
    num_bytes: int
    items: list[tuple[int, str, str, list[int], list[int], bool, int, int]]

def descs_for(engine: Engine, handles: Sequence[MrHandle], peer: NetAddr) -> bytes:
    """Return descriptors for one peer (`Engine.desc_for`), one after the other, as `Place` reads them."""

@final
class Place:
    """Where a rollout rank takes a version.

    `memory` has for each memory of the schedule the number of its descriptor (4 bytes) and the offset in it (8 bytes).

    Raises:
        ValueError: Bytes that do not say that.
    """

    def __new__(cls, target: int, imm: int, memory: bytes, descs: bytes) -> Place: ...

@final
class Writer:
    """The write stage of one version, to the rollout ranks that have a place."""

    def __new__(cls, engine: Engine, schedule: Schedule, rank: int, places: Sequence[Place]) -> Writer: ...
    def targets(self, task: int) -> list[int]:
        """Return the rollout ranks with a place that get something of a task."""
    def num_bytes(self, task: int, target: int) -> int:
        """Return the bytes of a task that go to a rollout rank."""
    def write(self, task: int, target: int, handle: MrHandle, offset: int, deadline_s: float) -> Transfer:
        """Write a task's bytes, packed at `offset` of `handle`, to one rollout rank, which counts once."""
    def write_each(
        self, task: int, target: int, handles: Sequence[MrHandle], offsets: Sequence[int], deadline_s: float
    ) -> Transfer:
        """Write a task's bytes, each item's from a handle and an offset of its own, to one rollout rank."""

def prepare_blocks(stream: Any) -> None:
    """Load the kernel that rounds to FP8 for a stream's GPU.

    Raises:
        EngineError: There is no driver, or it refuses.
    """

def quantise_blocks(
    stream: Any,
    dtype: str,
    source: int,
    shape: Sequence[int],
    strides: Sequence[int],
    values: int,
    window: Sequence[int],
    scales: int,
    scale_dtype: str,
    powers_of_two: bool,
) -> None:
    """Order the rounding of matrices to FP8 on a stream: see `_kernel.launch`. Addresses are those of tensors.

    Raises:
        ValueError: Another type, too many blocks, or a window outside of the matrices.
        EngineError: There is no driver, or it refuses.
    """
