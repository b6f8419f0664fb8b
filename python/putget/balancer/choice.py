"""Which replica of its expert a token uses: from logical expert ids to slots, in front of dispatch."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from putget import _abi, _abi_balancer
from putget._arguments import as_count, as_kind, check_tensor, shown
from putget.balancer.placement import Placement
from putget.memory.workspace import current_stream, resolve_device

CHOICES = _abi_balancer.CHOICES
BY_PAIR = CHOICES[:3]
"""Ways that look at one (token, choice) pair alone."""
_IDS = (torch.int32, torch.int64)


class ReplicaChoice:
    """Maps the expert ids of one layer to slots, which are what `putget.AllToAll` takes as expert ids.

    | how | takes |
    |---|---|
    | ``nearest`` | a replica on the own rank, or else on the own node, or else any; of several, by rank |
    | ``round_robin`` | replicas in turns, by token |
    | ``hash`` | by a hash of token, choice, rank and `seed` |
    | ``balanced`` | counts the batch's ids, and shares them out so that the largest load of a rank is small |
    | ``activated`` | one replica of each expert of the batch, so that no rank has many experts to read |

    ``balanced`` and ``activated`` know the ids of one call alone. If each rank chooses for its own tokens, each evens
    out what it sends; ``activated`` breaks ties alike on every rank. The same arguments give the same slots, on the CPU
    and on a GPU. On a GPU a call enqueues one kernel, and can be captured in a CUDA graph.

    Args:
        placement: where experts lie.
        layer: which of the placement's layers.
        how: see above.
        ep_size: number of ranks.
        ep_rank: the rank that chooses.
        ranks_per_node: ranks of a host, which are consecutive; all ranks if None.
        device: where ids and tables are: "cpu", "cuda" or "cuda:N".
        max_replicas: the most slots of an expert that a later placement may have; as many as fit if None.

    Attributes:
        tables: int32 on the device: what a call looks up, when it runs. `set_placement` writes it.
        device: see above.

    Raises:
        ValueError: An argument is out of range.
        BackendUnavailable: CUDA is asked for and not there.
    """

    def __init__(
        self,
        placement: Placement,
        layer: int = 0,
        *,
        how: str = "balanced",
        ep_size: int,
        ep_rank: int = 0,
        ranks_per_node: int | None = None,
        device: str | torch.device = "cpu",
        max_replicas: int | None = None,
    ) -> None:
        if not isinstance(how, str) or how not in CHOICES:
            raise ValueError(f"how is {shown(how)}, allowed are {', '.join(CHOICES)}")
        as_kind("placement", placement, Placement)
        self.ep_size = as_count("ep_size", ep_size, 1, _abi_balancer.MAX_GPUS)
        if placement.num_replicas % self.ep_size:
            raise ValueError(f"ep_size is {self.ep_size}, which does not divide {placement.num_replicas} slots")
        self.ep_rank = as_count("ep_rank", ep_rank, 0, self.ep_size - 1)
        most = placement.num_replicas - placement.num_experts + 1
        self._ranks_per_node = (
            self.ep_size if ranks_per_node is None else as_count("ranks_per_node", ranks_per_node, 1, self.ep_size)
        )
        self.max_replicas = most if max_replicas is None else as_count("max_replicas", max_replicas, 1, most)
        self.how = how
        self.device = resolve_device(device)
        self.num_experts = placement.num_experts
        self.num_slots = placement.num_replicas
        self.tables = self.tables_of(placement, layer).to(self.device)
        self._args = self._make_args()

    def set_placement(self, placement: Placement, layer: int = 0) -> None:
        """Another placement of the same sizes, from the next call on; on a GPU, in the current stream's order.

        Captured graphs obey it when they are replayed next. The weights are the caller's affair: the slots must hold
        their new experts by then, and every rank must change between the same two rounds.

        Args:
            placement: where experts lie now.
            layer: which of its layers.

        Raises:
            ValueError: The placement has other sizes, or more than max_replicas slots for an expert; the old one stays.
        """
        self.tables.copy_(self.tables_of(placement, layer))

    def tables_of(self, placement: Placement, layer: int = 0) -> Tensor:
        """The content of `tables` with another placement, on the CPU: for callers that write it themselves.

        Raises:
            ValueError: As for `set_placement`.
        """
        as_kind("placement", placement, Placement)
        found = (placement.num_experts, placement.num_replicas)
        if found != (self.num_experts, self.num_slots):
            raise ValueError(
                f"placement has {found[0]} experts and {found[1]} slots; "
                f"the one in force has {self.num_experts} and {self.num_slots}"
            )
        layer = as_count("layer", layer, 0, placement.num_layers - 1)
        experts = np.ascontiguousarray(placement.physical_to_logical[layer])
        words = _abi.library().putget_replicas_words(self.num_experts, self.max_replicas)
        tables = torch.empty(words, dtype=torch.int32)
        args = _abi_balancer.ReplicasArgs(
            num_experts=self.num_experts,
            width=self.max_replicas,
            num_ranks=self.ep_size,
            slots_per_rank=self.num_slots // self.ep_size,
            rank=self.ep_rank,
            ranks_per_node=self._ranks_per_node,
            physical_to_logical=experts.ctypes.data,
            tables=tables.data_ptr(),
        )
        _abi.call("putget_replicas", ctypes.byref(args))
        return tables

    def __call__(
        self,
        topk_ids: Tensor,
        *,
        out: Tensor | None = None,
        seed: int | Tensor = 0,
        num_valid_tokens: Tensor | None = None,
    ) -> Tensor:
        """Chooses for one batch.

        Args:
            topk_ids: int32 or int64 [num_tokens, top_k] on the device, contiguous: experts of the layer. -1, and what
                is out of range, gives -1.
            out: where the slots go, like `topk_ids` and apart from it; a new tensor if None.
            seed: for ``hash``; another one mixes otherwise. Below 2^31; or one int32 on the device, read when the call
                runs.
            num_valid_tokens: one int32 on the device: tokens from there on are padding, whose slots are -1.

        Returns:
            Slots, of the shape and type of `topk_ids`.

        Raises:
            ValueError: A tensor has another type, shape, place or layout; the message names it.
        """
        self._require("topk_ids", topk_ids)
        if out is None:
            out = torch.empty_like(topk_ids)
        self._require("out", out)
        if out.shape != topk_ids.shape or out.dtype != topk_ids.dtype:
            raise ValueError(
                f"out is {out.dtype} {list(out.shape)}; topk_ids is {topk_ids.dtype} {list(topk_ids.shape)}"
            )
        word = None
        if isinstance(seed, Tensor):
            word = check_tensor("seed", seed, (1,), (torch.int32,), self.device).data_ptr()
            seed = 0
        else:
            seed = as_count("seed", seed, 0, (1 << 31) - 1)
        if num_valid_tokens is not None:
            check_tensor("num_valid_tokens", num_valid_tokens, (1,), (torch.int32,), self.device)
        args = self._args
        args.num_tokens, args.top_k = topk_ids.shape
        args.ids_are_64bit = int(topk_ids.dtype == torch.int64)
        args.topk_ids, args.out = topk_ids.data_ptr(), out.data_ptr()
        args.seed, args.seed_word = seed, word
        args.num_valid_tokens = None if num_valid_tokens is None else num_valid_tokens.data_ptr()
        args.stream = current_stream(self.device)
        _abi.call("putget_choose", ctypes.byref(args))
        return out

    def _make_args(self) -> _abi_balancer.ChooseArgs:
        kind = _abi.DEVICE_CPU if self.device.type == "cpu" else _abi.DEVICE_CUDA
        how = CHOICES.index(self.how)
        words = _abi.library().putget_choose_words(kind, how, self.num_experts, self.max_replicas, self.ep_size)
        self._memory = torch.empty(words, dtype=torch.int32, device=self.device)
        return _abi_balancer.ChooseArgs(
            device=kind,
            ordinal=self.device.index or 0,
            how=how,
            num_experts=self.num_experts,
            width=self.max_replicas,
            num_ranks=self.ep_size,
            slots_per_rank=self.num_slots // self.ep_size,
            rank=self.ep_rank,
            tables=self.tables.data_ptr(),
            memory=self._memory.data_ptr() if words else None,
        )

    def _require(self, name: str, ids: Tensor) -> None:
        if not isinstance(ids, Tensor):
            raise ValueError(f"{name} is {shown(ids)}, expected a tensor")
        is_table = ids.dim() == 2 and ids.dtype in _IDS and ids.is_contiguous()
        if not is_table or ids.device != self.device:
            raise ValueError(
                f"{name} is {ids.dtype} {list(ids.shape)} on {ids.device}"
                f"{'' if ids.is_contiguous() else ', not contiguous'}; "
                f"it must be a contiguous int32 or int64 [num_tokens, top_k] on {self.device}"
            )
