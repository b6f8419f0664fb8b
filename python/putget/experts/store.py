"""One copy of all experts for the ranks of a host: for moves, and for experts that died with a rank."""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

import torch
from torch import Tensor

from putget import _fork
from putget._arguments import check_int, check_seconds
from putget.errors import PutgetError
from putget.experts import numa
from putget.experts.blobs import ExpertBlobs
from putget.experts.host_pages import Pages, huge_page_bytes, make_descriptor
from putget.experts.store_layout import RECORD_BYTES, StoreLayout
from putget.experts.store_report import HostStoreReport, report_of
from putget.group import files
from putget.group.communicator import Communicator, collective
from putget.group.mesh import Disagreement
from putget.memory import host_memory
from putget.memory.workspace import resolve_device

_EMPTY, _BEING_SAVED, _SAVED = range(3)  # the first word of a record; then checksum, rank and number of the save
_MOST_SAVES = (1 << 31) - 1  # their numbers begin again then
_MOST_THREADS = 64


class HostStore:
    """Experts of all layers in host memory, once for all ranks of a host. Collective.

    Each rank makes a part of the memory, near its GPU, and every rank maps all parts. So every rank reads and writes
    every expert, and the memory of a rank that dies stays with the others. Sizes are known beforehand: nothing is
    allocated later. An expert is found by its number, wherever its slots are. `report` says what the machine gave.

    Two ranks that save one expert at the same time must save the same bytes.

    Args:
        comm: ranks of one host.
        expert_bytes: bytes of an expert of each layer: `ExpertBlobs.slot_bytes`.
        num_experts: experts of a layer.
        device: where this rank's experts live, "cpu", "cuda" or "cuda:N". For a GPU, all parts are locked in memory
            (cudaHostRegister), so that copies run at the link's speed.
        numa_node: the node that this rank's part comes from first, and whose CPUs copy. None: the one near the GPU, or
            near this thread's CPUs. If that node is full, other nodes give the rest.
        num_threads: threads of this rank that copy for `start_save` and `start_load`, 1 to 64.
        timeout_s: deadline of each step of the set-up, in seconds; getting the memory is one.

    Attributes:
        expert_bytes: as given, a tuple.
        num_experts: as given.
        num_bytes: of all parts.
        report: the `HostStoreReport` of this rank.

    Raises:
        ValueError: An argument is wrong, here or on another rank, or differs between ranks; the ranks are on several
            hosts.
        MemoryError: The host or a cgroup has less room than all parts need; nothing was allocated.
        PutgetError: The kernel refused memory all the same.
        PeerTimeout: A rank did not come in time.
    """

    @collective
    def __init__(
        self,
        comm: Communicator,
        expert_bytes: Sequence[int],
        num_experts: int,
        *,
        device: str | torch.device = "cpu",
        numa_node: int | None = None,
        num_threads: int = 2,
        timeout_s: float = 300.0,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise ValueError(f"comm is {comm!r}, expected a putget.Communicator")
        comm.require_open()
        self._parts: list[Pages | None] = []
        try:
            check_int("num_threads", num_threads, 1, _MOST_THREADS)
            check_seconds("timeout_s", timeout_s)
            self._layout = StoreLayout.of(expert_bytes, num_experts, comm.size, huge_page_bytes())
            self.device = resolve_device(device)
            node = _node(numa_node, self.device)
            _require_one_host(comm)
        except (ValueError, PutgetError) as error:
            comm.refuse(str(error))
            raise
        self._process = _fork.here
        self.rank = comm.rank
        self.expert_bytes = self._layout.expert_bytes
        self.num_experts = num_experts
        self.num_bytes = sum(map(self._layout.part_bytes, range(comm.size)))
        files.require_left(comm.rank, files.needed_for_shares(comm.size))
        self._agree(comm, timeout_s)
        self._parts = self._map(comm, node, timeout_s)
        self._bytes: list[Tensor | None] = [None if part is None else part.bytes() for part in self._parts]
        cpus = _cpus(node)
        self.report: HostStoreReport = report_of(
            self._parts, self.rank, self.num_bytes, node, cpus, num_threads, self._register()
        )
        self._threads = ThreadPoolExecutor(
            num_threads, "putget-host-store", initializer=_begin_thread, initargs=(cpus, self.device)
        )
        try:
            comm.exchange("host store: mapped", None, timeout_s)
        except BaseException:
            self.close()
            raise

    def _agree(self, comm: Communicator, timeout_s: float) -> None:
        """All ranks want the same, and there is room for it.

        Raises:
            ValueError: They differ.
            MemoryError: There is not enough.
        """
        layout = self._layout
        limits = host_memory.limits()  # before any rank takes its part
        message = {
            "expert_bytes": list(layout.expert_bytes),
            "num_experts": layout.num_experts,
            "alignment": layout.alignment,
        }
        bounds = [limit.identity for limit in limits]
        found = comm.exchange("host store", {**message, "bounds": bounds}, timeout_s)
        for rank, theirs in found.items():
            for name, own in message.items():
                if theirs[name] != own:
                    raise Disagreement(
                        f"{name} differs between ranks: rank {comm.rank} has {own}, rank {rank} has {theirs[name]}"
                    )
        for limit in limits:
            sharing = [rank for rank, theirs in found.items() if limit.identity in theirs["bounds"]]
            wanted = sum(layout.part_bytes(rank) for rank in sharing)
            if wanted > limit.free:
                raise MemoryError(  # the attempt tells the others, with its class
                    f"expert_bytes: {layout.num_experts} experts of {layout.num_layers} layers want {wanted} bytes of "
                    f"shared memory from {len(sharing)} ranks; free are {limit.free} of the {limit.most} bytes of "
                    f"{limit.name}"
                )
        comm.exchange("host store: room", None, timeout_s)  # nobody allocates before all have found enough

    def _map(self, comm: Communicator, node: int | None, timeout_s: float) -> list[Pages | None]:
        """Makes this rank's part, and maps all parts."""
        layout = self._layout
        parts: list[Pages | None] = [None] * comm.size
        descriptors: list[int] = []
        own_bytes = layout.part_bytes(comm.rank)
        try:
            if own_bytes:
                descriptors.append(make_descriptor("putget-experts", own_bytes))
                parts[comm.rank] = Pages(descriptors[0], own_bytes, layout.alignment, fill=True, numa_node=node)
            passed = dict.fromkeys(range(comm.size), descriptors)
            messages = comm.exchange_descriptors("host store: parts", {}, timeout_s, passed, members=range(comm.size))
            try:
                for peer, message in messages.items():
                    size = layout.part_bytes(peer)
                    if size:
                        parts[peer] = _map_peer(peer, message.descriptors, size, layout.alignment)
            finally:
                for message in messages.values():
                    message.close()
        except (OSError, PutgetError) as error:
            comm.refuse(str(error))
            raise error if isinstance(error, PutgetError) else PutgetError(str(error)) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return parts

    def _register(self) -> tuple[str, ...]:
        """Locks all parts for the GPU; why that could not be."""
        if self.device.type != "cuda":
            return ()
        reasons = [part.register(self.device) for part in self._parts if part is not None]
        return tuple(dict.fromkeys(reason for reason in reasons if reason is not None))

    def holds(self, layer: int, expert: int) -> bool:
        """Whether an expert has been saved, wholly.

        Raises:
            ValueError: There is no such layer or expert; the store is closed.
        """
        return int(self._record(layer, expert)[0]) == _SAVED

    def view(self, layer: int, expert: int, *, verify: bool = True) -> Tensor:
        """An expert's bytes, where they lie. Do not write to them; `write` does that.

        Args:
            layer: which layer.
            expert: which expert of it.
            verify: whether to compute the checksum (CRC-32) of the bytes and to compare it.

        Returns:
            uint8 [expert_bytes[layer]] on the CPU. It stays readable after `close`.

        Raises:
            ValueError: There is no such layer or expert, it was not saved, or the store is closed.
            PutgetError: It is being saved now, or its writer died meanwhile; or the checksum differs.
        """
        record = self._record(layer, expert)
        state, checksum, writer = (int(word) for word in record[:3])
        if state == _EMPTY:
            raise ValueError(f"layer {layer}, expert {expert} has not been saved in the host store")
        if state != _SAVED:
            _refuse(layer, expert, f"rank {writer} is saving it, or died while it did; save it again")
        found = self._bytes_of(layer, expert)
        if verify and (computed := _checksum(found)) != checksum % (1 << 32):
            _refuse(
                layer,
                expert,
                f"the checksum of its bytes is {computed:#010x}, rank {writer} saved {checksum % (1 << 32):#010x}: "
                "it was written to meanwhile; save it again",
            )
        return found

    def write(self, layer: int, expert: int, packed: Tensor) -> None:
        """Saves an expert from its packed bytes.

        Args:
            layer: which layer.
            expert: which expert of it.
            packed: contiguous uint8 [expert_bytes[layer]] on any device, as `ExpertBlobs.pack` gives them.

        Raises:
            ValueError: There is no such layer or expert, `packed` is not of this form, or the store is closed. What
                was saved before is unchanged then.
        """
        size = self.expert_bytes[check_int("layer", layer, 0, len(self.expert_bytes) - 1)]
        if packed.dtype != torch.uint8 or packed.shape != (size,) or not packed.is_contiguous():
            raise ValueError(
                f"packed is {packed.dtype} {list(packed.shape)}; it must be contiguous torch.uint8 [{size}]"
            )
        with _Saving(self, layer, expert) as place:
            place.copy_(packed)

    def save(self, layer: int, expert: int, blobs: ExpertBlobs, slot: int) -> None:
        """Saves an expert out of a slot of this rank.

        Args:
            layer: which layer of the store.
            expert: which expert of it.
            blobs: the layer's tensors.
            slot: of `blobs`.

        Raises:
            ValueError: A number is out of range, `blobs` have other sizes than the layer, or the store is closed.
        """
        self._require(layer, expert, blobs, slot)
        with _Saving(self, layer, expert) as place:
            blobs.pack(slot, out=place)

    def load(self, layer: int, expert: int, blobs: ExpertBlobs, slot: int, *, verify: bool = True) -> None:
        """Writes a saved expert into a slot of this rank. Arguments and errors as for `save` and `view`.

        Raises:
            ValueError: A number is out of range, `blobs` have other sizes than the layer, the expert was not saved, or
                the store is closed. The slot is unchanged then.
            PutgetError: The expert is not whole, see `view`. The slot is unchanged then.
        """
        self._require(layer, expert, blobs, slot)
        blobs.unpack(slot, self.view(layer, expert, verify=verify))

    def start_save(self, layer: int, expert: int, blobs: ExpertBlobs, slot: int) -> Future[None]:
        """`save` by a thread of this store, after what the current CUDA stream has been given.

        Errors of arguments are raised at once, others come by the future.
        """
        self._require(layer, expert, blobs, slot)
        return self._threads.submit(_after, self._event(), self.save, layer, expert, blobs, slot)

    def start_load(
        self, layer: int, expert: int, blobs: ExpertBlobs, slot: int, *, verify: bool = True
    ) -> Future[None]:
        """`load` by a thread of this store, likewise. The slot holds the expert when the future is done."""
        self._require(layer, expert, blobs, slot)
        return self._threads.submit(_after, self._event(), self.load, layer, expert, blobs, slot, verify=verify)

    def close(self) -> None:
        """Waits for what has been started, and gives the memory back; views keep their part. Others go on."""
        self._end(wait=True)

    def _end(self, wait: bool) -> None:
        threads = getattr(self, "_threads", None)
        if threads is not None and self._process.is_here:
            threads.shutdown(wait)
        self._parts = []
        self._bytes = []

    def __enter__(self) -> HostStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_parts", None):
            if self._process.is_here:
                warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, stacklevel=1, source=self)
            # The garbage collector may run in one of the threads, or where a thread's copy waits for the lock of a
            # caller: nothing is waited for. A copy under way keeps the memory that it needs.
            self._end(wait=False)

    def __repr__(self) -> str:
        layers = len(self.expert_bytes)
        return f"HostStore(rank={self.rank}, {self.num_experts} experts of {layers} layers, {self.num_bytes} bytes)"

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        return torch.cuda.current_stream(self.device).record_event()  # type: ignore[no-any-return]

    def _require(self, layer: int, expert: int, blobs: ExpertBlobs, slot: int) -> None:
        """Raises ValueError before anything is copied."""
        self._part(self._layout.place(layer, expert).rank)
        check_int("slot", slot, 0, blobs.num_slots - 1)
        if blobs.slot_bytes != self.expert_bytes[layer]:
            raise ValueError(
                f"blobs have slots of {blobs.slot_bytes} bytes; layer {layer} of the host store has experts of "
                f"{self.expert_bytes[layer]}"
            )

    def _part(self, rank: int) -> Tensor:
        self._process.require_here(self.rank, "HostStore")
        if not self._bytes:
            raise ValueError("the host store is closed")
        part = self._bytes[rank]
        assert part is not None  # an expert's rank has a part
        return part

    def _record(self, layer: int, expert: int) -> Tensor:
        """int32: state, checksum, rank of the writer, number of the save."""
        place = self._layout.place(layer, expert)
        return self._part(place.rank)[place.record : place.record + RECORD_BYTES].view(torch.int32)

    def _bytes_of(self, layer: int, expert: int) -> Tensor:
        place = self._layout.place(layer, expert)
        return self._part(place.rank)[place.offset : place.offset + self.expert_bytes[layer]]


