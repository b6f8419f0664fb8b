"""Where tokens go: a random router, a perfectly balanced one, and routing recorded from a real model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from torch import Tensor

Router = Callable[[int, int], Tensor]
"""`router(ep_rank, num_tokens)` gives the int32 expert ids [num_tokens, top_k] of one rank; the same every time."""


def random_router(num_experts: int, top_k: int, seed: int) -> Router:
    """Distinct experts of each token, drawn uniformly."""

    def route(ep_rank: int, num_tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + ep_rank)
        keys = torch.rand(num_tokens, num_experts, generator=generator)
        return keys.topk(top_k, dim=1).indices.int()

    return route


def perfect_router(num_experts: int, top_k: int, ep_size: int) -> Router:
    """The (token, k) pairs spread evenly over the ranks: consecutive pairs go to consecutive ranks.

    With top_k equal to ep_size, every token reaches every rank. Ranks without experts are left out.
    """
    experts_per_rank = -(-num_experts // ep_size)
    round_robin = sorted(range(num_experts), key=lambda expert: (expert % experts_per_rank, expert // experts_per_rank))
    order = torch.tensor(round_robin, dtype=torch.int32)

    def route(ep_rank: int, num_tokens: int) -> Tensor:
        first = (ep_rank * num_tokens + torch.arange(num_tokens)) * top_k
        return order[(first[:, None] + torch.arange(top_k)) % num_experts]

    return route


def read_tasks(path: Path) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Reads recorded expert choices.

    The format is an .npz archive of integer arrays [layers, tokens, top_k], one per task, all with one top_k.

    Returns:
        The array of each task, in the order of their names.

    Raises:
        ValueError: if the file is missing or is not of this format.
    """
    try:
        with ZipFile(path) as archive:
            names = sorted(archive.namelist())
        with np.load(path, allow_pickle=False) as loaded:
            arrays = {name.removesuffix(".npy"): loaded[name] for name in names}
    except OSError as error:
        raise ValueError(f"--routing_file {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"--routing_file {path}: not an .npz archive of integer arrays") from error
    if not arrays:
        raise ValueError(f"--routing_file {path}: the archive holds no array")
    for name, array in arrays.items():
        if array.ndim != 3 or array.dtype.kind not in "iu" or array.size == 0:
            raise ValueError(
                f"--routing_file {path}: array {name!r} must be integers [layers, tokens, top_k], "
                f"got {array.dtype} {list(array.shape)}"
            )
        if int(array.min()) < -1:
            raise ValueError(f"--routing_file {path}: array {name!r} holds the expert id {int(array.min())}")
    widths = {name: array.shape[2] for name, array in arrays.items()}
    if len(set(widths.values())) != 1:
        raise ValueError(f"--routing_file {path}: arrays differ in top_k: {widths}")
    return arrays


def read_routing_file(path: Path) -> Tensor:
    """The choices that `read_tasks` reads, as rows.

    Returns:
        [num_rows, top_k] int32: the tokens of all tasks and layers, tasks in the order of their names.

    Raises:
        ValueError: if the file is missing or is not of this format.
    """
    rows = np.concatenate([array.reshape(-1, array.shape[2]) for array in read_tasks(path).values()])
    return torch.from_numpy(rows.astype(np.int32))


def recorded_router(recorded: Tensor, ep_size: int) -> Router:
    """Consecutive recorded tokens, every rank from a place of its own; starts over at the end.

    Args:
        recorded: [num_rows, top_k] int32, from `read_routing_file`.
        ep_size: number of ranks.
    """
    stride = len(recorded) // ep_size

    def route(ep_rank: int, num_tokens: int) -> Tensor:
        return recorded[(ep_rank * stride + torch.arange(num_tokens)) % len(recorded)]

    return route
