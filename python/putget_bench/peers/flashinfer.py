"""FlashInfer's `MoeAlltoAll`: the one-sided kernels of TensorRT-LLM, as engines call them.

It is set up over torch.distributed instead of MPI, with memory shared by POSIX descriptors. Receivers have unused ids
set to -1, which engines need to tell empty slots, and rows to combine lie in its workspace, as putget's do.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from putget_bench.contender import Contender, Round, differs_beyond_rounding
from putget_bench.inputs import StandInExperts
from putget_bench.peers.collectives import as_bytes
from putget_bench.profiles import dispatch_row_bytes
from putget_bench.settings import Settings
from putget_bench.traffic import Traffic

_TOLERANCE = 0.02  # BF16 sums in another order, of rows that were rounded once
_FP8_TOLERANCE = 0.06  # rows cast to E4M3 (3 bits of mantissa) without a scale
_NO_EXPERT = -1


def describe(_device: str) -> str:
    """The version."""
    return f"FlashInfer {importlib.import_module('flashinfer.version').__version__}, MoeAlltoAll"


def make(settings: Settings, experts: StandInExperts, _device: torch.device) -> list[Contender]:
    """One contender, and one more whose combine casts to FP8 where putget's is asked to. Collective.

    Raises:
        ImportError: the package, or something that it needs, is not there.
        ValueError: it spreads this number of experts over ranks in another way.
    """
    if settings.num_experts % settings.ep_size:
        raise ValueError(
            f"it needs a number of experts that the ranks divide evenly, got {settings.num_experts} for "
            f"{settings.ep_size}"
        )
    all_to_all = connect(
        ep_size=settings.ep_size,
        max_tokens_per_rank=settings.max_tokens_per_rank,
        top_k=settings.top_k,
        num_experts=settings.num_experts,
        dispatch_row_bytes=dispatch_row_bytes(settings.payloads(), settings.top_k),
        combine_row_bytes=settings.output().row_bytes,
    )
    contenders: list[Contender] = [FlashInfer(all_to_all, settings, experts, low_precision=False)]
    if settings.combine_is_fp8:
        contenders.append(FlashInfer(all_to_all, settings, experts, low_precision=True))
    return contenders


def connect(
    *,
    ep_size: int,
    max_tokens_per_rank: int,
    top_k: int,
    num_experts: int,
    dispatch_row_bytes: int,
    combine_row_bytes: int,
) -> Any:
    """Makes the `MoeAlltoAll` of this rank. Collective.

    Args:
        ep_size: ranks.
        max_tokens_per_rank: most tokens of one rank.
        top_k: experts of a token.
        num_experts: experts of all ranks.
        dispatch_row_bytes: of a token with ids and weights.
        combine_row_bytes: of a token's result.
    """
    backend, mapping, memory, one_sided = (
        importlib.import_module(f"flashinfer.comm.{name}")
        for name in ("comm_backend", "mapping", "mnnvl", "trtllm_moe_alltoall")
    )
    # Ranks share one host: descriptors do, where fabric handles would need a service of the machine.
    memory.MnnvlMemory._fabric_supported = False
    group = backend.TorchDistBackend()
    ranks = mapping.Mapping(
        rank=group.Get_rank(),
        world_size=ep_size,
        gpus_per_node=ep_size,
        tp_size=ep_size,
        moe_ep_size=ep_size,
    )
    num_bytes = one_sided.moe_a2a_get_workspace_size_per_rank(
        ep_size,
        max_tokens_per_rank,
        dispatch_row_bytes,
        combine_row_bytes,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its successor wraps this class
        return one_sided.MoeAlltoAll(
            ranks,
            max_num_tokens=max_tokens_per_rank,
            top_k=top_k,
            num_experts=num_experts,
            workspace_size_per_rank=num_bytes,
            mnnvl_config=memory.MnnvlConfig(comm_backend=group),
        )


class FlashInfer:
    """`MoeAlltoAll` with ids made invalid in empty slots and rows written into its workspace.

    Slots come from atomic counters, so they differ from one round to the next: a result can be looked at only if the
    experts worked on what this very round delivered. Timed rounds write rows of the same size instead, and `verify`
    plays another round.
    """

    def __init__(self, all_to_all: Any, settings: Settings, experts: StandInExperts, *, low_precision: bool) -> None:
        self.name = "flashinfer fp8" if low_precision else "flashinfer"
        self._all_to_all = all_to_all
        self._settings = settings
        self._experts = experts
        self._low_precision = low_precision

    def takes(self, num_tokens: int) -> bool:
        """See `Contender.takes`: it has no round without tokens."""
        return num_tokens > 0

    def load(self, round_: Round) -> str | None:
        """See `Contender.load`."""
        mine = round_.mine
        self._round = round_
        self._sent = [*map(as_bytes, mine.payloads), mine.topk_ids, mine.topk_weights]
        self._output = torch.empty_like(round_.output)
        return self.verify()

    def dispatch(self) -> list[Tensor]:
        """See `Contender.dispatch`. Returns payloads as bytes, ids, weights, each [ep_size, num_tokens, ...]."""
        received: list[Tensor] = self._all_to_all.dispatch(
            self._round.mine.topk_ids,
            self._sent,
            self._round.num_tokens,
            invalid_token_expert_id=_NO_EXPERT,
            expert_id_payload_index=len(self._sent) - 2,
        )
        return received

    def write_rows(self) -> None:
        """See `Contender.write_rows`."""
        self._combine_input().copy_(self._rows)

    def combine(self) -> None:
        """See `Contender.combine`."""
        self._all_to_all.combine(
            self._combine_input(),
            self._round.num_tokens,
            payload_in_workspace=True,
            output=self._output,
            use_low_precision=self._low_precision,
        )

    def verify(self) -> str | None:
        """See `Contender.verify`: a round whose experts work on what arrives."""
        *carried, ids, weights = self.dispatch()
        payloads = [
            rows.view(kind.dtype).view(*rows.shape[:2], *kind.shape)
            for rows, kind in zip(carried, self._settings.payloads(), strict=True)
        ]
        wrong = received_differs(ids, weights, carried, self._round)
        self._rows = self._experts.rows(self._round.rank, ids, weights, payloads)
        self.write_rows()
        self.combine()
        tolerance = _FP8_TOLERANCE if self._low_precision else _TOLERANCE
        return wrong or differs_beyond_rounding(self._output, self._round.output, tolerance)

    def wire_bytes(self, traffic: Traffic) -> tuple[float, float]:
        """See `Contender.wire_bytes`: a row crosses once for each rank, in combine as one byte a value if in FP8."""
        itemsize = self._settings.output().dtype.itemsize
        return traffic.dispatch, traffic.combine / itemsize if self._low_precision else traffic.combine

    def close(self) -> None:
        """See `Contender.close`. FlashInfer keeps its workspaces for whoever asks for the same sizes again."""

    def _combine_input(self) -> Tensor:
        settings = self._settings
        rows: Tensor = self._all_to_all.get_combine_payload_tensor_in_workspace(
            self._round.num_tokens, settings.hidden_size, settings.output().dtype
        )
        return rows


def received_differs(ids: Tensor, weights: Tensor, carried: Sequence[Tensor], round_: Round) -> str | None:
    """Compares the rows of every source with the reference's, in whatever slots they lie; None if all bytes are right.

    Args:
        ids: [ep_size, num_slots, top_k] int32, -1 all over an empty slot.
        weights: [ep_size, num_slots, top_k] float32.
        carried: payloads as bytes, each [ep_size, num_slots, row_bytes].
        round_: what every rank sent.
    """
    for src, sent in enumerate(round_.inputs):
        tokens = round_.tokens_from(src, round_.rank)
        is_filled = (ids[src] != _NO_EXPERT).any(dim=1)
        got = [part[src][is_filled] for part in (weights, ids, *carried)]
        want = [part[tokens] for part in (sent.topk_weights, sent.topk_ids, *sent.payloads)]
        if len(got[0]) != len(tokens):
            return f"dispatch delivered {len(got[0])} rows of rank {src}, the reference {len(tokens)}"
        if not torch.equal(_in_order(got), _in_order(want)):
            return f"dispatch: rows of rank {src} differ from the reference"
    return None


def _in_order(parts: Sequence[Tensor]) -> Tensor:
    """The rows as bytes in an order that depends on nothing but their bytes: [num_rows, bytes] uint8."""
    rows = torch.cat([as_bytes(part) for part in parts], dim=1)
    found: Tensor
    found, counts = torch.unique(rows, dim=0, return_counts=True)
    return found.repeat_interleave(counts, dim=0)