class _Saving:
    """Surrounds the copy of an expert into its place: a reader finds it not whole meanwhile.

    A process that stood still in it may find, when it wakes up, that another one has saved the expert. Then the record
    stays the other's, whose checksum tells whether this copy has changed the bytes.
    """

    def __init__(self, store: HostStore, layer: int, expert: int) -> None:
        self._record = store._record(layer, expert)
        self._place = store._bytes_of(layer, expert)
        self._rank = store.rank

    def __enter__(self) -> Tensor:
        self._number = int(self._record[3]) % _MOST_SAVES + 1
        self._record[3] = self._number
        self._record[2] = self._rank
        self._record[0] = _BEING_SAVED
        return self._place

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None:
            return  # it stays "being saved": part of it may have been written
        checksum = _checksum(self._place)
        if (int(self._record[2]), int(self._record[3])) != (self._rank, self._number):
            return
        # One that stands still from here on has its bytes in place: a later save replaces them, too.
        self._record[1] = checksum - (1 << 32) if checksum >= 1 << 31 else checksum
        self._record[0] = _SAVED


def _refuse(layer: int, expert: int, why: str) -> NoReturn:
    raise PutgetError(f"layer {layer}, expert {expert} in the host store is not whole: {why}")


def _checksum(packed: Tensor) -> int:
    return zlib.crc32(packed.numpy().data)


