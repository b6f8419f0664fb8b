"""Parameters of a trainer rank: plain tensors, DTensor, FSDP2."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from putget_transfer.weights._model import Layout, Param, Shard, tensors_of


def dtype_name(dtype: Any) -> str:
    """Return torch's name of a type, without "torch."."""
    return str(dtype).removeprefix("torch.")


def is_dtensor(tensor: Any) -> bool:
    """Say whether a tensor is one of torch's distributed ones, without importing them."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def _chunk(start: int, size: int, parts: int, at: int) -> tuple[int, int]:
    """Return start and size of one part, as `torch.chunk` cuts."""
    step = -(-size // parts) if size else 0
    first = min(step * at, size)
    return start + first, min(step, size - first)


def _area(shape: Sequence[int], placements: Any, mesh: Sequence[int], at: Sequence[int]) -> tuple[Any, Any]:
    """Return the part of a tensor at one coordinate of its mesh."""
    start, size = [0] * len(shape), list(shape)
    # FSDP divides what tensor parallelism has divided before, though its dimension of the mesh comes first.
    order = sorted(range(len(placements)), key=lambda number: hasattr(placements[number], "split_factor"))
    for number in order:
        if placements[number].is_replicate():
            continue
        dim = placements[number].dim % len(shape)
        start[dim], size[dim] = _chunk(start[dim], size[dim], mesh[number], at[number])
    return tuple(start), tuple(size)


def _is_shard(placement: Any) -> bool:
    return placement.is_replicate() or hasattr(placement, "dim")


def _distributed(name: str, tensor: Any) -> Layout:
    mesh, placements = tensor.device_mesh, tensor.placements
    if not all(_is_shard(placement) for placement in placements):
        raise ValueError(f"params: {name!r} has placements {placements}; shards and replicas are allowed")
    sizes, ranks = tuple(mesh.mesh.shape), mesh.mesh
    holders: dict[tuple[Any, Any], list[int]] = {}
    for at in itertools.product(*map(range, sizes)):
        holders.setdefault(_area(tensor.shape, placements, sizes, at), []).append(int(ranks[at]))
    own = _area(tensor.shape, placements, sizes, mesh.get_coordinate())
    if own[1] != tuple(tensor.to_local().shape):
        local = tuple(tensor.to_local().shape)
        raise ValueError(f"params: {name!r} with placements {placements} has the part {local}; {own[1]} is understood")
    shards = tuple(Shard(start, size, tuple(sorted(held))) for (start, size), held in holders.items() if _some(size))
    group = f"{', '.join(map(str, placements))} on {sizes}"
    return Layout(shards, group, gathers=len(shards) > 1)


def _some(size: Sequence[int]) -> bool:
    return 0 not in size


@dataclass(frozen=True)
class Part:
    """The part of a tensor that this rank holds, where no DTensor says so.

    Attributes:
        shape: The whole tensor's shape.
        start: The part's first element.
        tensor: The part.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: Any

    @property
    def dtype(self) -> Any:
        """The type of its elements."""
        return self.tensor.dtype

    @property
    def device(self) -> Any:
        """Where the part lies."""
        return self.tensor.device

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return int(self.tensor.element_size())


def chunk_area(
    shape: Sequence[int], dims: Sequence[int | None], mesh: Sequence[int], at: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return start and size of the part at one coordinate of a mesh whose dimensions divide those of a tensor.

    Args:
        shape: The tensor's shape.
        dims: For each dimension of the mesh the tensor's dimension that it divides, the outermost first; None: copies.
        mesh: The mesh's shape.
        at: The coordinate.
    """
    start, size = [0] * len(shape), list(shape)
    for dim, parts, number in zip(dims, mesh, at, strict=True):
        if dim is not None:
            start[dim], size[dim] = _chunk(start[dim], size[dim], parts, number)
    return tuple(start), tuple(size)


def local(tensor: Any, starts: dict[Any, Any] | None = None) -> tuple[tuple[int, ...], Any]:
    """Return where the part of a tensor that this rank holds begins, and that part.

    `starts` keeps the begin from one call to the next for tensors that are divided alike. Without gradients
    (`torch.no_grad`) it takes a part of the time.
    """
    if isinstance(tensor, Part):
        return tensor.start, tensor.tensor.detach()
    if not is_dtensor(tensor):
        return (0,) * tensor.dim(), tensor.detach()
    mesh, starts = tensor.device_mesh, {} if starts is None else starts
    key = tensor.shape, tensor.placements, mesh
    if key not in starts:
        starts[key], _ = _area(tensor.shape, tensor.placements, tuple(mesh.mesh.shape), mesh.get_coordinate())
    return starts[key], tensor.to_local().detach()


def default_rank() -> int:
    """Return this process's rank in torch.distributed; 0 without it."""
    from torch import distributed

    return int(distributed.get_rank()) if distributed.is_available() and distributed.is_initialized() else 0


def describe(model: Any, *, rank: int | None = None) -> list[Param]:
    """Describe a trainer rank's parameters.

    Args:
        model: A module, or tensors by name: plain ones, which this rank holds whole, or DTensors (FSDP2, tensor
            parallelism), whose mesh says what every other rank holds. Where they lie, on a GPU or on the host, makes
            no difference.
        rank: This rank among the trainers; torch.distributed's if None.

    Returns:
        Its parameters, and those buffers that its checkpoint has. `plan` takes the lists of all ranks.

    Raises:
        ValueError: A parameter is divided in a way that is not understood (partial sums); it is named.
    """
    rank = default_rank() if rank is None else rank
    layouts: dict[Any, Layout] = {}
    params = []
    for name, tensor in tensors_of(model):
        shape = tuple(tensor.shape)
        if is_dtensor(tensor):
            key: Any = (shape, tensor.device_mesh, tensor.placements)
            layout = layouts.get(key) or layouts.setdefault(key, _distributed(name, tensor))
        else:
            shards = (Shard((0,) * len(shape), shape, (rank,)),)
            layout = layouts.get(shape) or layouts.setdefault(shape, Layout(shards))
        params.append(Param(name, shape, dtype_name(tensor.dtype), layout))
    return params
