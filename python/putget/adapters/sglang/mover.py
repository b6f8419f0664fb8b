"""SGLang's ``--enable-eplb`` moves experts through putget: ``update_expert_weights_single_layer`` on landing areas."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from putget import Communicator, PutgetError
from putget.adapters.engines import announce_mover, require_arguments
from putget.balancer import ExpertExchange, travelling_bytes

MODULE = "sglang.srt.eplb.expert_location_updater"
NAME = "update_expert_weights_single_layer"
_ELASTIC = "sglang.srt.elastic_ep.elastic_ep"


@dataclass(frozen=True)
class Transfer:
    """An expert that comes from another rank: its number, and the slots, counted over all ranks."""

    expert: int
    src_slot: int
    dst_slot: int


def transfers(old: Sequence[int], new: Sequence[int], each: int) -> list[Transfer]:
    """The experts that ranks must get from each other: the same list on every rank.

    A rank gets an expert once, into the first slot that wants it, and only if none of its slots has it. Of several
    ranks that have it, the one that gives the fewest experts so far gives it.

    Args:
        old: the expert of each slot.
        new: the wanted one; -1 wants none.
        each: slots of a rank.
    """
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(old):
        holders.setdefault(expert, []).append(slot)
    gives = [0] * (len(old) // each)
    found = []
    for rank in range(len(gives)):
        own = range(rank * each, (rank + 1) * each)
        has = {old[slot] for slot in own}
        for slot in own:
            expert = new[slot]
            if expert < 0 or expert in has:
                continue
            if expert not in holders:
                raise ValueError(f"no slot has expert {expert}, which slot {slot} shall get")
            src = min(holders[expert], key=lambda held: (gives[held // each], held))
            gives[src // each] += 1
            has.add(expert)
            found.append(Transfer(expert, src, slot))
    return found


class LayerMover:
    """Moves the experts of a layer; the landing areas are made at the first call, and again for larger experts."""

    def __init__(self) -> None:
        self._comm: Communicator | None = None
        self._exchange: ExpertExchange | None = None
        self._is_refused = False

    def move(
        self, weights: Sequence[Tensor], room: Sequence[Tensor], old: Sequence[int], new: Sequence[int], rank: int
    ) -> None:
        """Has this rank's slots hold the new experts. Collective over all ranks.

        Args:
            weights: the layer's tensors, [slots of a rank, ...].
            room: tensors like them, whose content does not matter.
            old: the expert of each slot of all ranks.
            new: the wanted one.
            rank: this rank.
        """
        each = weights[0].shape[0]
        exchange = self._exchange
        assert exchange is not None  # can_move has made it
        exchange.bind([weights, room])
        mine = range(rank * each, (rank + 1) * each)
        for one in transfers(old, new, each):
            if one.src_slot in mine:
                exchange.send(0, one.src_slot % each, one.dst_slot // each, one.expert)
            if one.dst_slot in mine:
                exchange.receive(1, one.dst_slot % each, one.src_slot // each, one.expert)
        for slot in mine:  # on this rank
            if new[slot] != old[slot] and new[slot] in old[mine.start : mine.stop]:
                source = old.index(new[slot], mine.start, mine.stop)
                for tensor, place in zip(weights, room, strict=True):
                    place[slot % each].copy_(tensor[source % each])
        exchange.execute()
        for slot in mine:
            if new[slot] != old[slot] and new[slot] >= 0:
                here = new[slot] in old[mine.start : mine.stop]
                source = slot if here else new.index(new[slot], mine.start, mine.stop)
                for tensor, place in zip(weights, room, strict=True):
                    tensor[slot % each].copy_(place[source % each])

    def can_move(self, weights: Sequence[Tensor], room: Sequence[Tensor], num_ranks: int, rank: int) -> bool:
        """Whether such experts can move here, the same on all ranks; makes what it takes. Collective over all ranks.

        What cannot be had is not asked for again: the log says why.
        """
        whole_words = all(tensor.is_contiguous() and tensor[0].nbytes % 4 == 0 for tensor in (*weights, *room))
        if self._is_refused or not whole_words:
            return False
        if (torch.distributed.get_world_size(), torch.distributed.get_rank()) != (num_ranks, rank):
            return False
        needed = travelling_bytes(weights)
        if self._exchange is not None and self._exchange.expert_bytes >= needed:
            return True
        try:
            if self._comm is None:
                self._comm = Communicator(torch.distributed.group.WORLD)
            if self._exchange is not None:
                self._exchange.close()
            self._exchange = ExpertExchange(self._comm, needed, device=weights[0].device)
        except (PutgetError, ValueError) as error:
            self._is_refused = True
            logging.getLogger("sglang.putget").warning("SGLang itself moves experts: %s", error)
            return False
        announce_mover("sglang", num_ranks)
        return True


def mover(original: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's ``update_expert_weights_single_layer`` on putget.

    Args:
        original: SGLang's own one. It is called for several hosts, elastic groups, and where its logs are asked for.

    Raises:
        BackendUnavailable: It takes arguments that putget does not know.
    """
    layers = LayerMover()

    def update_expert_weights_single_layer(
        routed_experts_weights: list[Tensor],
        temp_buffers: list[Tensor],
        old_physical_to_logical_map: list[int],
        new_physical_to_logical_map: list[int],
        num_local_physical_experts: int,
        num_gpu_per_node: int,
        rank: int,
        world_size: int | None = None,
        missing_logical_experts_info: list[int] | None = None,
        debug: bool = False,
        log_metrics: bool = False,
    ) -> Any:
        num_ranks = len(old_physical_to_logical_map) // num_local_physical_experts
        elastic = importlib.import_module(_ELASTIC).ElasticEPStateManager.instance()
        is_ours = num_gpu_per_node >= num_ranks and elastic is None and not debug and not log_metrics
        if not is_ours or not layers.can_move(routed_experts_weights, temp_buffers, num_ranks, rank):
            return original(
                routed_experts_weights,
                temp_buffers,
                old_physical_to_logical_map,
                new_physical_to_logical_map,
                num_local_physical_experts,
                num_gpu_per_node,
                rank,
                world_size,
                missing_logical_experts_info,
                debug,
                log_metrics,
            )
        layers.move(
            routed_experts_weights, temp_buffers, old_physical_to_logical_map, new_physical_to_logical_map, rank
        )
        return None

    require_arguments("SGLang", original, update_expert_weights_single_layer)
    return update_expert_weights_single_layer