def _require_one_host(comm: Communicator) -> None:
    if not comm.one_host:
        raise ValueError("comm has ranks on several hosts; a host store is for one: make a Communicator for each host")


def _map_peer(peer: int, descriptors: list[int], num_bytes: int, alignment: int) -> Pages:
    if len(descriptors) != 1 or os.fstat(descriptors[0]).st_size != num_bytes:
        raise PutgetError(f"rank {peer} shares another memory than {num_bytes} bytes")
    return Pages(descriptors[0], num_bytes, alignment, fill=False, numa_node=None)


def _node(asked: int | None, device: torch.device) -> int | None:
    """The node that a rank's part should come from."""
    if asked is None:
        return numa.node_of_gpu(device) if device.type == "cuda" else numa.own_node()
    if asked not in numa.nodes():
        raise ValueError(f"numa_node is {asked!r}, online are {list(numa.nodes())}")
    return asked


def _cpus(node: int | None) -> frozenset[int]:
    """The CPUs of a node that this process may use; all that it may use where the node has none of them."""
    allowed = frozenset(os.sched_getaffinity(0))
    near = allowed & numa.cpus_of(node) if node is not None else allowed
    return near or allowed


def _begin_thread(cpus: frozenset[int], device: torch.device) -> None:
    os.sched_setaffinity(0, cpus)  # of this thread alone
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _after(event: torch.cuda.Event | None, call: Any, *args: Any, **named: Any) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
    call(*args, **named)
