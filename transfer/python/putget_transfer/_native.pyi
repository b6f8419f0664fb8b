"""Types of the compiled part. Times are in seconds, lengths and offsets in bytes, devices "cpu" or "cuda:N".

Every method raises ValueError for a caller's mistake, before any effect, and EngineClosed once its engine is closed.
"""

from collections.abc import Callable, Generator, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, final

from typing_extensions import Buffer

class EngineError(Exception):
    """Base class of what an engine reports."""

class TransferFailed(EngineError):
    """A transfer failed."""

    failures: list[Failure]

class Fenced(TransferFailed):
    """A transfer failed because one of its sides has fenced the other.

    `fenced_at` of a failure says when the peer has.
    """

class CountMissed(EngineError):
    """A counter did not reach the expected count: its deadline came, it was cancelled, or a named sender went down."""

    missing: list[str]
    """Of the senders that were named, those that are to blame. Empty if none was named."""

class EngineBusy(EngineError):
    """As many operations are under way as `Builder.max_submissions` allows."""

class EngineClosed(EngineError):
    """The engine is closed."""

class Unavailable(EngineError):
    """A library or device that this machine lacks."""

@final
class Failure:
    """One failure of a transfer: at which peer, on which NIC, and why."""

    peer: str
    nic: int | None
    reason: str
    may_land: bool
    """True where the network could not confirm that nothing more can land in the peer's memory."""
    fenced_at: float | None
    """When the peer fenced this engine, in seconds since 1970 by its clock; None for every other reason."""
    text: str

@final
class Flag:
    """A flag that operations lower; it counts, so one can stand for several."""

    def __new__(cls) -> Flag: ...
    @property
    def pending(self) -> int: ...
    @property
    def failed(self) -> int: ...

_Done = Callable[[EngineError | None], object] | Flag | None

@final
class SimNetwork:
    """A simulated network inside this process. Its choices follow from the seed and the order of the calls."""

    def __new__(cls, seed: int = 0) -> SimNetwork: ...
    def set_faults(
        self,
        *,
        reorder: bool = True,
        max_delay_polls: int = 4,
        drop_writes: float = 0.0,
        drop_messages: float = 0.0,
        depth: int = 64,
        latency_s: float = 0.0,
        bytes_per_s: int = 0,
        write_cost_s: float = 0.0,
        registration_cost_s: float = 0.0,
    ) -> None:
        """Change how the network misbehaves, and how slow it is in real time.

        Args:
            reorder: Deliver in random order.
            max_delay_polls: Hold each work request back for up to so many polls.
            drop_writes: Share of the writes that get lost, 0 to 1. Their sender is told.
            drop_messages: The same for messages.
            depth: Work requests in flight on one NIC.
            latency_s: Time from a NIC to another one; a completion takes as long back.
            bytes_per_s: What a NIC sends in a second; 0 is as much as is posted.
            write_cost_s: Time that a NIC needs for each write, besides its bytes.
            registration_cost_s: Time that registering a region takes, on the thread that asks for it.
        """
    def cut(self, a: NetAddr, b: NetAddr) -> None:
        """Cut the connection between two NICs, in silence: what is on its way stays there."""
    def heal(self, a: NetAddr, b: NetAddr) -> None:
        """End a cut."""
    def kill(self, nic: NetAddr) -> None:
        """Kill a NIC as if its machine had lost power."""

@final
class Topology:
    """The GPUs and NICs of a machine, as Linux's sysfs shows them. Devices that are not on PCI are left out."""

    def __init__(self, sys: str | PathLike[str] = "/sys") -> None: ...
    @property
    def gpus(self) -> list[tuple[str, int | None]]:
        """Address on PCI and NUMA node of each GPU."""
    @property
    def nics(self) -> list[tuple[str, bool, bool, int | None]]:
        """Name, whether verbs can use it, whether it is active, and NUMA node of each NIC."""
    def nics_near(self, gpu: str) -> list[str]:
        """Return the active NICs for verbs that are nearest to a GPU, by its address on PCI.

        GPUs that have the same NICs next to them share them out, if there are enough.

        Raises:
            ValueError: If there is no such GPU.
            Unavailable: If no NIC for verbs is active.
        """
    def host_nics(self) -> list[str]:
        """Return the active NICs for verbs of one NUMA node, the one that has most of them."""
    def cpus_near_gpu(self, gpu: str) -> list[int] | None:
        """Return the processors near a GPU, by its address on PCI; None where the machine does not say."""
    def cpus_near_nic(self, nic: str) -> list[int] | None:
        """Return the processors near a NIC, by its name; None where the machine does not say."""
    def proximity(self, gpu: str, nic: str) -> str:
        """Return how near they are: "machine", "node", "root" or "switch, N bridges", from far to near."""

