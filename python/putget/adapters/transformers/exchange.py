"""Rounds of one layer's experts under transformers: rows out, this rank's experts on what arrived, sums back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from putget import AllToAll, Communicator, Payload, ProtocolMisuse, Received
from putget.adapters.engines import announce, announce_launch, require_version
from putget.adapters.placement import Table
from putget.adapters.rounds import Rounds
from putget.adapters.shared import TIMEOUT_S, WARMUP_TIMEOUT_S, engine_workspace_bytes, shared_workspace
from putget.adapters.transformers.grouped import gate_of
from putget.moe.experts import bf16_networks, expected_rows
from putget.moe.kernels import Gate

_WEIGHTS = ("gate_up_proj", "down_proj")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ExpertExchange:
    """The rounds of one layer, for ``ExpertRounds`` and ``spread``. Subclasses name the ranks, and each expert's owner.

    Attributes:
        max_tokens_per_rank: Most tokens that one rank sends.
        num_local_experts: Experts of this rank, which follow one another.
        experts_forward: The experts' own forward, on local ids; ``num_local_experts`` stands for "none of these".
        timeout_s: Deadline of a wait in a round, in seconds.
        warmup_timeout_s: That of the first round, in seconds.
        layer: The layer's number, which travels with the rows to be compared; None: it does not.
        waited_s: Time in dispatch and combine, all rounds together, in seconds. CPU ranks wait there for each other.
        remedy: What a caller who sends too many tokens does.
    """

    max_tokens_per_rank: int = 4096
    timeout_s: float = TIMEOUT_S
    warmup_timeout_s: float = WARMUP_TIMEOUT_S
    num_local_experts: int
    experts_forward: Callable[..., torch.Tensor]
    num_stats: int = 0
    waited_s: float = 0.0
    remedy: str
    _rounds: Rounds | None = None
    _counts: list[int] | None = None  # rows of each rank in the last round on CPUs,
    _used: torch.Tensor  # and the slots that have them

    def group(self) -> tuple[Communicator, Table]:
        """The ranks, and the rank of each expert. Collective at the first call."""
        raise NotImplementedError

    def exchange(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Dispatch, this rank's experts on what arrived, and combine; for rows that no other rank sends.

        Args:
            rows: [num_tokens, hidden_size]; num_tokens may be 0.
            ids: [num_tokens, top_k] int64.
            weights: [num_tokens, top_k].

        Raises:
            ValueError: More tokens than there is room for; nothing has happened on any rank.
            ProtocolMisuse: Another rank is in another layer.
        """
        rounds = self._rounds_for(rows, ids.shape[1])
        if len(rows) > rounds.max_tokens_per_rank:
            raise ValueError(
                f"a rank sends {len(rows)} tokens, the workspace is for {rounds.max_tokens_per_rank}: {self.remedy}"
            )
        networks = getattr(self.experts_forward, "__self__", None)
        if torch.is_grad_enabled() and networks is not None and any(p.requires_grad for p in networks.parameters()):
            raise ValueError("experts' weights require gradients, which rounds have not: run under torch.no_grad()")
        began = time.perf_counter()
        received = rounds.dispatch(
            ids.contiguous(),
            weights.float().contiguous(),
            [rows.contiguous()],
            names=["hidden_states"],
            stats=self.stats(),
        )
        self.waited_s += time.perf_counter() - began
        announce_launch("transformers", rounds.all_to_all, len(rows))
        if received.stats is not None:
            try:
                self.hear(received.stats)
            except BaseException:
                rounds.release()
                raise
        gate = self._gate_of(networks, rows)
        if gate is not None:
            return self._by_expert(rounds, received, networks, gate, len(rows))
        output = None
        try:
            if rows.is_cpu:
                self._write_used(rounds, received, weights.dtype)
            else:
                output = self._of_all(received, weights.dtype)
        except BaseException:
            rounds.release()
            raise
        began = time.perf_counter()
        combined = rounds.combine(output, name="the experts' output")
        self.waited_s += time.perf_counter() - began
        return combined

    def _gate_of(self, networks: Any, rows: torch.Tensor) -> Gate | None:
        """The gate of experts that putget's kernels compute for these rows; None: their own forward does."""
        if rows.is_cpu or rows.dtype != torch.bfloat16:
            return None
        return gate_of(networks, self.num_local_experts)

    def _by_expert(
        self, rounds: Rounds, received: Received, networks: Any, gate: Gate, num_tokens: int
    ) -> torch.Tensor:
        """The rest of a round on a GPU: this rank's experts on the rows that came, and combine."""
        try:
            grouped = received.expert_major()
            (came,) = grouped.payloads
            # If every rank has as many tokens. One without any knows nothing of the others.
            tokens = num_tokens or self.max_tokens_per_rank
            expected = expected_rows(tokens, received.num_tokens.shape[0], rounds.top_k, rounds.num_experts)
            output = bf16_networks(came, grouped, networks.gate_up_proj, networks.down_proj, gate, expected)
        except BaseException:
            rounds.release()
            raise
        began = time.perf_counter()
        combined = rounds.combine(output, name="the experts' output", layout=grouped)
        self.waited_s += time.perf_counter() - began
        return combined

    def _of_all(self, received: Received, dtype: torch.dtype) -> torch.Tensor:
        """The weighted sums of this rank's experts for each slot: nothing on the host says which ones are used."""
        flat = received.flat
        local, elsewhere = self._local(flat.topk_ids)
        # Slots without a token hold the rows of earlier rounds: zeros, so that no NaN of theirs reaches a sum.
        rows = flat.payloads[0].masked_fill(elsewhere.all(1, keepdim=True), 0)
        output = self.experts_forward(rows, local, flat.topk_weights.masked_fill(elsewhere, 0).to(dtype))
        return output.to(rows.dtype).contiguous()

    def _write_used(self, rounds: Rounds, received: Received, dtype: torch.dtype) -> None:
        """The same for slots that are used, into ``combine_input``: on CPUs experts compute each row that they get."""
        counts = received.num_tokens.tolist()
        if counts != self._counts:
            self._counts, ranks = counts, len(counts)
            of_ranks = [torch.arange(rank, rank + count * ranks, ranks) for rank, count in enumerate(counts) if count]
            self._used = torch.cat(of_ranks) if of_ranks else torch.empty(0, dtype=torch.int64)
        flat, used = received.flat, self._used
        if not any(counts):
            return
        rows, ids, shares = [x.index_select(0, used) for x in (flat.payloads[0], flat.topk_ids, flat.topk_weights)]
        local, elsewhere = self._local(ids)
        output = self.experts_forward(rows, local, shares.masked_fill_(elsewhere, 0).to(dtype))
        rounds.combine_input().index_copy_(0, used, output.to(rows.dtype))

    def _local(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of this rank's experts for ids of all ranks, and which ids are of no expert here."""
        local = ids.to(torch.int64, copy=True).sub_(self._first)
        elsewhere = (local < 0).logical_or_(local >= self.num_local_experts)
        return local.masked_fill_(elsewhere, self.num_local_experts), elsewhere

    @property
    def all_to_all(self) -> AllToAll | None:
        """The all-to-all of the last round; None before the first."""
        if self._rounds is None:
            return None
        try:
            return self._rounds.all_to_all
        except ProtocolMisuse:
            return None

    def stats(self) -> torch.Tensor | None:
        """Numbers that this rank tells all ranks in the next round: int32 [num_stats]."""
        return None

    def hear(self, told: torch.Tensor) -> None:
        """Takes what all ranks have told in a round: int32 [ep_size, num_stats]."""

    def _rounds_for(self, rows: torch.Tensor, top_k: int) -> Rounds:
        """The rounds of this layer, made at the first call (collective)."""
        if self._rounds is None:
            comm, owners = self.group()
            self._first = owners.index(comm.rank)
            output = Payload((rows.shape[1],), rows.dtype)
            announce("transformers", comm, num_experts=len(owners), device=rows.device)
            shared = shared_workspace(
                comm,
                engine_workspace_bytes(
                    ep_size=comm.size,
                    max_tokens_per_rank=self.max_tokens_per_rank,
                    dispatch_bytes=output.row_bytes,
                    output=output,
                ),
                rows.device,
                share_by="transformers",
                timeout_s=self.timeout_s,
                warmup_timeout_s=self.warmup_timeout_s,
                arguments={"max_tokens_per_rank": self.max_tokens_per_rank, "hidden_size": rows.shape[1]},
            )
            self._rounds = Rounds(
                shared,
                num_experts=len(owners),
                top_k=top_k,
                max_tokens_per_rank=self.max_tokens_per_rank,
                output=output,
                expert_to_rank=owners,
                num_stats=self.num_stats,
            )
        return self._rounds


def require_transformers() -> str:
    """The version of transformers that is installed.

    Raises:
        BackendUnavailable: There is none, or one before 5.23 or from 6 on.
    """
    return require_version("transformers", ["transformers"], "5.23", "6")


def check_experts(experts: Any) -> None:
    """Refuses experts whose weights are not plain ones.

    Raises:
        ValueError: A weight is missing or quantised; the message names it.
    """
    kind = type(experts).__name__
    weights = dict(experts.named_parameters())
    missing = [name for name in _WEIGHTS if name not in weights]
    if missing:
        raise ValueError(
            f"{kind} has no {' and no '.join(missing)}: putget knows experts with {' and '.join(_WEIGHTS)}"
        )
    for name, weight in weights.items():
        if weight.dtype not in _DTYPES:
            raise ValueError(
                f"{kind}.{name} is {weight.dtype}: quantised experts are not known, supported are bfloat16, float16 "
                'and float32; use ep_implementation="all_to_all"'
            )
