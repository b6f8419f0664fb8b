"""Keeps the experts that tokens choose, for files that `putget balance` and `putget bench` read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from putget import _abi_balancer
from putget._arguments import as_name, as_path, check_int, check_tensor
from putget.memory.workspace import resolve_device

Record = Callable[[Tensor, Tensor | None], None]


class RoutingRecorder:
    """Keeps logical expert ids of tokens, layer by layer, in memory of the device.

    A call waits for nothing and may be captured in a CUDA graph. What comes when the memory is full is dropped, and
    counted in `dropped`.

    Args:
        num_layers: layers with experts.
        top_k: experts of a token.
        max_tokens: tokens of each layer that are kept.
        num_experts: experts of a layer; any number of them if None. Other ids count as no expert, -1.
        device: where ids are: "cpu", "cuda" or "cuda:N".

    Raises:
        ValueError: An argument is out of range.
        BackendUnavailable: CUDA is asked for and not there.
    """

    def __init__(
        self,
        num_layers: int,
        top_k: int,
        max_tokens: int,
        *,
        num_experts: int | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        num_layers = check_int("num_layers", num_layers, 1, 1 << 16)
        top_k = check_int("top_k", top_k, 1, 32)
        max_tokens = check_int("max_tokens", max_tokens, 1, 1 << 30)
        most = _abi_balancer.MAX_SLOTS
        self._num_experts = most if num_experts is None else check_int("num_experts", num_experts, 1, most)
        self.device = resolve_device(device)
        self._most = max_tokens
        # One row more, which takes what is dropped.
        self._ids = torch.full((num_layers, max_tokens + 1, top_k), -1, dtype=torch.int32, device=self.device)
        self._came = torch.zeros(num_layers, dtype=torch.int64, device=self.device)

    def record(self, layer: int, topk_ids: Tensor, num_valid_tokens: Tensor | None = None) -> None:
        """Adds a batch.

        Args:
            layer: from 0 on.
            topk_ids: int32 or int64 [num_tokens, top_k] on the device: experts as the router numbers them. What is out
                of range is recorded as -1, no expert.
            num_valid_tokens: one int32 on the device: tokens from there on are padding; or None.

        Raises:
            ValueError: An argument is wrong.
        """
        num_layers, _, top_k = self._ids.shape
        layer = check_int("layer", layer, 0, num_layers - 1)
        rows = len(topk_ids) if isinstance(topk_ids, Tensor) and topk_ids.dim() else 0
        check_tensor("topk_ids", topk_ids, (rows, top_k), (torch.int32, torch.int64), self.device)
        place = torch.arange(rows, device=self.device)
        number: Tensor | int = rows
        is_kept = torch.ones(rows, dtype=torch.bool, device=self.device)
        if num_valid_tokens is not None:
            check_tensor("num_valid_tokens", num_valid_tokens, (1,), (torch.int32,), self.device)
            is_kept = place < num_valid_tokens
            number = num_valid_tokens[0].clamp(0, rows)
        place = torch.where(is_kept, place + self._came[layer], self._most).clamp(max=self._most)
        is_expert = (topk_ids >= 0) & (topk_ids < self._num_experts)
        self._ids[layer].index_copy_(0, place, torch.where(is_expert, topk_ids, -1).int())
        self._came[layer] += number

    def of_layer(self, layer: int) -> Record:
        """`record` for one layer: what ``ExpertParallelMoE.record`` calls."""
        return partial(self.record, check_int("layer", layer, 0, len(self._came) - 1))

    @property
    def dropped(self) -> int:
        """Tokens that found no room, over all layers. Waits for the device."""
        return int((self._came - self._most).clamp(min=0).sum())

    def clear(self) -> None:
        """Forgets everything."""
        self._came.zero_()

    def ids(self) -> NDArray[Any]:
        """The recorded routing. Waits for the device.

        Returns:
            The smallest signed integers that hold the ids, [num_layers, tokens, top_k].

        Raises:
            ValueError: The layers have seen different numbers of tokens, or none.
        """
        came = self._came.clamp(max=self._most).tolist()
        if min(came) != max(came) or not came[0]:
            raise ValueError(f"layers have recorded {min(came)} to {max(came)} tokens: each must have as many, above 0")
        found: NDArray[Any] = self._ids[:, : came[0]].cpu().numpy()
        # A signed type that holds -1 - n holds n. Without any expert, int8.
        return found.astype(np.min_scalar_type(-1 - max(int(found.max()), 0)))

    def save(self, path: str | os.PathLike[str], task: str) -> None:
        """Writes what has been recorded into an .npz archive, beside the tasks that it has.

        Several ranks may write into one archive: each waits until those before it have written. A file system without
        locks lets them all write at once, and keeps the last one's tasks.

        Args:
            path: an archive to make, or one that `save` made.
            task: the name of the array.

        Raises:
            ValueError: The archive has this task, or is none, or cannot be written; or see `ids`.
        """
        place = as_path("path", path)
        tasks = {as_name("task", task): self.ids()}
        try:
            with _turn(place) as fresh:
                if place.exists():
                    before = _read(place)
                    if task in before:
                        raise ValueError(f"{place} has an array {task!r}")
                    tasks = {**before, **tasks}
                _write(fresh, tasks)
        except OSError as error:
            raise ValueError(f"{place} cannot be written: {error}") from error


def _read(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            found = {}
            for name in archive.namelist():
                with archive.open(name) as member:
                    found[name.removesuffix(".npy")] = np.lib.format.read_array(member, allow_pickle=False)
            return found
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{path} is no .npz archive of arrays: {error}") from error


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[BinaryIO]:
    """An empty file that becomes the archive. Others wait until this one has, so none misses another one's tasks."""
    fresh = path.with_name(f".{path.name}.new.npz")  # a reader never sees half of a file
    while True:
        with os.fdopen(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                if not os.path.samestat(os.fstat(file.fileno()), fresh.stat()):
                    continue
            except FileNotFoundError:
                continue  # it has become the archive meanwhile
            try:
                file.truncate()
                yield file
                file.flush()
                os.replace(fresh, path)
            except BaseException:
                fresh.unlink(missing_ok=True)
                raise
            finally:
                with contextlib.suppress(OSError):  # a fork may keep the file open
                    fcntl.flock(file, fcntl.LOCK_UN)
            return


def _write(file: BinaryIO, tasks: dict[str, NDArray[Any]]) -> None:
    """Writes an archive as ``np.savez_compressed`` does, which takes no array that is called "file"."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in tasks.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
