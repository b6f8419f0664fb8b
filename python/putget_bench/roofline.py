"""Measures what the link can do: writes, reads, copies and a barrier between all ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from putget import AllToAll, Communicator, Payload, Workspace
from putget.tuning import Launch
from putget_bench.copy_probe import CopyProbe
from putget_bench.launch import Emit, RankContext
from putget_bench.probe_library import MAX_PROBED_RANKS
from putget_bench.row_probe import RowProbe
from putget_bench.timing import CpuTimer, CudaTimer, Step, Timer, make_flush, median, series_length, slowest
from putget_bench.traffic import gigabytes_per_second

_BARRIERS_IN_A_ROW = 20
_CONTROL_BYTES = 1 << 20  # for each rank: more than its flags take in a workspace
_TOP_K = 8  # of rows to random peers
_ROW_THREADS, _ROW_SEGMENT = 512, 2048
_TIMEOUT_S = 120.0  # between two barriers ranks generate inputs and check results, on few cores one after the other


@dataclass(frozen=True)
class LinkRate:
    """One measurement of the link, slowest rank, median.

    Attributes:
        kind: "write" or "read" by the SMs (the cores on the CPU), or "copy" by the copy engine, which writes.
        bytes_per_peer: moved between a rank and each of its peers.
        num_sms: SMs used, or None for all (and on the CPU); 0 for the copy engine.
        latency_us: time of the kernel, or of the copies to all peers, one after the other.
        gbps: 10^9 bytes a second that one rank writes to (reads from) its peers, all ranks at once.
    """

    kind: str
    bytes_per_peer: int
    num_sms: int | None
    latency_us: float
    gbps: float


@dataclass(frozen=True)
class RowRate:
    """One measurement of rows that go to random peers, as those of a round do; slowest rank, median.

    Attributes:
        kind: "put" or "get".
        row_bytes: of one row, a multiple of 16.
        num_tokens: tokens of a rank; each has a row at each peer with the chance of top_k random experts.
        latency_us: time of the kernel, which ends or begins with a flag between all ranks.
        gbps: 10^9 bytes a second of one rank to (from) its peers, all ranks at once.
    """

    kind: str
    row_bytes: int
    num_tokens: int
    latency_us: float
    gbps: float


@dataclass(frozen=True)
class Ceiling:
    """The best that the link does in this run; None where there is no peer.

    Attributes:
        write_gbps: writes of one rank to all peers.
        read_gbps: reads of one rank from all peers.
        barrier_us: a round without tokens, which is one exchange of flags between all ranks.
        bytes_per_peer: size of the transfers.
    """

    write_gbps: float | None
    read_gbps: float | None
    barrier_us: float
    bytes_per_peer: int


@dataclass(frozen=True)
class RooflineSettings:
    """Runs `putget roofline`.

    Attributes:
        ep_size: ranks.
        device: "cuda" or "cpu".
        sizes: bytes per peer.
        sms: SM counts to try on CUDA; None is all of them.
        rows: bytes of rows to try on CUDA, multiples of 16.
        tokens: numbers of them a rank.
        iters: timed iterations of each.
    """

    ep_size: int
    device: str
    sizes: tuple[int, ...]
    sms: tuple[int | None, ...]
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    iters: int


class Link:
    """Pushes bytes through the link, and lines the ranks up. Collective to make and to measure.

    The link is the memory that ranks share: on several hosts each host measures its own.

    Attributes:
        near: The ranks that share memory with this one.
    """

    def __init__(self, communicator: Communicator, context: RankContext, max_bytes_per_peer: int, cuda_graph: bool):
        self.near = _near(communicator)
        self._communicator = communicator
        self._is_cuda = context.device.type == "cuda"
        self._probe = CopyProbe(self.near, max_bytes_per_peer, context.device)
        self._rounds = AllToAll(
            communicator,
            num_experts=context.size,
            top_k=1,
            max_tokens_per_rank=1,
            payloads=[Payload((), torch.uint8)],
            output=Payload((), torch.bfloat16),
            device=context.device,
            timeout_s=_TIMEOUT_S,
        )
        self._ids = torch.empty(0, 1, dtype=torch.int32, device=context.device)
        self._weights = torch.empty(0, 1, dtype=torch.float32, device=context.device)
        self._rows = torch.empty(0, dtype=torch.uint8, device=context.device)
        self.timer = make_timer(context.device, self.barrier, cuda_graph)
        self.barrier()  # its kernels are loaded here, which a graph's capture could not do

    def barrier(self) -> None:
        """Enqueues a round without tokens: a flag from every rank to every rank (runs at once on the CPU)."""
        self._rounds.dispatch(self._ids, self._weights, self._rows)
        self._rounds.release()

    def rate(self, kind: str, bytes_per_peer: int, num_sms: int | None, iters: int) -> LinkRate:
        """Measures one kind of transfer."""
        most = (num_sms or None) if self._is_cuda else torch.get_num_threads()

        def move() -> None:
            self._probe.move(kind, bytes_per_peer, most)
            if not self._is_cuda:
                # Ranks may share cores and take turns: all at once means until the last one is done.
                self.barrier()

        latency_us = _median(self.timer, move, iters)
        moved = bytes_per_peer * (self.near.size - 1)
        return LinkRate(kind, bytes_per_peer, num_sms, latency_us, gigabytes_per_second(moved, latency_us))

    def barrier_us(self, iters: int) -> float:
        """Time of one barrier, in a row of them."""
        series = self.timer.back_to_back("barrier", self.barrier, _BARRIERS_IN_A_ROW)
        return median(slowest([series() for _ in range(1 + iters)][1:])["barrier"])

    def ceiling(self, bytes_per_peer: int, iters: int) -> Ceiling:
        """Measures what a bench compares itself with."""
        write = read = None
        if self.near.size > 1:
            write = self.rate("write", bytes_per_peer, None, iters).gbps
            read = self.rate("read", bytes_per_peer, None, iters).gbps
        return Ceiling(write, read, self.barrier_us(iters), bytes_per_peer)

    def close(self) -> None:
        """Gives the memory back."""
        self._rounds.close()
        self._probe.close()
        if self.near is not self._communicator:
            self.near.close()


def _near(communicator: Communicator) -> Communicator:
    """The ranks of this one's domain: all of them, where they share memory. Collective over all ranks."""
    if communicator.network is None:
        return communicator
    groups = [dist.new_group(list(domain)) for domain in communicator.domains]
    return Communicator(groups[communicator.domain_of[communicator.rank]])