@final
class DeviceGroup:
    """One device, the NICs that serve it, and where their worker thread runs."""

    @staticmethod
    def sim(network: SimNetwork, nics: int) -> DeviceGroup:
        """Host memory behind 1 to 4 NICs of a simulated network."""
    @staticmethod
    def tcp(sources: Sequence[str | None]) -> DeviceGroup:
        """Host memory over TCP, one NIC for each of `sources`.

        Args:
            sources: Addresses of this machine; None is the one that leads to other machines.
        """
    @staticmethod
    def libfabric(provider: str, sources: Sequence[str | None]) -> DeviceGroup:
        """Host memory behind endpoints of a libfabric provider, one for each of `sources`.

        Args:
            provider: "net" or "efa". "tcp" and "host" are putget's own and need no library: "host" is
                `host` with as many NICs as there are sources.
            sources: Addresses of this machine's NICs; None leaves the choice to the provider.
        """
    @staticmethod
    def host(nics: int = 1) -> DeviceGroup:
        """Host memory of ranks of one host, over shared memory.

        Memory from `Engine.alloc_mr` travels fastest: peers map it. Other memory is copied through a ring, or read by
        the kernel.

        Args:
            nics: 1 to 4. One is as fast as several.
        """
    @staticmethod
    def nvlink(ordinal: int) -> DeviceGroup:
        """Make a group of one GPU, which writes to its peers in other processes of this machine.

        It moves host memory, which it pins, and memory from cudaMalloc or cuMemCreate, but not from cudaMallocAsync.

        Args:
            ordinal: The GPU's number in CUDA.
        """
    @staticmethod
    def verbs(devices: Sequence[str]) -> DeviceGroup:
        """Host memory behind ports of InfiniBand or RoCE NICs.

        Args:
            devices: "device", "device:port" or "device:port:gid_index". The port is 1 and the address the best RoCE v2
                one (IPv4 first) unless said otherwise.
        """
    @staticmethod
    def verbs_near(topology: Topology, device: str) -> DeviceGroup:
        """Memory of a device behind the NICs for verbs that are nearest to it, with the worker thread near them.

        Args:
            topology: Where to look.
            device: "cuda:N", or "cpu" for host memory, which gets the NICs of one NUMA node.

        Raises:
            Unavailable: If no NIC for verbs is active, or there is no such GPU.
        """
    def device(self, device: str) -> DeviceGroup:
        """Say whose memory the group moves: "cpu" unless said otherwise, or "cuda:N"."""
    def cpus(self, cpus: Sequence[int]) -> DeviceGroup:
        """Pin the worker thread to these processors."""
    def near(self, device: str) -> DeviceGroup:
        """Pin the worker thread near a network or PCI device, where the machine says what is near it."""

@final
class Builder:
    """The settings of an engine."""

    def group(self, group: DeviceGroup) -> Builder:
        """Add a device group, over any provider. All of them share the engine's counters.

        A peer is reached over the best provider that both have: NVLink or shared memory inside a machine, otherwise the
        network that was added first.
        """
    def secret(self, secret: Buffer) -> Builder:
        """Demand of every peer that it proves to have this secret."""
    def heartbeat(self, interval_s: float, timeout_s: float) -> Builder:
        """Set how often peers are asked whether they live, and the silence after which they count as down."""
    def connect_timeout(self, timeout_s: float) -> Builder: ...
    def default_deadline(self, deadline_s: float) -> Builder: ...
    def readmit(self, who: str) -> Builder:
        """Say which peers come back without `Engine.admit`, after a fence or after their heartbeat was lost.

        Args:
            who: "asked" (the default): none; "lost": those that were lost; "auto": all, also fenced ones.

        Raises:
            ValueError: For another word.
        """
    def grace(self, grace_s: float) -> Builder:
        """Set how long a cancelled or overdue transfer may drain before it ends with `may_land`. Its connection stays.

        Default: the heartbeat's timeout.
        """
    def min_shard(self, bytes: int) -> Builder: ...
    def max_submissions(self, count: int, *, wait: bool = True) -> Builder:
        """Bound the operations that are under way at a time, expectations left out. Default: 65,536.

        Args:
            count: At least 1.
            wait: Whether a submission beyond them waits for room, at most until its deadline, or fails at once. Then
                it raises EngineBusy.
        """
    def callback_threads(self, count: int) -> Builder:
        """Set how many threads call callbacks: so many for Python's, and as many for all others. Default: 1.

        Peer events, the messages of one pool and the changes of one word come one after the other all the same.
        """
    def busy_poll(self, busy: bool) -> Builder: ...
    def cpus(self, cpus: Sequence[int]) -> Builder:
        """Pin the threads that are no device group's own, for callbacks and watched words, to these processors."""
    def on_peer_event(self, callback: Callable[[str, str | None], object]) -> Builder:
        """Call back with a peer's name and None when it comes, or why it went."""
    def build(self) -> Engine: ...

