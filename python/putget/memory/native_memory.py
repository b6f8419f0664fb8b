"""One rank's native memory: lifetime, tensors over it, shares, faults."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch

from putget import _abi, _fork
from putget.errors import CapacityExceeded, PeerTimeout, ProtocolMisuse, PutgetError
from putget.memory import host_memory, signals

# CUDA memories that nobody needs any more. The garbage collector may find them in the middle of a graph capture, where
# waiting for the device, which freeing implies, would spoil the capture: then they stay here for a while.
_unused: list[ctypes.c_void_p] = []


def _free(device: torch.device, handle: ctypes.c_void_p | None) -> None:
    """Frees a memory, and those that could not be freed before."""
    if device.type == "cpu":
        _abi.library().putget_memory_destroy(handle)
        return
    if handle is not None:
        _unused.append(handle)
    if torch.cuda.is_current_stream_capturing():
        return
    with contextlib.suppress(IndexError):  # emptied, perhaps by another thread
        while True:
            _abi.library().putget_memory_destroy(_unused.pop())


class _CudaSpan:
    """A range of device memory, as torch takes it without copying. Keeps the memory alive as long as a tensor lives."""

    def __init__(self, address: int, num_bytes: int, owner: Memory) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


class Memory:
    """Native memory of one rank; freed when the last tensor over it is gone.

    Attributes:
        handle: For native calls.
    """

    def __init__(
        self,
        device: torch.device,
        ep_size: int,
        ep_rank: int,
        num_bytes: int,
        fabric: bool,
        domain_ranks: int = 0,  # as in putget.h
    ) -> None:
        self.device = device
        self.ep_size = ep_size
        self.ep_rank = ep_rank
        self.num_bytes = num_bytes
        self.handle = ctypes.c_void_p()
        self._process = _fork.here
        if device.type == "cuda":
            _free(device, None)
        else:
            signals.listen()
        memory_config = _abi.MemoryConfig(
            device=_abi.DEVICE_CUDA if device.type == "cuda" else _abi.DEVICE_CPU,
            ordinal=device.index or 0,
            ep_size=ep_size,
            ep_rank=ep_rank,
            share_kind=_abi.SHARE_FABRIC if fabric else _abi.SHARE_DESCRIPTOR,
            domain_ranks=domain_ranks,
            bytes=num_bytes,
        )
        _abi.call("putget_memory_create", ctypes.byref(memory_config), ctypes.byref(self.handle))

    def __del__(self) -> None:
        handle, self.handle = getattr(self, "handle", None), ctypes.c_void_p()
        if handle and self._process.is_here:  # a forked child's copy ends with it
            _free(self.device, handle)

    def address(self, rank: int) -> int:
        """Where a rank's symmetric memory is mapped here; it stays there."""
        base = ctypes.c_void_p()
        _abi.call("putget_memory_base", self.handle, rank, ctypes.byref(base))
        assert base.value is not None
        return base.value

    def tensor(self) -> torch.Tensor:
        """The own symmetric memory as uint8 [num_bytes], without a copy."""
        address = self.address(self.ep_rank)
        if self.device.type == "cuda":
            return torch.as_tensor(_CudaSpan(address, self.num_bytes, self), device=self.device)
        span: Any = (ctypes.c_uint8 * self.num_bytes).from_address(address)
        span.owner = self
        return torch.frombuffer(span, dtype=torch.uint8)

    def peer_tensor(self, rank: int) -> torch.Tensor:
        """A rank's symmetric memory as uint8 [num_bytes], without a copy, as memory of this rank's device.

        It is mapped here wherever it lies, and torch must not start work on another device because of it. It does not
        keep the memory alive.
        """
        storage = torch._C._construct_storage_from_data_pointer(self.address(rank), self.device, self.num_bytes)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def export(self) -> _abi.Share:
        """A share of the own memory; its descriptor, where it has one, must be closed."""
        share = _abi.Share()
        _abi.call("putget_memory_export", self.handle, ctypes.byref(share))
        return share

    def import_share(self, peer: int, share: _abi.Share) -> None:
        """Maps a peer's memory."""
        _abi.call("putget_memory_import", self.handle, peer, ctypes.byref(share))

    def renew(self) -> None:
        """New physical memory at the same addresses; the old is given up when the new is there.

        Raises:
            PutgetError: There is none.
        """
        if self.device.type == "cpu":
            host_memory.require_room(self.num_bytes, host_memory.limits(), {})
        _abi.call("putget_memory_renew", self.handle)

    def start(self, epoch: int, active: Sequence[bool]) -> None:
        """Sets epoch and active ranks; clears flags and fault."""
        words = (ctypes.c_uint32 * _abi.RANK_WORDS)()
        for rank, is_active in enumerate(active):
            if is_active:
                words[rank // 32] |= 1 << (rank % 32)
        _abi.call("putget_memory_start", self.handle, epoch, words)

    def epoch(self) -> int:
        """The round of the last dispatch; waits for the device."""
        epoch = ctypes.c_uint32()
        _abi.call("putget_memory_epoch", self.handle, ctypes.byref(epoch))
        return epoch.value

    def mix(self) -> None:
        """Prepares for objects of different layouts."""
        _abi.call("putget_memory_mix", self.handle)

    def count_tables_apart(self, counts: torch.Tensor) -> None:
        """int64 [2, ep_size] on the device, zeros: see putget.h."""
        _abi.call("putget_memory_count_tables_apart", self.handle, counts.data_ptr())
        self._counts = counts  # outlives the memory

    def _ranks_of(self, words: Sequence[int]) -> list[int]:
        """The ranks of a bit set."""
        return [rank for rank in range(self.ep_size) if words[rank // 32] >> (rank % 32) & 1]

    def fault(self, timeout_s: float) -> PutgetError | None:
        """The first fault since the last start, as an exception; does not wait for kernels."""
        fault = _abi.Fault()
        _abi.call("putget_read_fault", self.handle, ctypes.byref(fault))
        if fault.kind == _abi.FAULT_NONE:
            return None
        missing = self._ranks_of(fault.missing)
        if fault.kind == _abi.FAULT_INTERRUPTED:
            return PutgetError(
                f"{_abi.PHASES[fault.phase]}, round {fault.epoch}: rank {fault.rank} no longer waits for rank(s) "
                f"{', '.join(map(str, missing))}, because the handler of a signal raised; call set_active_ranks before "
                "the next round, with the same ranks too if all live, or recover"
            )
        if fault.kind == _abi.FAULT_PEER_TIMEOUT:
            lost = self._ranks_of(fault.lost)
            return PeerTimeout(_abi.PHASES[fault.phase], fault.rank, fault.epoch, missing, timeout_s, lost)
        if fault.kind == _abi.FAULT_CAPACITY:
            return CapacityExceeded(fault.source, fault.rows, fault.allowed, fault.epoch)
        if fault.misuse == _abi.MISUSE_TOKEN_COUNT:
            return ProtocolMisuse(
                f"combine, round {fault.epoch}: for {fault.allowed} tokens, but dispatch sent {fault.rows}"
            )
        if fault.misuse == _abi.MISUSE_PEER_RELEASED:
            return ProtocolMisuse(f"combine, round {fault.epoch}: rank {fault.source} ended this round without combine")
        if fault.misuse == _abi.MISUSE_PEER_COMBINED:
            return ProtocolMisuse(
                f"dispatch after round {fault.epoch}: rank {fault.source} combined this round, which ended here without"
            )
        phase = _abi.PHASES[fault.phase]
        if fault.misuse == _abi.MISUSE_BAD_MESSAGE:
            return ProtocolMisuse(
                f"{phase}, round {fault.epoch}: what came from rank {fault.source} is no message of this round"
            )
        if fault.misuse == _abi.MISUSE_NOT_STARTED:
            return ProtocolMisuse(f"{phase}, round {fault.epoch}: the finish half ran, but no start half before it")
        if fault.misuse == _abi.MISUSE_NOT_FINISHED:
            return ProtocolMisuse(f"{phase}, round {fault.epoch}: a start half came before it that was not finished")
        return ProtocolMisuse(f"combine after round {fault.epoch}: no dispatch came before it")


def encode_share(share: _abi.Share) -> dict[str, Any]:
    """A share as message fields; its descriptor travels beside them."""
    return {"kind": share.kind, "bytes": share.bytes, "fabric": bytes(share.fabric).hex()}


def decode_share(fields: dict[str, Any], descriptors: list[int]) -> _abi.Share:
    """The share that a peer sent."""
    share = _abi.Share(kind=int(fields["kind"]), bytes=int(fields["bytes"]), descriptor=-1)
    if share.kind == _abi.SHARE_FABRIC:
        ctypes.memmove(share.fabric, bytes.fromhex(fields["fabric"]), len(share.fabric))
    else:
        share.descriptor = descriptors[0]
    return share


def close_share(share: _abi.Share) -> None:
    """Closes the descriptor that an export made."""
    if share.kind == _abi.SHARE_DESCRIPTOR and share.descriptor >= 0:
        os.close(share.descriptor)
        share.descriptor = -1