def make_timer(device: torch.device, align: Callable[[], None], cuda_graph: bool, flush: str = "none") -> Timer:
    """The timer of a device.

    Args:
        device: where the ranks work.
        align: enqueues a barrier between them.
        cuda_graph: whether series on CUDA are captured.
        flush: what empties the caches on CUDA, see `timing.make_flush`.
    """
    if device.type == "cuda":
        return CudaTimer(align, cuda_graph, make_flush(flush))
    return CpuTimer(align)


def _median(timer: Timer, run: Callable[[], None], iters: int) -> float:
    run()  # once outside of any graph: modules load here
    length, num_series = series_length(iters)
    series = timer.steps([Step(run, "run")], length)
    return median(slowest([series() for _ in range(1 + num_series)][1:])["run"])


def measure(context: RankContext, settings: RooflineSettings, emit: Emit) -> int:
    """The work of one rank of `putget roofline`."""
    communicator = Communicator()
    link = Link(communicator, context, max(settings.sizes), cuda_graph=True)
    emit({"kind": "barrier", "latency_us": link.barrier_us(settings.iters)})
    if link.near.size > 1:
        transfers = [(kind, num_sms) for kind in ("write", "read") for num_sms in settings.sms]
        for kind, num_sms in (*transfers, ("copy", 0)):
            for size in settings.sizes:
                emit({"kind": "rate", "rate": asdict(link.rate(kind, size, num_sms, settings.iters))})
        if context.device.type == "cuda" and link.near.size <= MAX_PROBED_RANKS:
            for row_bytes in settings.rows:
                for row_rate in row_rates(link.near, context.device, link.timer, row_bytes, settings):
                    emit({"kind": "row_rate", "rate": asdict(row_rate)})
    link.close()
    communicator.close()
    return 0


def row_rates(
    communicator: Communicator, device: torch.device, timer: Timer, row_bytes: int, settings: RooflineSettings
) -> Iterator[RowRate]:
    """Rows of one size to and from random peers. Collective."""
    most, size = max(settings.tokens), communicator.size
    num_bytes = RowProbe.bytes_for(size, size * (most * row_bytes + _CONTROL_BYTES))
    workspace = Workspace(communicator, num_bytes, device)
    probe = RowProbe(workspace)
    generator = torch.Generator().manual_seed(communicator.rank)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    launch = Launch(sms, _ROW_THREADS, _ROW_SEGMENT, 1)
    for num_tokens in settings.tokens:
        wanted = torch.rand(num_tokens, size, generator=generator) < 1 - (1 - 1 / size) ** _TOP_K
        wanted[:, communicator.rank] = False
        slots = communicator.rank * most + wanted.cumsum(0, dtype=torch.int32) - 1
        table = torch.where(wanted, slots, -1).to(device, torch.int32)
        rows = torch.randint(256, (num_tokens, row_bytes), dtype=torch.uint8, device=device)
        out = torch.empty_like(rows)

        def put(table: Tensor = table, rows: Tensor = rows) -> None:
            probe.put(table, rows, launch)

        def get(table: Tensor = table, out: Tensor = out) -> None:
            probe.get(table, out, launch)

        put()
        get()
        length, num_series = series_length(settings.iters)
        series = timer.steps([Step(put, "put"), Step(get, "get")], length)
        readings = slowest([series() for _ in range(1 + num_series)][1:])
        probe.check()
        moved = int(wanted.sum()) * row_bytes
        for kind in ("put", "get"):
            latency_us = median(readings[kind])
            yield RowRate(kind, row_bytes, num_tokens, latency_us, gigabytes_per_second(moved, latency_us))
    workspace.close()
