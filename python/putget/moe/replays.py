"""Eager calls of a layer as CUDA graphs that it captures by itself, so that a call costs the host three launches."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from putget.alltoall import AllToAll
from putget.memory.workspace import Workspace
from putget.moe.lost import LostExperts


class Layer(Protocol):
    """The part of a layer that replays need; see ``ExpertParallelMoE``."""

    a2a: AllToAll
    router: Any
    experts: Any
    shared: Any
    grouped_memory: Any
    device: torch.device
    hidden_size: int
    max_tokens_per_rank: int

    def run(self, x: Tensor, num_valid_tokens: Tensor | None, busiest_tokens: int | None) -> Tensor:
        """A call as it is."""


class _Memory:
    """Inputs and graphs' memory, shared by the layers on one workspace: their calls follow one another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inputs: dict[int, Tensor] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # torch gives a pool up with its last graph, and then takes its name for a mistake. So one graph stays.
        word = torch.zeros(1, device=device)
        self._keeper = self.capture(word.zero_)[0]

    def input(self, tokens: int, hidden_size: int, device: torch.device) -> Tensor:
        """[tokens, hidden_size] bfloat16, zeros at first."""
        held = self._inputs.get(hidden_size)
        if held is None or len(held) < tokens:
            # Graphs that were captured with the smaller one keep it.
            held = self._inputs[hidden_size] = torch.zeros(tokens, hidden_size, dtype=torch.bfloat16, device=device)
        return held[:tokens]

    def capture(self, work: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        """The graph of some work, and its result."""
        with torch.cuda.device(self._device):
            graph = torch.cuda.CUDAGraph()
            # The mode of one thread: what others do meanwhile does not end the capture.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                result = work()
        return graph, result


_memories: weakref.WeakKeyDictionary[Workspace, _Memory] = weakref.WeakKeyDictionary()


@dataclass
class _Size:
    """Calls with up to so many tokens: their inputs and, from the second call on, their graph."""

    x: Tensor
    valid: Tensor  # one int32
    held: _Held
    valid_now: int = -1  # the number that the host wrote there last; -1: another tensor's value came after it
    graph: Any = None
    result: Tensor | None = None


class _Held:
    """The layer's parts, and where their parameters lie: a graph counts on that."""

    def __init__(self, layer: Layer) -> None:
        self._parts = _parts_of(layer)
        modules = [module for part in self._parts if isinstance(part, nn.Module) for module in part.modules()]
        self._addresses = [
            (module._parameters, name, None if parameter is None else parameter.data_ptr())
            for module in modules
            for name, parameter in module._parameters.items()
        ]
        self._counts = [(module._parameters, len(module._parameters)) for module in modules]

    def is_current(self, layer: Layer) -> bool:
        """Whether all is as it was."""
        if any(now is not before for now, before in zip(_parts_of(layer), self._parts, strict=True)):
            return False
        if any(len(parameters) != count for parameters, count in self._counts):
            return False
        for parameters, name, address in self._addresses:
            parameter = parameters.get(name)
            if (None if parameter is None else parameter.data_ptr()) != address:
                return False
        return True


def _parts_of(layer: Layer) -> tuple[object, ...]:
    return layer.router, layer.experts, layer.shared, layer.grouped_memory


class Replays:
    """The graphs of one layer: one for each power of two of tokens, and of the busiest rank's where that is given.

    The first call of a size runs as it is, on inputs that stay; the second one is captured; from then on a call copies
    its tokens there, replays, and copies the result. Tokens above the batch are padding.

    Args:
        layer: On a CUDA device.
        lost: Its lost experts.
        largest: Most tokens of a call that is replayed.
    """

    def __init__(self, layer: Layer, lost: LostExperts, largest: int) -> None:
        self._layer, self._lost, self._largest = weakref.ref(layer), lost, largest
        self._device = layer.device
        self._sizes: dict[tuple[int, int | None], _Size] = {}

    def takes(self, num_tokens: int) -> bool:
        """Whether a call with so many tokens is replayed.

        It is not inside of a graph that somebody else captures, nor where another device is the current one.
        """
        if not 0 < num_tokens <= self._largest or torch.cuda.is_current_stream_capturing():
            return False
        return torch.cuda.current_device() == self._device.index

    def forget(self) -> None:
        """Drops all graphs: something that they hold is no longer what calls use."""
        self._sizes.clear()

    def __call__(self, x: Tensor, num_valid_tokens: Tensor | None, busiest_tokens: int | None) -> Tensor:
        """The layer's result for checked x.

        Raises:
            As a call of the layer: before anything is enqueued.
        """
        layer = self._layer()
        assert layer is not None  # it holds this object
        num_tokens = x.shape[0]
        tokens = min(_power_of_two(num_tokens), self._largest)
        busiest = busiest_tokens
        if busiest is not None:
            busiest = min(max(tokens, _power_of_two(busiest)), layer.max_tokens_per_rank)
        size = self._sizes.get((tokens, busiest))
        if size is not None and not size.held.is_current(layer):
            del self._sizes[tokens, busiest]
            size = None
        if size is None:
            size = _make(layer, tokens)
            _fill(size, x, num_valid_tokens)
            result = layer.run(size.x, size.valid, busiest)
            self._sizes[tokens, busiest] = size
            return result[:num_tokens]
        if size.graph is None:
            # Whatever is refused is refused here: no capture is broken off.
            torch.cuda.synchronize(layer.device)
            layer.a2a.require_ready()
            self._lost.require()
            capture = _memory_of(layer).capture
            size.graph, size.result = capture(lambda: layer.run(size.x, size.valid, busiest))
        else:
            self._lost.begin_round()
        layer.a2a.require_ready()
        _fill(size, x, num_valid_tokens)
        size.graph.replay()
        assert size.result is not None
        return size.result[:num_tokens].clone()


def _memory_of(layer: Layer) -> _Memory:
    workspace = layer.a2a.workspace
    memory = _memories.get(workspace)
    if memory is None:
        memory = _memories[workspace] = _Memory(layer.device)
    return memory


def _make(layer: Layer, tokens: int) -> _Size:
    # A tensor of inference mode could not be written outside of it.
    with torch.inference_mode(False):
        x = _memory_of(layer).input(tokens, layer.hidden_size, layer.device)
        return _Size(x, torch.zeros(1, dtype=torch.int32, device=layer.device), _Held(layer))


def _fill(size: _Size, x: Tensor, num_valid_tokens: Tensor | None) -> None:
    num_tokens = x.shape[0]
    size.x[:num_tokens].copy_(x)
    if num_valid_tokens is not None:
        torch.clamp(num_valid_tokens.view(1), max=num_tokens, out=size.valid)
        size.valid_now = -1
    elif size.valid_now != num_tokens:
        size.valid.fill_(num_tokens)
        size.valid_now = num_tokens


def _power_of_two(number: int) -> int:
    """The smallest one that is not below number."""
    return 1 << (number - 1).bit_length() if number else 0
