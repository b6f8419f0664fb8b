"""Eager calls of a layer as CUDA graphs that it captures by itself, so that a call costs the host three launches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from putget.memory.workspace import Workspace

# A call with these tokens, of which num_valid_tokens count, and the most tokens of a rank; its result.
Run = Callable[[Tensor, Tensor, int | None], Tensor]


class _Memory:
    """Inputs and graphs' memory, shared by the layers on one workspace: their calls follow one another."""

    def __init__(self, device: torch.device) -> None:
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
    valid_now: int = -1  # the number that the host wrote there last; -1: another tensor's value came after it
    graph: Any = None
    result: Tensor | None = None
    weights: tuple[tuple[dict[str, Any], str, int], ...] = ()  # where each parameter was when the graph was captured

    def is_current(self) -> bool:
        """Whether all parameters are where they were: a graph knows addresses."""
        return all(held[name].data_ptr() == at for held, name, at in self.weights)


class Replays:
    """The graphs of one layer: one for each power of two of tokens, and of the busiest rank's where that is given.

    The first call of a size runs as it is, on inputs that stay; the second one is captured; from then on a call copies
    its tokens there, replays, and copies the result. Tokens above the batch are padding.

    Args:
        run: The layer.
        begin: Called before each replay, as run begins each call.
        modules: Those whose parameters the layer reads.
        workspace: Its workspace.
        largest: Most tokens of a call that is replayed.
        hidden_size: Elements of a token.
        device: A CUDA device.
    """

    def __init__(
        self,
        run: Run,
        begin: Callable[[], None],
        modules: Iterable[nn.Module],
        workspace: Workspace,
        largest: int,
        hidden_size: int,
        device: torch.device,
    ) -> None:
        self._run, self._begin = run, begin
        self._modules = [part for module in modules for part in module.modules()]
        self._workspace, self._largest, self._hidden_size, self._device = workspace, largest, hidden_size, device
        self._sizes: dict[tuple[int, int | None], _Size] = {}

    def takes(self, num_tokens: int) -> bool:
        """Whether a call with so many tokens is replayed: not inside of a graph that somebody else captures."""
        return 0 < num_tokens <= self._largest and not torch.cuda.is_current_stream_capturing()

    def forget(self) -> None:
        """Drops all graphs: something that they hold is no longer what calls use."""
        self._sizes.clear()

    def __call__(self, x: Tensor, num_valid_tokens: Tensor | None, busiest_tokens: int | None) -> Tensor:
        """The layer's result for checked x."""
        num_tokens = x.shape[0]
        tokens = min(_power_of_two(num_tokens), self._largest)
        busiest = None if busiest_tokens is None else max(tokens, _power_of_two(busiest_tokens))
        key = tokens, busiest
        size = self._sizes.get(key)
        if size is None or not size.is_current():
            size = self._sizes[key] = self._make(tokens)
            self._fill(size, x, num_valid_tokens)
            return self._run(size.x, size.valid, busiest)[:num_tokens]
        if size.graph is None:
            capture = _memories[self._workspace].capture
            size.graph, size.result = capture(lambda: self._run(size.x, size.valid, busiest))
        else:
            self._begin()
        self._fill(size, x, num_valid_tokens)
        self._workspace.raise_fault()
        size.graph.replay()
        assert size.result is not None
        return size.result[:num_tokens].clone()

    def _make(self, tokens: int) -> _Size:
        memory = _memories.get(self._workspace)
        if memory is None:
            memory = _memories[self._workspace] = _Memory(self._device)
        # A tensor of inference mode could not be written outside of it.
        with torch.inference_mode(False):
            x = memory.input(tokens, self._hidden_size, self._device)
            size = _Size(x, torch.zeros(1, dtype=torch.int32, device=self._device))
        size.weights = tuple(
            (module._parameters, name, parameter.data_ptr())
            for module in self._modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        )
        return size

    def _fill(self, size: _Size, x: Tensor, num_valid_tokens: Tensor | None) -> None:
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
