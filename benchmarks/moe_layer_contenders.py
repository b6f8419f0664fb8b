"""The layer with its rows moved in several ways. Router, grouping, experts and shared experts are the same in all."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from putget import Payload
from putget.core.expert_major import ExpertMajor, FlatRows, Grouper
from putget.core.geometry import Geometry
from putget.moe import ExpertParallelMoE
from putget.moe.streams import Beside
from putget_bench.launch import Emit
from putget_bench.peers.collectives import all_gather, as_bytes, reduce_scatter
from putget_bench.profiles import dispatch_row_bytes


class ChosenLayer(ExpertParallelMoE):
    """A layer that is told which experts its tokens have.

    Attributes:
        chosen: ids and weights [num_tokens, top_k]; None: its router chooses.
        busiest_tokens: as ``forward`` takes them.
    """

    chosen: tuple[Tensor, Tensor] | None = None
    busiest_tokens: int | None = None

    def route(self, x: Tensor, num_valid_tokens: Tensor | None = None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """See ``ExpertParallelMoE.route``."""
        if self.chosen is None:
            return super().route(x, num_valid_tokens)
        return *self.chosen, self.experts.prepare(x)


class Contender(Protocol):
    """One way to move rows.

    Attributes:
        name: in the report.
    """

    name: str

    def run(self, x: Tensor) -> Tensor:
        """The layer: [num_tokens, hidden] to the same."""

    def close(self) -> None:
        """Gives everything back."""


def make_contenders(layer: ChosenLayer, peers: tuple[str, ...], emit: Emit) -> list[Contender]:
    """putget, where there are shared experts in two ways, and the peers that are there. Collective."""
    made: list[Contender] = [Putget("putget", layer, overlap_shared=True)]
    if layer.shared is not None:
        made.append(Putget("putget, one after the other", layer, overlap_shared=False))
    for name in peers:
        try:
            contender: Contender | None = {"nccl": Gather, "flashinfer": FlashInfer}[name](layer)
            text = ""
        except (ImportError, ValueError, RuntimeError) as error:
            contender, text = None, f"{name} is left out: {error}"
        everyone = [text] * dist.get_world_size()
        dist.all_gather_object(everyone, text)
        if any(everyone):
            emit({"kind": "skipped", "text": next(filter(None, everyone))})
        elif contender is not None:
            made.append(contender)
    return made


class Putget:
    """``ExpertParallelMoE`` as it is."""

    def __init__(self, name: str, layer: ChosenLayer, *, overlap_shared: bool) -> None:
        self.name = name
        self._layer = layer
        self._overlap_shared = overlap_shared

    def run(self, x: Tensor) -> Tensor:
        """See ``Contender.run``."""
        self._layer.overlap_shared = self._overlap_shared
        out: Tensor = self._layer(x, busiest_tokens=self._layer.busiest_tokens)
        return out

    def close(self) -> None:
        """See ``Contender.close``: the layer is the caller's."""


class _Grouped:
    """putget's kernels that group rows by expert and sum what experts made of them, for rows that others have moved."""

    def __init__(self, layer: ExpertParallelMoE, num_rows: int) -> None:
        payloads = layer.experts.payloads()
        output = Payload((layer.hidden_size,), torch.bfloat16)
        geometry = Geometry.checked(1, layer.num_experts, layer.top_k, num_rows, payloads, output)
        # To one rank of one: every other expert belongs to nobody here.
        here = torch.full((layer.num_experts,), -1, dtype=torch.int32, device=layer.device)
        here[layer.local_experts] = 0
        count = torch.full((1,), num_rows, dtype=torch.int32, device=layer.device)
        self._grouper = Grouper(geometry, 0, here, count)
        self._grouper.begin()
        self._memory = self._grouper.memory_for(1, num_rows, None)
        self._payloads = payloads

    def group(self, rows: list[Tensor], ids: Tensor, weights: Tensor) -> ExpertMajor:
        """Rows as bytes [num_rows, row_bytes], their ids and weights [num_rows, top_k]."""
        typed = [part.view(kind.dtype).view(-1, *kind.shape) for part, kind in zip(rows, self._payloads, strict=True)]
        flat = FlatRows(tuple(typed), ids, weights)
        return self._grouper.group(flat, typed[0], self._memory)

    def finalize(self, rows: Tensor, grouped: ExpertMajor, out: Tensor) -> None:
        """Writes the weighted sum of each row's local experts."""
        self._grouper.finalize(rows, grouped, out)


