"""Contenders that move the bytes of a round and its flags, and nothing else: what bounds putget with plain accesses."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from putget import AllToAll, Workspace
from putget.tuning import Launch, Tuning
from putget_bench.ablation import Bench
from putget_bench.contender import ROUND_TIMEOUT_S, Round
from putget_bench.inputs import same_bytes
from putget_bench.profiles import dispatch_row_bytes
from putget_bench.row_probe import RowProbe
from putget_bench.traffic import Traffic

_ACCESS_BYTES = 16
_CONTROL_BYTES = 1 << 20  # for each rank: more than its flags take in a workspace
_BLOCK_THREADS = 256
_LONGER_BYTES = 1024
_NO_SIGN = 2**31 - 1
_NOT_COME = -1  # the value of memory where nothing has come
_WORDS = (0x1F123BB5, 0x05491333, 0x2545F491)  # of rows to get: by rank, slot and column


class Floor:
    """Rows to the slots that the reference gives them, a flag for each CTA; a flag from each rank, rows back, sums.

    The launches are those of putget for the same tokens and rows that are got, unless a CTA takes a whole token or
    pieces are longer.

    Args:
        bench: see `Bench`.
        way: see `RowProbe.put`; or "longer": "spread", and rows are got in pieces of 1024 bytes. What is best for
            putget need not be best for the probe, and the bound is what the best of them takes.
    """

    name = "bytes and flags"
    _combine_launch: Launch | None = Launch(sentinel_rows=False)  # as it is where rows are got
    _areas = 1  # of rows that come back

    def __init__(self, bench: Bench, way: str = "spread") -> None:
        settings = bench.settings
        self._longer = way == "longer"
        self._way = "spread" if self._longer else way
        self._device = bench.device
        self._size, self._capacity = settings.ep_size, settings.max_tokens_per_rank
        self._row_bytes = _whole_accesses(dispatch_row_bytes(settings.payloads(), settings.top_k))
        self._back_bytes = _whole_accesses(settings.output().row_bytes)
        self._back_at = self._size * self._capacity * self._row_bytes
        rows_bytes = self._back_at + self._areas * self._size * self._capacity * self._back_bytes
        num_bytes = RowProbe.bytes_for(self._size, rows_bytes + self._size * _CONTROL_BYTES)
        self._workspace = Workspace(bench.communicator, num_bytes, bench.device, timeout_s=ROUND_TIMEOUT_S)
        self._probe = RowProbe(self._workspace)
        # It runs no round: it says how putget would be launched.
        self._shape = AllToAll(
            bench.communicator,
            num_experts=settings.num_experts,
            top_k=settings.top_k,
            max_tokens_per_rank=settings.max_tokens_per_rank,
            payloads=settings.payloads(),
            output=settings.output(),
            device=bench.device,
            num_sms=settings.num_sms,
            tuning=Tuning(combine=self._combine_launch),
        )
        self._num_sms = torch.cuda.get_device_properties(bench.device).multi_processor_count

    def takes(self, num_tokens: int) -> bool:
        """See `Contender.takes`."""
        return num_tokens > 0

    def _launches(self, num_tokens: int) -> tuple[Launch, Launch]:
        return self._shape.launches(num_tokens)

    def load(self, round_: Round) -> str | None:
        """See `Contender.load`."""
        self._round = round_
        rank, num_tokens = round_.rank, round_.num_tokens
        self._put_launch, self._get_launch = self._launches(num_tokens)
        if self._longer:
            self._get_launch = replace(self._get_launch, segment_bytes=_LONGER_BYTES)
        if self._way != "spread":
            self._put_launch = Launch(min(num_tokens, self._num_sms), _BLOCK_THREADS, 512, 1)
        slots = torch.full((num_tokens, self._size), -1, dtype=torch.int32)
        for dst in range(self._size):
            tokens = round_.tokens_from(rank, dst).cpu()
            slots[tokens, dst] = rank * self._capacity + torch.arange(len(tokens), dtype=torch.int32)
        self._slots = slots.to(self._device)
        self._rows = self._packed(rank)
        self._out = torch.zeros(num_tokens, self._back_bytes, dtype=torch.uint8, device=self._device)
        num_slots = self._size * self._capacity
        self._area(0).copy_(self._words(rank, torch.arange(num_slots)))
        return self.verify()

    def dispatch(self) -> None:
        """See `Contender.dispatch`."""
        first = self._round.rank * self._capacity
        self._probe.put(self._slots, self._rows, self._put_launch, self._way, first)

    def write_rows(self) -> None:
        """See `Contender.write_rows`: they are there."""

    def combine(self) -> None:
        """See `Contender.combine`."""
        self._probe.get(self._slots, self._out, self._get_launch, self._back_at)

    def verify(self) -> str | None:
        """See `Contender.verify`. Rows whose slots were counted may lie in any order."""
        torch.cuda.synchronize(self._device)
        self._workspace.comm.compare("floor", {}, ROUND_TIMEOUT_S)  # the fill is not part of the protocol
        self.dispatch()
        self.combine()
        self._probe.check()
        for src in range(self._size):
            tokens = self._round.tokens_from(src, self._round.rank)
            start = src * self._capacity * self._row_bytes
            got = self._probe.room[start : start + len(tokens) * self._row_bytes].view(len(tokens), self._row_bytes)
            want = self._packed(src)[tokens]
            if self._way == "counted":
                got, want = (rows.view(torch.int32).long().sum(dim=0) for rows in (got, want))
            if not same_bytes(got, want):
                return f"rows of rank {src} differ from what it sent"
        sums = torch.zeros_like(self._out.view(torch.int32))
        for dst in range(self._size):
            slots = self._slots[:, dst]
            sums += torch.where(slots[:, None] >= 0, self._words(dst, slots), 0)
        return None if same_bytes(self._out.view(torch.int32), sums) else "sums of rows are wrong"

    def wire_bytes(self, traffic: Traffic) -> tuple[float, float]:
        """See `Contender.wire_bytes`."""
        return traffic.dispatch, traffic.combine

    def close(self) -> None:
        """See `Contender.close`."""
        self._shape.close()
        self._workspace.close()

    def _area(self, index: int) -> Tensor:
        """Rows that come back, [slots, words] int32."""
        num_bytes = self._size * self._capacity * self._back_bytes
        start = self._back_at + index * num_bytes
        return self._probe.room[start : start + num_bytes].view(torch.int32).view(-1, self._back_bytes // 4)

    def _packed(self, src: int) -> Tensor:
        """The rows that a rank sends, [num_tokens, row_bytes] uint8: payloads, ids and weights after each other."""
        sent = self._round.inputs[src]
        parts = [
            part.reshape(len(part), -1).contiguous().view(torch.uint8)
            for part in (*sent.payloads, sent.topk_ids, sent.topk_weights)
        ]
        rows = torch.cat(parts, dim=1)
        return torch.nn.functional.pad(rows, (0, self._row_bytes - rows.shape[1]))

    def _words(self, rank: int, slots: Tensor) -> Tensor:
        """Rows to get, [len(slots), words] int32, which every rank can compute; no word has its first bit set."""
        of_rank, of_slot, of_column = _WORDS
        columns = torch.arange(self._back_bytes // 4, dtype=torch.int32, device=self._device)
        rows = slots.to(self._device, torch.int32)[:, None] * of_slot + rank * of_rank % 2**31
        return rows.int() + columns * of_column & _NO_SIGN


class SentFloor(Floor):
    """The same, but rows come back as sentinel rows, without any other.

    The launches are those of putget where it sends such rows, also of more tokens than its rule does.
    """

    _combine_launch = Launch(sentinel_rows=True)
    _areas = 2

    def load(self, round_: Round) -> str | None:
        """See `Contender.load`."""
        counts = [len(round_.tokens_from(src, round_.rank)) for src in range(self._size)]
        self._num_rows = torch.tensor(counts, dtype=torch.int32, device=self._device)
        self._area(1).fill_(_NOT_COME)
        return super().load(round_)

    def combine(self) -> None:
        """See `Contender.combine`."""
        launch = self._get_launch
        landing = self._back_at + self._area(0).nbytes
        self._probe.send(
            self._slots,
            self._num_rows,
            self._out,
            replace(launch, senders=launch.senders or launch.blocks),
            self._back_at,
            landing,
            self._capacity,
        )

    def verify(self) -> str | None:
        """See `Contender.verify`."""
        wrong = super().verify()
        if wrong is None and not bool((self._area(1) == _NOT_COME).all()):
            return "words that have come were not set back"
        return wrong


def _whole_accesses(num_bytes: int) -> int:
    return -(-num_bytes // _ACCESS_BYTES) * _ACCESS_BYTES
