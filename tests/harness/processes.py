"""Rank processes that obey one command at a time, and die when told to."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import io
import multiprocessing as mp
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.harness import hosts
from tests.harness.rank import Rank

# The fork server imports torch once; a rank is then a fork of it, which takes milliseconds and not seconds.
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed", "pytest", "hypothesis", "putget", "tests.harness.compare"]
)


_MOST_TRACEBACKS = 8


def kill(pid: int) -> None:
    """Kills a process, and returns once it has ended.

    A killed process keeps its files until its memory is unmapped. That may wait seconds for processes which map the
    same libraries while they fork or end on a busy machine. Nobody can find it gone before.
    """
    process = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        wait([process])
    finally:
        os.close(process)


def thread_states(pid: int) -> set[str]:
    """The letters that Linux gives the states of a process's threads: "T" is stopped. None if the process has ended."""
    states = set()
    with contextlib.suppress(OSError):  # the process has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                states.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states


class RankError(AssertionError):
    """A body raised on some rank, or did not answer in time; the message has the tracebacks."""

    @classmethod
    def of(cls, failures: dict[int, str], stacks: str = "") -> RankError:
        """One error for the failures of all ranks; those that did not just wait for others come first."""
        ranks = sorted(
            failures, key=lambda rank: ("no answer" in failures[rank] or "PeerTimeout" in failures[rank], rank)
        )
        text = "".join(f"\nrank {rank}: {failures[rank]}" for rank in ranks[:_MOST_TRACEBACKS])
        more = f"\nand ranks {ranks[_MOST_TRACEBACKS:]}\n" if len(ranks) > _MOST_TRACEBACKS else ""
        return cls(text + more + stacks)


def _pack(message: Any) -> bytes:
    # torch's own format copies tensors of every dtype; multiprocessing's reducers would share their memory instead.
    stream = io.BytesIO()
    torch.save(message, stream)
    return stream.getvalue()


def _unpack(message: bytes) -> Any:
    return torch.load(io.BytesIO(message), weights_only=False)


def _serve(connection: Connection, rank: int, size: int, device: str, directory: str, host: str | None) -> None:
    """The main function of a rank process: runs bodies until the connection closes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if host is None else hosts.NIC
    if host is not None:
        hosts.enter(host)
    stacks = open(Path(directory) / f"stacks_{rank}", "w")  # noqa: SIM115 - open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stacks)
    torch.set_num_threads(1)
    place = torch.device(device) if device == "cpu" else torch.device(device, rank)
    if place.type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # engines' adapters choose the GPU where they find one
    if place.type == "cuda":
        # A GPU of its own: a module that loads late waits for nobody else's kernels, and starting is much faster.
        os.environ["CUDA_MODULE_LOADING"] = "LAZY"
        torch.cuda.set_device(place)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    me = Rank(rank, size, place)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            command = connection.recv_bytes()
            try:
                body, args = _unpack(command)
                answer = _pack((body(me, *args), None))
            except BaseException:
                answer = _pack((None, traceback.format_exc()))
            connection.send_bytes(answer)
    os._exit(0)


class RankProcesses:
    """`size` processes joined in one gloo group, on this host or on the network namespaces `on_hosts`, one a rank.

    Commands go to one rank (`submit`, `result`) or to several (`call`). Nothing here waits for ever: a rank that
    does not answer within the time-out fails the call with the stacks of all such ranks.
    """

    def __init__(self, size: int, device: str = "cpu", on_hosts: Sequence[str] | None = None) -> None:
        self.size = size
        self.broken = False
        self._directory = tempfile.mkdtemp(prefix="putget_ranks_")
        self._processes, self._connections = [], []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            host = None if on_hosts is None else on_hosts[rank]
            arguments = (theirs, rank, size, device, self._directory, host)
            process = _context.Process(target=_serve, args=arguments, daemon=True, name=f"rank {rank}")
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        atexit.register(self.close)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, rank: int, body: Callable[..., Any], *args: Any) -> None:
        """Sends a command; its result must be fetched before the next one."""
        self._connections[rank].send_bytes(_pack((body, args)))

    def result(self, rank: int, timeout: float = 120.0) -> Any:
        return self.results([rank], timeout)[rank]

    def results(self, ranks: Iterable[int], timeout: float = 120.0) -> dict[int, Any]:
        """Waits for the answers of these ranks; a first failure cuts the wait for the others short."""
        waiting = {self._connections[rank]: rank for rank in ranks}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        was_broken, self.broken = self.broken, True
        deadline = time.monotonic() + timeout
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), timeout=remaining):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    value, failure = _unpack(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    value, failure = None, f"the process ended (exit code {self._exit_code(rank)})\n"
                if failure is None:
                    results[rank] = value
                else:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + 5)
        failures.update(dict.fromkeys(waiting.values(), "no answer in time\n"))
        if failures:
            stacks = self._stacks(waiting.values())
            raise RankError.of(failures, stacks)
        self.broken = was_broken
        return results

    def call(
        self, body: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None, timeout: float = 120.0
    ) -> dict[int, Any]:
        """Runs one body on several ranks (all by default) and waits for them."""
        chosen = list(range(self.size) if ranks is None else ranks)
        for rank in chosen:
            self.submit(rank, body, *args)
        return self.results(chosen, timeout)

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)
        if number == signal.SIGKILL:
            self._processes[rank].join(10)
        deadline = time.monotonic() + 10
        # A thread that runs on another processor goes on for a moment.
        while number == signal.SIGSTOP and thread_states(pid) - {"T", "Z", "X"} and time.monotonic() < deadline:
            time.sleep(0.001)

    def submit_and_nap(self, rank: int, body: Callable[..., Any], *args: Any) -> None:
        """Submits a body that comes to wait for other ranks on a CPU, and returns once it waits: then it naps."""
        status = Path(f"/proc/{self._processes[rank].pid}/status")

        def naps() -> int:
            lines = status.read_text().splitlines()
            return int(next(line.split()[1] for line in lines if line.startswith("voluntary_ctxt_switches")))

        before, deadline = naps(), time.monotonic() + 30
        self.submit(rank, body, *args)
        while naps() < before + 100:  # a body that computes has a few
            assert time.monotonic() < deadline, f"rank {rank} does not wait"
            time.sleep(0.01)

    def close(self) -> None:
        """Ends the processes, kindly if they listen."""
        atexit.unregister(self.close)
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + (0.1 if self.broken else 2.0)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(10)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(30)  # the fork server says how it ended
        return self._processes[rank].exitcode

    def _stacks(self, ranks: Iterable[int]) -> str:
        stuck = [rank for rank in ranks if self._processes[rank].is_alive()]
        for rank in stuck:
            self.signal(rank, signal.SIGUSR1)
        paths = {rank: Path(self._directory) / f"stacks_{rank}" for rank in stuck}
        # A rank without a core has not been interrupted yet.
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not all(path.exists() and path.stat().st_size for path in paths.values()):
            time.sleep(0.01)
        if stuck:
            time.sleep(0.5)  # the rest of what they write
        return "".join(f"\nstack of rank {rank}:\n{path.read_text()}" for rank, path in paths.items() if path.exists())