class Gather:
    """All-gather of every token's rows, scales, ids and weights in one call; reduce-scatter of partial sums.

    The shared experts run on a second stream meanwhile, as they do for putget.
    """

    def __init__(self, layer: ExpertParallelMoE) -> None:
        self._is_nccl = layer.device.type == "cuda"
        self.name = "NCCL all-gather + reduce-scatter" if self._is_nccl else "gloo all-gather + reduce-scatter"
        self._group: Any = dist.new_group(backend="nccl" if self._is_nccl else "gloo")
        self._layer = layer
        self._size = dist.get_world_size()
        self._beside = Beside(layer.device)
        self._by_batch: dict[int, tuple[_Grouped, list[Tensor], Tensor, Tensor]] = {}

    def run(self, x: Tensor) -> Tensor:
        """See ``Contender.run``."""
        layer = self._layer
        ids, weights, payloads = layer.route(x)
        sent = [as_bytes(part) for part in (*payloads, ids, weights)]
        grouping, gathered, partial, out = self._memory_for(x, sent)
        self._beside.fork()
        with self._beside.on_it():
            addend = layer.run_shared(payloads)
        if self._is_nccl:
            with _coalescing_manager(group=self._group, device=x.device):
                self._gather(gathered, sent)
        else:
            self._gather(gathered, sent)
        *rows, all_ids, all_weights = gathered
        grouped = grouping.group(rows, all_ids.view(torch.int32), all_weights.view(torch.float32))
        grouping.finalize(layer.run_experts(grouped, len(x)), grouped, partial)
        reduce_scatter(out, partial, group=self._group)
        self._beside.join()
        return out + addend if addend is not None else out

    def _gather(self, gathered: list[Tensor], sent: list[Tensor]) -> None:
        for everybody, mine in zip(gathered, sent, strict=True):
            all_gather(everybody, mine, group=self._group)

    def _memory_for(self, x: Tensor, sent: list[Tensor]) -> tuple[_Grouped, list[Tensor], Tensor, Tensor]:
        if len(x) not in self._by_batch:
            rows = self._size * len(x)
            gathered = [part.new_empty(rows, part.shape[1]) for part in sent]
            partial = x.new_empty(rows, x.shape[1])
            self._by_batch = {len(x): (_Grouped(self._layer, rows), gathered, partial, torch.empty_like(x))}
        return self._by_batch[len(x)]

    def close(self) -> None:
        """See ``Contender.close``."""
        self._by_batch.clear()


class FlashInfer:
    """FlashInfer's ``MoeAlltoAll``; experts' sums are written into its workspace.

    The shared experts run on a second stream meanwhile, as they do for putget.
    """

    def __init__(self, layer: ExpertParallelMoE) -> None:
        if layer.device.type != "cuda":
            raise ValueError("it needs GPUs")
        peer: Any = importlib.import_module("putget_bench.peers.flashinfer")
        payloads = layer.experts.payloads()
        self._all_to_all = peer.connect(
            ep_size=dist.get_world_size(),
            max_tokens_per_rank=layer.max_tokens_per_rank,
            top_k=layer.top_k,
            num_experts=layer.num_experts,
            dispatch_row_bytes=dispatch_row_bytes(payloads, layer.top_k),
            combine_row_bytes=2 * layer.hidden_size,
        )
        self.name = "FlashInfer"
        self._layer = layer
        self._size = dist.get_world_size()
        self._beside = Beside(layer.device)
        self._by_batch: dict[int, tuple[_Grouped, Tensor]] = {}

    def run(self, x: Tensor) -> Tensor:
        """See ``Contender.run``."""
        layer = self._layer
        ids, weights, payloads = layer.route(x)
        if len(x) not in self._by_batch:
            self._by_batch = {len(x): (_Grouped(layer, self._size * len(x)), torch.empty_like(x))}
        grouping, out = self._by_batch[len(x)]
        sent = [*map(as_bytes, payloads), ids, weights]
        self._beside.fork()
        with self._beside.on_it():
            addend = layer.run_shared(payloads)
        *rows, all_ids, all_weights = self._all_to_all.dispatch(
            ids, sent, len(x), invalid_token_expert_id=-1, expert_id_payload_index=len(sent) - 2
        )
        flat = [part.reshape(self._size * len(x), -1) for part in (*rows, all_ids, all_weights)]
        grouped = grouping.group(flat[:-2], flat[-2], flat[-1])
        results = layer.run_experts(grouped, len(x))
        back = self._all_to_all.get_combine_payload_tensor_in_workspace(len(x), layer.hidden_size, torch.bfloat16)
        grouping.finalize(results, grouped, back)
        self._all_to_all.combine(back, len(x), payload_in_workspace=True, output=out)
        self._beside.join()
        return out + addend if addend is not None else out

    def close(self) -> None:
        """See ``Contender.close``. FlashInfer keeps its workspaces."""
        self._by_batch.clear()