class Engine:
    """A transfer engine. It closes when it is collected, at exit, by `close` or at the end of a `with` block.

    Callbacks keep nothing alive but what they refer to: an engine whose callback is a method of its owner goes with the
    owner. If the garbage collector drops an engine, callbacks that have not been called are left out.

    `done` of an operation is called on a callback thread of the engine with the error or None. It may be a Flag, which
    is lowered.
    The `Transfer` that every submission returns can be awaited whatever `done` is.
    """

    @staticmethod
    def builder() -> Builder: ...
    def main_address(self) -> NetAddr:
        """Return the address of the first NIC of every device group: others choose among those that they share."""
    def addresses(self, group: int = 0) -> list[NetAddr]:
        """Return the addresses of the NICs of a device group. Each leads to that group alone."""
    @property
    def name(self) -> str: ...
    def metrics_text(self) -> str:
        """Return the engine's counts as text for Prometheus."""
    def max_message(self) -> int: ...
    def reg_mr(
        self,
        memory: Any,
        length: int | None = None,
        device: str | None = None,
        *,
        groups: Sequence[int] | None = None,
        read_only: bool = False,
    ) -> tuple[MrHandle, MrDesc]:
        """Register memory.

        What is registered is a tensor's storage. torch refuses to resize the storage until the registration has ended.

        Args:
            memory: A writable buffer, a contiguous tensor, an object with `__cuda_array_interface__` or an address. All
                but an address are kept alive as long as transfers may use them.
            length: Bytes; needed with an address.
            device: Needed with the address of device memory.
            groups: The device groups that may use it; all that move memory of its device if None.
            read_only: Nothing lands in the memory: peers read it, and this engine writes from it. Host memory only. It
                need not be writable.

        Returns:
            The handle for this engine's own transfers, and the descriptor for those who may write to the memory.

        Raises:
            ValueError: Also for memory that the process cannot write to, without `read_only`.
        """
    def reg_mrs(
        self, memory: Sequence[Any], *, groups: Sequence[int] | None = None, read_only: bool = False
    ) -> list[tuple[MrHandle, MrDesc]]:
        """Register much memory of one device at once, or none of it.

        Args:
            memory: As for `reg_mr`, without addresses.
            groups: As for `reg_mr`.
            read_only: As for `reg_mr`.

        Returns:
            Handle and descriptor of each.
        """
    def alloc_mr(self, len: int, *, groups: Sequence[int] | None = None) -> tuple[MrHandle, MrDesc]:
        """Allocate zeroed host memory and register it. `groups` is as for `reg_mr`."""
    def desc_for(self, handle: MrHandle, peer: NetAddr) -> MrDesc:
        """Return a descriptor of registered memory with keys for one peer alone.

        A fence of that peer, and the loss of its heartbeat, void these keys for good; the plain descriptor and those of
        other peers go on. The memory is not pinned again over tcp, `host` and the simulated network; other providers
        register it once more. A second call returns the same keys, until they are void.

        Raises:
            ValueError: For another engine's handle, or an address that this engine does not reach.
        """
    def dereg_mr(self, handle: MrHandle) -> None:
        """End a registration: when this returns, nothing lands in the memory any more.

        Over libfabric (not tcp) the engine keeps the memory until it closes instead, because a write may still land.
        """
    def dereg_mrs(self, handles: Sequence[MrHandle]) -> None:
        """End many registrations at once, as `dereg_mr` does one. If one of them is still in use, all of them stay."""
    def submit_send(
        self,
        to: NetAddr,
        data: Buffer,
        *,
        pool: int = 0,
        done: _Done = None,
        deadline_s: float | None = None,
        device_group: int | None = None,
    ) -> Transfer:
        """Send a message of at most `max_message` bytes. It is over when the receiver has all of it in a buffer.

        Args:
            to: The receiver.
            data: The message: bytes or any other buffer. It is copied.
            pool: The number of one of the receiver's pools.
            done: As for every operation.
            deadline_s: Time until it fails; the engine's default if None.
            device_group: The one device group to use, instead of the best.
        """
    def submit_recvs(
        self,
        len: int,
        count: int,
        callback: Callable[[NetAddr, bytes], object],
        *,
        pool: int = 0,
        per_peer: int | None = None,
    ) -> None:
        """Provide `count` rotating buffers of `len` bytes for messages.

        A pool may get buffers of several lengths, each with a callback: a message takes the shortest that is free.

        Args:
            len: Bytes of the longest message that fits.
            count: How many messages there may be until their callbacks have returned.
            callback: Gets the sender's address and the message, one message after the other.
            pool: The number that senders name.
            per_peer: How many of the buffers one engine's messages may hold; three quarters, rounded up, if None.
        """
    def submit_read(
        self,
        len: int,
        imm: int | None,
        src: tuple[MrDesc, int],
        dst: tuple[MrHandle, int],
        *,
        done: _Done = None,
        deadline_s: float | None = None,
        nic: int | None = None,
        device_group: int | None = None,
    ) -> Transfer:
        """Read `len` bytes of a peer's memory into the own; the peer counts `imm` after all have been read.

        Nothing but this engine writes to `dst`. If the read fails, the bytes that it names may have changed, but none
        changes after the end of the transfer, except where the error says `may_land`.
        """
    def submit_paged_reads(
        self,
        page_len: int,
        imm: int | None,
        src: tuple[MrDesc, Pages],
        dst: tuple[MrHandle, Pages],
        *,
        done: _Done = None,
        deadline_s: float | None = None,
        nic: int | None = None,
        device_group: int | None = None,
    ) -> Transfer:
        """Read page i of `src` into page i of `dst`."""
    def submit_reads(
        self,
        imm: int | None,
        items: Sequence[tuple[int, tuple[MrDesc, int], tuple[MrHandle, int]]],
        *,
        done: _Done = None,
        deadline_s: float | None = None,
        nic: int | None = None,
        device_group: int | None = None,
    ) -> Transfer:
        """Read many ranges between any regions as one operation: `prepare_reads` and `submit_prepared`."""
    def prepare_reads(
        self,
        items: Sequence[tuple[int, tuple[MrDesc, int], tuple[MrHandle, int]]],
        *,
        nic: int | None = None,
        device_group: int | None = None,
    ) -> Prepared:
        """Prepare reads between any regions, as `prepare_writes` does for writes.

        Args:
            items: Length, source region and offset, target region and offset of each.
            nic: The one NIC to use, instead of all.
            device_group: The one device group to use, instead of the best.

        Returns:
            What `submit_prepared` and `submit_when` take.
        """
    def prepare_paged_reads(
        self,
        page_len: int,
        src: tuple[MrDesc, Pages],
        dst: tuple[MrHandle, Pages],
        *,
        nic: int | None = None,
        device_group: int | None = None,
    ) -> Prepared:
        """Prepare what `submit_paged_reads` does."""
    def submit_single_write(
        self,
        len: int,
        imm: int | None,
        src: tuple[MrHandle, int],
        dst: tuple[MrDesc, int],
        *,
        done: _Done = None,
        deadline_s: float | None = None,
        nic: int | None = None,
        device_group: int | None = None,
    ) -> Transfer:
        """Write `len` bytes from one region and offset to another; the target counts `imm` after all have landed."""
    def submit_paged_writes(
        self,
        page_len: int,
        imm: int | None,
        src: tuple[MrHandle, Pages],
        dst: tuple[MrDesc, Pages],
        *,
        done: _Done = None,
        deadline_s: float | None = None,
        nic: int | None = None,
        device_group: int | None = None,
    ) -> Transfer:
        """Write page i of `src` to page i of `dst`; the target counts `imm` once, after all pages have landed."""
    def add_peer_group(
        self,
        peers: Sequence[NetAddr],
        *,
        done: _Done = None,
        deadline_s: float | None = None,
        device_group: int | None = None,
    ) -> tuple[PeerGroup, Transfer]:
        """Connect to peers ahead of the operations that will name them.

        Args:
            peers: Addresses of the peers' engines.
            done: As for every operation.
            deadline_s: Time until it fails; the engine's default if None.
            device_group: The one device group of this engine to use, also for operations that name the peer group.
        """
    def submit_scatter(
        self,
        group: PeerGroup | None,
        imm: int | None,
        src: MrHandle,
        dsts: Sequence[ScatterDst],
        *,
        done: _Done = None,
        deadline_s: float | None = None,
        nic: int | None = None,
        device_group: int | None = None,
    ) -> Transfer:
        """Write parts of `src` to many destinations; each counts `imm` once."""
    def submit_barrier(
        self,
        group: PeerGroup | None,
        imm: int,
        dsts: Sequence[MrDesc],
        *,
        done: _Done = None,
        deadline_s: float | None = None,
        nic: int | None = None,
        device_group: int | None = None,
    ) -> Transfer:
        """Raise the counter of `imm` by one at every destination, without any bytes."""
    def prepare_writes(
        self,
        items: Sequence[tuple[int, tuple[MrHandle, int], tuple[MrDesc, int]]],
        *,
        nic: int | None = None,
        device_group: int | None = None,
    ) -> Prepared:
        """Prepare writes between any regions: checked and cut into work requests ahead of time.

        Args:
            items: Length, source region and offset, target region and offset of each.
            nic: The one NIC to use, instead of all.
            device_group: The one device group of this engine to use, instead of the best one for each peer.

        Returns:
            What `submit_prepared` and `submit_when` take. With an immediate, each peer that is written to counts it
            once, after all bytes for it have landed, in whichever of its regions.
        """
    def prepare_paged_writes(
        self,
        page_len: int,
        src: tuple[MrHandle, Pages],
        dst: tuple[MrDesc, Pages],
        *,
        nic: int | None = None,
        device_group: int | None = None,
    ) -> Prepared:
        """Prepare what `submit_paged_writes` does."""
    def submit_prepared(
        self, prepared: Prepared, imm: int | None, *, done: _Done = None, deadline_s: float | None = None
    ) -> Transfer:
        """Submit prepared writes."""
    def submit_writes(
        self,
        imm: int | None,
        items: Sequence[tuple[int, tuple[MrHandle, int], tuple[MrDesc, int]]],
        *,
        done: _Done = None,
        deadline_s: float | None = None,
        nic: int | None = None,
        device_group: int | None = None,
    ) -> Transfer:
        """Write many ranges between any regions as one operation: `prepare_writes` and `submit_prepared`."""
    def scatter_template(self, group: PeerGroup | None, src: MrHandle, dsts: Sequence[MrDesc]) -> ScatterTemplate:
        """Prepare scatters from one region to the same destinations."""
    def submit_template(
        self,
        template: ScatterTemplate,
        imm: int | None,
        parts: Sequence[tuple[int, int, int]],
        *,
        done: _Done = None,
        deadline_s: float | None = None,
        nic: int | None = None,
        device_group: int | None = None,
    ) -> Transfer:
        """Scatter by a template.

        Args:
            template: From `scatter_template` of this engine.
            imm: Each destination counts it once, also where it gets no bytes.
            parts: Length, offset in the source and offset in the target for each destination.
            done: As for every operation.
            deadline_s: Time until it fails; the engine's default if None.
            nic: The one NIC to use, instead of all.
            device_group: The one device group of this engine to use, instead of the best one for each peer.
        """
    def submit_when(
        self,
        watcher: UvmWatcher,
        value: int,
        prepared: Prepared,
        imm: int | None,
        *,
        done: _Done = None,
        deadline_s: float | None = None,
    ) -> Transfer:
        """Submit prepared writes when the watched word is at least `value`; at once if it is already.

        A thread of the engine posts them, without Python. The deadline and a cancellation hold from now on.
        """
    def expect_imm_count(
        self,
        imm: int,
        count: int,
        *,
        deadline_s: float | None = None,
        done: _Done = None,
        senders: Sequence[NetAddr] | None = None,
        take: bool = False,
    ) -> Transfer:
        """Wait until `imm` has arrived `count` times, earlier arrivals included. `Transfer.cancel` ends it.

        Args:
            imm: The immediate.
            count: Arrivals.
            deadline_s: Time until it fails; the engine's default if None.
            done: As for every operation.
            senders: Those who are to send. One that is down, or goes down, fails this at once.
            take: Takes the arrivals out of the counter when all are there. A counter at 0 needs no memory.

        Raises:
            ValueError: If a sender's address belongs to another network.
            CountMissed: From the transfer. `missing` has the named senders from whom nothing has arrived, or all of
                them if something has come from each. Beyond an engine's first 63 peers, senders are not told apart.
        """
    def reserve_imms(self, owner: str, first: int | None, count: int) -> ImmRange:
        """Reserve `count` immediates for an owner: those from `first` on, or some that nobody has.

        Parts of a program that do not know of each other keep apart in this way. The engine does not check who uses an
        immediate.

        Raises:
            ValueError: If one of them belongs to another owner, or there are not so many in a row.
        """
    def fence(self, peer: NetAddr, *, done: _Done = None) -> Transfer:
        """Shut a peer out until `admit`.

        When the transfer is over, nothing that the peer was given before lands or counts here. That holds whoever
        begins the next connection. The peer is the engine that the address belongs to, with all its device groups. It
        may have been stopped in the middle of a write and go on later. Its operations fail with Fenced, also those
        that it submits before it is admitted. What this engine was given for the peer fails with Fenced, too, and
        keys of `desc_for` this peer are void.

        Raises:
            ValueError: If the address belongs to another network, or to this engine.
            TransferFailed: From the transfer, with `may_land`, where the network cannot stop the peer. Then the engine
                keeps what the peer may write to until the peer event "it cannot write any more".
        """
    def admit(self, peer: NetAddr) -> None:
        """Let a peer in again that was fenced, or lost by its heartbeat.

        What either side was given before is not carried, what it is given from now on is. The engine connects to the
        peer, so that it knows, and waits up to 0.25 s for that, except in a callback. For a peer that is not shut out
        this does nothing.

        Raises:
            ValueError: As for `fence`.
        """
    def imm_count(self, imm: int) -> int: ...
    def reset_imm(self, imm: int) -> int:
        """Set a counter that nobody writes to any more back to 0; return what it was."""
    def submit_reset_imm(
        self, imm: int, senders: Sequence[NetAddr], *, done: _Done = None, deadline_s: float | None = None
    ) -> Transfer:
        """Set a counter back to 0 once every sender has said that nothing of its own is under way with it."""
    def mirror_imm(self, imm: int, handle: MrHandle, offset: int) -> None:
        """Show a counter in the 64-bit word at `offset` of registered host memory."""
    def unmirror_imm(self, imm: int) -> None: ...
    def mirror_imms(self, first: int, count: int, handle: MrHandle, offset: int) -> None:
        """Show the counters of `count` immediates from `first` on in an array of 64-bit words of registered memory.

        A GPU sees host memory that it has mapped. Its own memory takes GDRCopy.

        Raises:
            Unavailable: For memory of a GPU without GDRCopy.
        """
    def unmirror_imms(self, first: int, count: int) -> None:
        """End the mirrors of `count` counters from `first` on."""
    def alloc_uvm_watcher(
        self, callback: Callable[[int, int], object] | None = None, *, pace_us: int | None = None
    ) -> UvmWatcher:
        """Make a word that a thread watches; the callback gets its old and its new value.

        Without a callback the word is for `submit_when` alone.

        Args:
            callback: Called with the old and the new value.
            pace_us: As for `UvmWatcher.set_pace`.

        Raises:
            ValueError: If `pace_us` is not one of 0 to 500.
        """
    def c_handle(self) -> int:
        """Return the address of this engine's `pt_engine`, for code in this process that uses `putget_transfer.h`.

        It is valid as long as this object. Code that needs the engine for longer takes a handle of its own with
        `pt_engine_share`.

        Raises:
            EngineClosed: If the engine is closed.
            EngineError: In a forked child.
        """
    def close(self) -> None: ...
    def __enter__(self) -> Engine: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

