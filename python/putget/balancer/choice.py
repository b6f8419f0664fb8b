"""Which replica of its expert a token uses: from logical expert ids to slots, in front of dispatch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from putget import _abi, _abi_balancer
from putget.balancer.placement import Placement

CHOICES = _abi_balancer.CHOICES


class ReplicaChoice:
    """Maps the expert ids of one layer to slots, which are what `putget.AllToAll` takes as expert ids.

    | how | takes |
    |---|---|
    | ``nearest`` | a replica on the own rank, or else on the own node, or else any; of several, by rank |
    | ``round_robin`` | replicas in turns, by token |
    | ``hash`` | by a hash of token, choice, rank and `seed` |
    | ``balanced`` | counts the batch's ids, and shares them out so that the largest load of a rank is small |

    ``balanced`` knows the ids of one call alone. Where each rank chooses for its own tokens, each evens out what it
    sends. Choices are the same for the same arguments. The ids are on the CPU: there is no CUDA kernel for this yet.

    Args:
        placement: where experts lie.
        layer: which of the placement's layers.
        how: see above.
        ep_size: number of ranks.
        ep_rank: the rank that chooses.
        ranks_per_node: ranks of a host, which are consecutive; all ranks if None.

    Raises:
        ValueError: An argument is out of range.
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
    ) -> None:
        if how not in CHOICES:
            raise ValueError(f"how is {how!r}, allowed are {', '.join(CHOICES)}")
        if not 0 <= layer < placement.num_layers:
            raise ValueError(f"layer is {layer}, allowed are 0 to {placement.num_layers - 1}")
        if ep_size < 1 or placement.num_replicas % ep_size:
            raise ValueError(f"ep_size is {ep_size}, which does not divide {placement.num_replicas} slots")
        if not 0 <= ep_rank < ep_size:
            raise ValueError(f"ep_rank is {ep_rank}, allowed are 0 to {ep_size - 1}")
        if ranks_per_node is not None and not 1 <= ranks_per_node <= ep_size:
            raise ValueError(f"ranks_per_node is {ranks_per_node}, allowed are 1 to {ep_size}")
        self._slots = torch.from_numpy(placement.logical_to_physical[layer].copy())
        self._counts = torch.from_numpy(placement.replica_count[layer].copy())
        self._seed = torch.zeros(1, dtype=torch.int32)
        num_experts, width = self._slots.shape
        words = _abi.library().putget_choose_words(num_experts, width, ep_size)
        self._memory = torch.empty(words, dtype=torch.int32)
        self._args = _abi_balancer.ChooseArgs(
            device=_abi.DEVICE_CPU,
            how=CHOICES.index(how),
            num_experts=num_experts,
            width=width,
            num_ranks=ep_size,
            slots_per_rank=placement.num_replicas // ep_size,
            rank=ep_rank,
            ranks_per_node=ranks_per_node or ep_size,
            slots=self._slots.data_ptr(),
            counts=self._counts.data_ptr(),
            seed=self._seed.data_ptr(),
            memory=self._memory.data_ptr(),
        )

    def __call__(self, topk_ids: Tensor, *, out: Tensor | None = None, seed: int = 0) -> Tensor:
        """Chooses for one batch.

        Args:
            topk_ids: int32 or int64 [num_tokens, top_k] on the CPU, contiguous: experts of the layer. -1, and what is
                out of range, gives -1.
            out: where the slots go, like `topk_ids` and apart from it; a new tensor if None.
            seed: for ``hash``; another one mixes otherwise. Below 2^31.

        Returns:
            Slots, of the shape and type of `topk_ids`.

        Raises:
            ValueError: A tensor has another type, shape, place or layout; the message names it.
        """
        _require("topk_ids", topk_ids)
        if out is None:
            out = torch.empty_like(topk_ids)
        _require("out", out)
        if out.shape != topk_ids.shape or out.dtype != topk_ids.dtype:
            raise ValueError(
                f"out is {out.dtype} {list(out.shape)}; topk_ids is {topk_ids.dtype} {list(topk_ids.shape)}"
            )
        if not 0 <= seed < 1 << 31:
            raise ValueError(f"seed is {seed}, allowed are 0 to {(1 << 31) - 1}")
        self._seed[0] = seed
        args = self._args
        args.num_tokens, args.top_k = topk_ids.shape
        args.ids_are_64bit = int(topk_ids.dtype == torch.int64)
        args.topk_ids, args.out = topk_ids.data_ptr(), out.data_ptr()
        _abi.call("putget_choose", ctypes.byref(args))
        return out


def _require(name: str, ids: Tensor) -> None:
    is_table = ids.dim() == 2 and ids.dtype in (torch.int32, torch.int64) and ids.is_contiguous()
    if not is_table or ids.device.type != "cpu":
        raise ValueError(
            f"{name} is {ids.dtype} {list(ids.shape)} on {ids.device}"
            f"{'' if ids.is_contiguous() else ', not contiguous'}; "
            "it must be a contiguous int32 or int64 [num_tokens, top_k] on the CPU"
        )
