"""vLLM's ``--enable-eplb`` moves experts through putget: an ``EplbCommunicator`` on landing areas."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from putget import BackendUnavailable, Communicator, PutgetError
from putget.adapters.engines import announce_mover, require_arguments, require_names
from putget.balancer import ExpertExchange, travelling_bytes

MODULE = "vllm.distributed.eplb.eplb_communicator"
NAME = "create_eplb_communicator"
_NEEDED = ("EplbCommunicator", "StatelessGroupCoordinator", NAME)
_KNOWN = {"add_send", "add_recv", "execute"}


class ExchangeRounds:
    """A communicator of vLLM on an `ExpertExchange`; vLLM's base class is added by `communicator_class`.

    Args:
        comm: the ranks of vLLM's expert-parallel group.
        expert_weights: the tensors of all layers, [num_local_experts, ...] each.
        expert_buffer: the tensors that experts come into, like a layer's.
    """

    def __init__(
        self, comm: Communicator, expert_weights: Sequence[Sequence[Tensor]], expert_buffer: Sequence[Tensor]
    ) -> None:
        groups = [*expert_weights, expert_buffer]
        self._comm = comm
        self._stream: Any = None
        self._exchange = comm.attempt("vLLM's communicator", lambda: self._bound(comm, groups))
        self._rows = {
            group[0].data_ptr() + row * (group[0].nbytes // group[0].shape[0]): (number, row)
            for number, group in enumerate(groups)
            for row in range(group[0].shape[0])
        }

    @staticmethod
    def _bound(comm: Communicator, groups: Sequence[Sequence[Tensor]]) -> ExpertExchange:
        """The exchange, once all ranks have bound theirs."""
        room, buffer = max(travelling_bytes(group) for group in groups), groups[-1]
        exchange = ExpertExchange(comm, room, device=buffer[0].device)
        try:
            exchange.bind(groups)
            comm.compare("vLLM's experts", {"slots": len(buffer[0])}, 300.0)
        except BaseException:
            exchange.close()
            raise
        return exchange

    @property
    def needs_profile_buffer_reservation(self) -> bool:
        """Whether vLLM runs a first exchange to have memory made; putget has made its own."""
        return False

    def set_stream(self, stream: Any) -> None:
        """Which stream `execute` works on; None: the current one."""
        self._stream = stream

    def add_send(self, tensors: list[Tensor], dst_rank: int, expert_id: int) -> None:
        """One row of each tensor of a layer, for a rank of the group."""
        self._exchange.send(*self._row(tensors), dst_rank, expert_id)

    def add_recv(self, tensors: list[Tensor], src_rank: int, expert_id: int) -> None:
        """One row of each tensor of the buffer, from a rank of the group."""
        self._exchange.receive(*self._row(tensors), src_rank, expert_id)

    def execute(self) -> None:
        """Does all of it, and waits for it."""
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            self._exchange.execute()

    def _row(self, tensors: list[Tensor]) -> tuple[int, int]:
        found = self._rows.get(tensors[0].data_ptr())
        if found is None:
            raise ValueError("vLLM moves a tensor that it did not name when it made the communicator")
        return found

    def __del__(self) -> None:
        exchange = getattr(self, "_exchange", None)
        if exchange is not None:
            exchange.close()
            self._comm.close()


def communicator_class(module: Any) -> type:
    """A communicator with vLLM's base class.

    Raises:
        BackendUnavailable: This vLLM's base class has abstract methods that putget does not know.
    """
    base = module.EplbCommunicator
    unknown = sorted(base.__abstractmethods__ - _KNOWN)
    if unknown:
        raise BackendUnavailable(f"vLLM: an EplbCommunicator has {', '.join(unknown)}, which putget does not know")
    return type("PutgetEplbCommunicator", (ExchangeRounds, base), {"__doc__": ExchangeRounds.__doc__})


def factory(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's ``create_eplb_communicator`` with putget where the ranks map each other's memory.

    Args:
        original: vLLM's function. It is called for elastic groups, and where putget cannot carry the experts: the log
            says why.

    Raises:
        BackendUnavailable: This vLLM has other names or arguments than putget knows.
    """
    module = importlib.import_module(original.__module__)
    require_names("vLLM", module, _NEEDED)
    kind = communicator_class(module)
    log = logging.getLogger("vllm.putget")

    def create_eplb_communicator(group_coordinator: Any, backend: Any, expert_weights: Any, expert_buffer: Any) -> Any:
        if not isinstance(group_coordinator, module.StatelessGroupCoordinator) and expert_weights:
            comm = Communicator(group_coordinator.cpu_group)
            try:
                found = kind(comm, expert_weights, expert_buffer)
            except (PutgetError, ValueError) as error:
                comm.close()
                log.warning("vLLM's own communicator moves experts: %s", error)
            else:
                announce_mover("vllm", comm.size)
                return found
        return original(group_coordinator, backend, expert_weights, expert_buffer)

    require_arguments("vLLM", original, create_eplb_communicator)
    return create_eplb_communicator