@final
class Transfer:
    """A submitted operation."""

    def done(self) -> bool: ...
    @property
    def seconds_since_end(self) -> float | None:
        """The time since the operation has ended; None before."""
    def result(self) -> None:
        """Raise what the operation failed with; TimeoutError if it is not over."""
    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end and raise what the operation failed with; TimeoutError after `timeout_s`.

        Raises:
            ValueError: Inside a callback of the same engine, unless the operation is over.
        """
    def cancel(self) -> bool:
        """Ask for the end; False if there is nothing to cancel. The end of the transfer is the confirmation."""
    def add_done_callback(self, callback: Callable[[EngineError | None], object]) -> None: ...
    def __await__(self) -> Generator[Any]: ...

@final
class MrHandle:
    """Memory that an engine has registered, as long as this or a transfer uses it."""

    def __len__(self) -> int: ...
    @property
    def address(self) -> int: ...
    def read(self, offset: int, len: int) -> bytes: ...
    def write(self, offset: int, data: Buffer) -> None: ...
    def load_word(self, offset: int) -> int: ...

@final
class MrDesc:
    """A region as others see it. Whoever holds it may write to the region: treat it as a secret."""

    def to_bytes(self) -> bytes: ...
    @staticmethod
    def from_bytes(data: Buffer) -> MrDesc: ...
    def __len__(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def num_nics(self) -> int: ...
    @property
    def peer(self) -> str: ...

@final
class NetAddr:
    """The address of one NIC of one engine, void once that engine has ended."""

    def to_bytes(self) -> bytes: ...
    @staticmethod
    def from_bytes(data: Buffer) -> NetAddr: ...
    @property
    def peer(self) -> str: ...
    @property
    def providers(self) -> list[str]:
        """The provider of each device group: "sim", "libfabric", "nvlink", "verbs", "host" or "tcp"."""

@final
class Pages:
    """Pages of a region: page i of plane j begins at `j * plane_stride + indices[i] * stride + offset`.

    Several planes are for caches with a plane for keys and one for values. The order of a transfer is plane by plane.
    `indices` is a sequence, or a contiguous array of integers of 64 or 32 bits, which is copied as a whole.
    """

    indices: list[int]
    stride: int
    offset: int
    planes: int
    plane_stride: int
    def __new__(
        cls, indices: Sequence[int] | Any, stride: int, offset: int = 0, planes: int = 1, plane_stride: int = 0
    ) -> Pages: ...

@final
class Prepared:
    """Writes that can be submitted as often as wanted. It keeps the regions that it reads from in use."""

@final
class ScatterTemplate:
    """A source and destinations of scatters whose lengths and offsets change."""

@final
class ScatterDst:
    """One destination of a scatter: `len` bytes from `src_offset` of the source to a region and an offset in it."""

    def __new__(cls, len: int, src_offset: int, dst: tuple[MrDesc, int]) -> ScatterDst: ...

@final
class PeerGroup:
    """Peers that are connected ahead of time."""

    def __len__(self) -> int: ...

@final
class ImmRange:
    """Immediates that belong to an owner, until `release` or the end of this object. Counters stay as they are."""

    @property
    def owner(self) -> str: ...
    @property
    def first(self) -> int: ...
    def __len__(self) -> int: ...
    def imm(self, index: int) -> int:
        """Return one of them, from 0 on; ValueError if it is not one of them."""
    def release(self) -> None: ...

@final
class UvmWatcher:
    """A 64-bit word that is watched as long as this lives. It begins at 0, alone on a page."""

    @property
    def address(self) -> int: ...
    @property
    def value(self) -> int: ...
    def store(self, value: int) -> None: ...
    def set_pace(self, pace_us: int | None) -> None:
        """Say how often the engine looks at the word, at any time. It ends a pause.

        Args:
            pace_us: Microseconds from one look to the next, 0 to 500, also while the word does not change. At 0 the
                engine looks without a pause, and keeps a processor busy. None, as at first: less and less often while
                nothing changes.

        Raises:
            ValueError: If `pace_us` is not one of these.
        """
    def pause(self) -> None:
        """Have nobody look at the word until `set_pace` is called.

        What changes meanwhile is told then, as one change. Writes of `submit_when` still go.
        """

def collecting(begins: bool) -> None:
    """Note that the garbage collector begins or ends on this thread."""

def forking(begins: bool) -> None:
    """Note that a fork begins or is over on this thread."""

@final
class Pin:
    """Keep a torch storage from being resized as long as this lives."""

    def __new__(cls, address: int) -> Pin: ...
    @property
    def holds(self) -> bool:
        """Whether the flag at `address` was set, or is clear because of another pin."""
