"""`MoeAlltoAll` as its documentation describes it: one copy of a row per target rank, slots in no particular order."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .mapping import Mapping
from .mnnvl import MnnvlConfig, MnnvlMemory

GARBAGE = 0xC5


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int, max_num_tokens: int, total_dispatch_payload_size_per_token: int, combine_payload_size_per_token: int
) -> int:
    return ep_size * max_num_tokens * (total_dispatch_payload_size_per_token + combine_payload_size_per_token)


class MoeAlltoAll:
    """Attribute `broken` spoils what one rank does: "dispatch" a byte of a row, "combine" a value of the result."""

    broken = ""

    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int,
        mnnvl_config: MnnvlConfig,
    ) -> None:
        assert MnnvlMemory._fabric_supported is False
        assert mnnvl_config.comm_backend.Get_rank() == mapping.rank
        assert workspace_size_per_rank > 0
        self._rank, self._size = mapping.rank, mapping.moe_ep_size
        self._max_num_tokens = max_num_tokens
        self._block = num_experts // self._size
        self._generator = torch.Generator()
        self._rounds = 0
        self._dispatched = False
        self._rows: Tensor | None = None

    def _slots(self, src: int, dst: int, num_rows: int) -> Tensor:
        """The slot of each row of src at dst in this round; every rank can tell, and no two rounds agree."""
        seed = (self._rounds * self._size + src) * self._size + dst
        return torch.randperm(num_rows, generator=self._generator.manual_seed(seed))

    def dispatch(
        self,
        token_selected_experts: Tensor,
        input_payloads: list[Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int,
        expert_id_payload_index: int,
    ) -> list[Tensor]:
        assert not self._dispatched
        top_k = token_selected_experts.shape[1]
        if top_k % 2 and top_k > 1:
            raise RuntimeError(f"Unsupported top_k: {top_k}")
        assert runtime_max_tokens_per_rank <= self._max_num_tokens
        assert all(payload.dim() == 2 and payload.is_contiguous() for payload in input_payloads)
        self._dispatched = True
        self._rounds += 1
        everyone: list[Any] = [None] * self._size
        dist.all_gather_object(everyone, (token_selected_experts, input_payloads))
        self._targets = [ids // self._block for ids, _ in everyone]
        received = []
        for index, own in enumerate(input_payloads):
            whole = torch.full((self._size, runtime_max_tokens_per_rank, own.shape[1] * own.itemsize), GARBAGE)
            whole = whole.to(torch.uint8).view(own.dtype)
            for src, (_, payloads) in enumerate(everyone):
                tokens = (self._targets[src] == self._rank).any(dim=1).nonzero()[:, 0]
                whole[src, self._slots(src, self._rank, len(tokens))] = payloads[index][tokens]
                if index == expert_id_payload_index:
                    whole[src, len(tokens) :] = invalid_token_expert_id
            received.append(whole)
        if self.broken == "dispatch" and self._rank == 0:
            received[0].view(torch.uint8)[-1, 0, 3] ^= 1
        return received

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> Tensor:
        assert self._dispatched
        shape = (self._size, runtime_max_tokens_per_rank, hidden_size)
        if self._rows is None or self._rows.shape != shape:
            self._rows = torch.zeros(shape, dtype=dtype)
        return self._rows

    def combine(
        self,
        payload: Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool,
        output: Tensor,
        use_low_precision: bool,
    ) -> Tensor:
        assert self._dispatched
        assert payload_in_workspace
        assert payload is self._rows
        assert payload.shape[1] == runtime_max_tokens_per_rank
        self._dispatched = False
        everyone: list[Any] = [None] * self._size
        dist.all_gather_object(everyone, payload)
        total = torch.zeros(output.shape)
        for dst, rows in enumerate(everyone):
            tokens = (self._targets[self._rank] == dst).any(dim=1).nonzero()[:, 0]
            mine = rows[self._rank, self._slots(self._rank, dst, len(tokens))].float()
            if use_low_precision:
                mine = mine.clamp(-448, 448).to(torch.float8_e4m3fn).float()
            total[tokens] += mine
        if self.broken == "combine" and self._rank == 0:
            total[0, 0] += 100
        return output.copy_(total)
