"""Experts between ranks as an engine's own mover asks for them: sends and receives, then one call that waits."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from putget import _abi, _abi_balancer
from putget._arguments import as_count, check_int, check_seconds
from putget.errors import PeerTimeout, PutgetError
from putget.experts.movers import MOST_SMS, require_one_domain
from putget.group.communicator import Communicator, collective
from putget.memory.workspace import Workspace, current_stream, resolve_device

_ALIGNMENT = 16  # bytes, of each tensor's part in an expert that travels
_COUNTS = 1 << 32
_MOST_KEY = (1 << 63) - 1
_NAP_S = 0.0002  # between looks at what other ranks do


def travelling_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of one row of each tensor as they travel together."""
    return sum(-(-(tensor.nbytes // tensor.shape[0]) // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)


class ExpertExchange:
    """Sends and receives of experts through landing areas. Construction is collective over the group.

    Each rank has a landing area with a cell for every rank. A rank puts an expert into its cell at the receiver, which
    checks a sum and takes the bytes from there. No tensor is registered, and none is needed beside the landing area.
    A pair of ranks with both a send and a receive ends both: all ranks take them in the order of their keys.

    Args:
        comm: the group; its ranks map each other's memory.
        expert_bytes: the most bytes of an expert, see `travelling_bytes`; the same on all ranks.
        device: where tensors are.
        num_sms: SMs of its kernels.
        timeout_s: deadline of set-up, and of the wait for a rank from which nothing comes, in seconds.

    Raises:
        ValueError: An argument is wrong, here or on another rank; the group has several domains.
        BackendUnavailable, PeerTimeout, PutgetError: As `putget.Workspace`.
    """

    @collective
    def __init__(
        self,
        comm: Communicator,
        expert_bytes: int,
        *,
        device: str | torch.device = "cuda",
        num_sms: int = 8,
        timeout_s: float = 300.0,
    ) -> None:
        self._native: ctypes.c_void_p | None = None
        try:
            require_one_domain(comm)
            self._device = resolve_device(device)
            check_int("expert_bytes", expert_bytes, 1, (1 << 63) - 1)
            check_int("num_sms", num_sms, 1, MOST_SMS)
            check_seconds("timeout_s", timeout_s)
            num_bytes = _abi.library().putget_landing_bytes(comm.size, comm.size, expert_bytes)
            if num_bytes == 0:
                raise ValueError(_abi.last_error())
        except (ValueError, PutgetError) as error:
            comm.refuse(str(error))
            raise
        comm.compare("ExpertExchange", {"expert_bytes": expert_bytes}, timeout_s)
        self._comm, self._num_sms, self._timeout_s = comm, num_sms, timeout_s
        self.expert_bytes = expert_bytes
        self._workspace = Workspace(comm, num_bytes, self._device, timeout_s=timeout_s, warmup_timeout_s=timeout_s)
        self._first = self._workspace.memory.epoch()
        self._sent, self._received = [0] * comm.size, [0] * comm.size  # of each pair, in all
        self._landed = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._is_broken = False
        self._rows: list[int] = []  # of the tensors of each group
        self._forget()

    def _forget(self) -> None:
        self._sends: dict[tuple[int, int], tuple[int, int]] = {}  # key, dst: group, row
        self._receives: dict[tuple[int, int], tuple[int, int]] = {}  # key, src: group, row

    def bind(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Says which tensors experts lie in, for the sends and receives from now on.

        Args:
            groups: for each group its tensors, contiguous [rows, ...] on the device, whose rows are multiples of 4
                bytes at multiples of 4. An expert is one row of each tensor of a group. Its sender and its receiver
                may name different groups, whose rows are of the same sizes.

        Raises:
            ValueError: A tensor is of another form, or an expert has more than expert_bytes.
        """
        parts: list[_abi_balancer.BlobPart] = []
        ranges: list[tuple[int, int]] = []
        if not groups:
            raise ValueError("groups is empty, expected one or more")
        for index, tensors in enumerate(groups):
            first, offset = len(parts), 0
            if not tensors:
                raise ValueError(f"groups[{index}] has no tensor")
            for tensor in tensors:
                if not isinstance(tensor, Tensor):
                    raise ValueError(f"groups[{index}] has a {type(tensor).__name__}, expected tensors")
                if tensor.dim() == 0 or tensor.nbytes == 0:
                    raise ValueError(f"groups[{index}] has a tensor of no rows, or of empty ones: {list(tensor.shape)}")
                if not tensor.is_contiguous() or tensor.device != self._device:
                    raise ValueError(f"groups[{index}] has a tensor that is not contiguous on {self._device}")
                num_bytes = tensor.nbytes // tensor.shape[0]
                parts.append(_abi_balancer.BlobPart(tensor.data_ptr(), num_bytes, offset))
                offset += travelling_bytes([tensor])
            if offset > self.expert_bytes:
                raise ValueError(
                    f"groups[{index}] has experts of {offset} bytes, there is room for {self.expert_bytes}"
                )
            ranges.append((first, len(parts)))
        self._landed.zero_()
        self._comm.synchronize(self._device)
        table = (_abi_balancer.BlobPart * len(parts))(*parts)
        config = _abi_balancer.LandingConfig(
            device=_abi.DEVICE_CUDA if self._device.type == "cuda" else _abi.DEVICE_CPU,
            cells=self._comm.size,
            num_parts=len(parts),
            num_sms=self._num_sms,
            first=self._first,
            blob_bytes=self.expert_bytes,
            parts=ctypes.addressof(table),
            landed=self._landed.data_ptr(),
        )
        native = ctypes.c_void_p()
        _abi.call("putget_landing_create", ctypes.byref(config), self._workspace.memory.handle, ctypes.byref(native))
        self._destroy()
        self._native, self._ranges = native, ranges
        self._rows = [min(tensor.shape[0] for tensor in tensors) for tensors in groups]
        self._forget()

    def send(self, group: int, row: int, dst: int, key: int) -> None:
        """Has the next `execute` send an expert.

        Args:
            group: of `bind`.
            row: of its tensors.
            dst: another rank.
            key: a number of the expert, which its receiver gives too; no two experts from one rank to another have the
                same in one `execute`.

        Raises:
            ValueError: dst is this rank, or none; there is no such group or row; or another expert for dst has the key.
        """
        self._check_row(group, row)
        self._add("send", self._sends, key, self._peer("dst", dst), (group, row))

    def receive(self, group: int, row: int, src: int, key: int) -> None:
        """Has the next `execute` receive an expert; arguments and errors as for `send`."""
        self._check_row(group, row)
        self._add("receive", self._receives, key, self._peer("src", src), (group, row))

    @staticmethod
    def _add(
        call: str, orders: dict[tuple[int, int], tuple[int, int]], key: int, peer: int, place: tuple[int, int]
    ) -> None:
        """Keeps an order. By its key alone a pair of ranks knows which expert is which."""
        key = as_count("key", key, -_MOST_KEY, _MOST_KEY)
        if (key, peer) in orders:
            raise ValueError(f"{call}: key is {key}, as that of another expert between this rank and rank {peer}")
        orders[key, peer] = place

    def _check_row(self, group: int, row: int) -> None:
        if not self._rows:
            raise ValueError("this ExpertExchange has no tensors: call bind")
        check_int("group", group, 0, len(self._rows) - 1)
        check_int("row", row, 0, self._rows[group] - 1)

    def _peer(self, name: str, rank: int) -> int:
        if not 0 <= rank < self._comm.size or rank == self._comm.rank:
            raise ValueError(f"{name} is {rank}, allowed are the ranks of {self._comm.size} but {self._comm.rank}")
        return rank

    def execute(self) -> None:
        """Does all of it, and returns when what this rank receives is there, and what it sends may be written over.

        On CUDA it works on the current stream, and waits for it.

        Raises:
            PeerTimeout: A rank did not do its part in time. The object cannot be used any more.
            PutgetError: Bytes that came differ from those that were sent; likewise.
            ValueError: Nothing is bound, or the object is closed.
        """
        self._comm.require_own("ExpertExchange")
        if self._native is None or self._is_broken:
            raise ValueError("this ExpertExchange is closed, or has no tensors: call bind")
        me = self._comm.rank
        puts = sorted((key, dst, dst, group, row) for (key, dst), (group, row) in self._sends.items())
        takes = sorted((key, me, src, group, row) for (key, src), (group, row) in self._receives.items())
        self._forget()
        put_orders = [self._put(*put[2:]) for put in puts]
        take_orders = [self._take(*take[2:]) for take in takes]
        self._is_broken = True  # unless all goes well
        self._run(put_orders, take_orders)
        self._is_broken = False

    def _run(self, puts: list[_abi_balancer.PutOrder], takes: list[_abi_balancer.TakeOrder]) -> None:
        start = before = self._progress()
        posted = [0, 0]
        deadline = time.monotonic() + self._timeout_s
        while True:
            while self._post(puts, takes, posted):
                pass
            stream = current_stream(self._device)
            _abi.call("putget_landing_move", self._native, self.expert_bytes, stream)
            _abi.call("putget_landing_take", self._native, self._landed.data_ptr(), stream)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            now = self._progress()
            done = ((now[0] - start[0]) % _COUNTS, (now[1] - start[1]) % _COUNTS)
            if done == (len(puts), len(takes)):
                return
            if now != before:
                before, deadline = now, time.monotonic() + self._timeout_s
            elif time.monotonic() > deadline:
                missing = {order.dst for order in puts[done[0] :]} | {order.src for order in takes[done[1] :]}
                raise PeerTimeout("exchange", self._comm.rank, 0, missing, self._timeout_s)
            else:
                time.sleep(_NAP_S)

    def _post(
        self, puts: list[_abi_balancer.PutOrder], takes: list[_abi_balancer.TakeOrder], posted: list[int]
    ) -> bool:
        """Posts the next put, take, or both. Each take is a batch of its own, so that its cell is free soon."""
        some = puts[posted[0] : posted[0] + 1], takes[posted[1] : posted[1] + 1]
        for these_puts, these_takes in (some, ([], some[1]), (some[0], [])):
            if not these_puts and not these_takes:
                continue
            is_posted = ctypes.c_uint32()
            _abi.call(
                "putget_landing_post",
                self._native,
                (_abi_balancer.PutOrder * len(these_puts))(*these_puts),
                len(these_puts),
                (_abi_balancer.TakeOrder * len(these_takes))(*these_takes),
                len(these_takes),
                None,
                0,
                ctypes.byref(is_posted),
            )
            if is_posted.value:
                posted[0] += len(these_puts)
                posted[1] += len(these_takes)
                return True
        return False

    def _put(self, dst: int, group: int, row: int) -> _abi_balancer.PutOrder:
        arrival = self._arrival(self._sent, dst, self._comm.rank)
        return _abi_balancer.PutOrder(*self._ranges[group], row, dst, arrival)

    def _take(self, src: int, group: int, row: int) -> _abi_balancer.TakeOrder:
        return _abi_balancer.TakeOrder(*self._ranges[group], row, src, self._arrival(self._received, src, src))

    def _arrival(self, counts: list[int], peer: int, src: int) -> int:
        """The n-th expert from src has its cell: arrivals of a cell are `size` apart."""
        counts[peer] += 1
        return (self._first + (counts[peer] - 1) * self._comm.size + src + 1) % _COUNTS

    def _progress(self) -> tuple[int, int]:
        found = _abi_balancer.LandingProgress()
        _abi.call("putget_landing_progress_of", self._native, ctypes.byref(found))
        if found.wrong:
            raise PutgetError(f"rank {self._comm.rank}: the bytes of an expert differ from those that were sent")
        return int(found.put), int(found.taken)

    def close(self) -> None:
        """Frees the object. Needs no peer. Idempotent."""
        self._comm.synchronize(self._device)
        self._destroy()
        self._workspace.close()
        self._is_broken = True

    def _destroy(self) -> None:
        native, self._native = self._native, None
        if native is not None and self._comm.is_own:  # a forked child's copy ends with it
            _abi.library().putget_landing_destroy(native)

    def __enter__(self) -> ExpertExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
