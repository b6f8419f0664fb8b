"""The variants of `putget ablate`; `ablation` says how to add one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from putget import AllToAll, Communicator, Payload, Received, hardware
from putget.tuning import Launch, Tuning
from putget_bench import floor
from putget_bench.ablation import GROUPS, Bench, Variant, group
from putget_bench.contender import ROUND_TIMEOUT_S, Putget, Round, received_differs
from putget_bench.inputs import same_bytes
from putget_bench.lineup import Entry
from putget_bench.peers.collectives import all_gather, as_bytes
from putget_bench.probe_library import MAX_PROBED_RANKS
from putget_bench.profiles import NVFP4_GROUP, QUANTS
from putget_bench.rounds import Rounds
from putget_bench.settings import FP8_PACK, Settings
from putget_bench.traffic import Traffic

__all__ = ["GROUPS", "make"]

_SMS = (4, 8, 16, 32, 64)
_LEAST_PAYLOAD_BYTES = 16  # a payload there must be
_LEAST_OUTPUT = Payload((8,), torch.bfloat16)
_STATS = 8  # numbers of a rank


@group("rows")
def row_types(settings: Settings) -> Iterator[Variant]:
    """Other recipes of quantisation: bytes and latency."""
    for quant in QUANTS:
        fits = quant != "nvfp4" or settings.hidden_size % NVFP4_GROUP == 0
        if quant != settings.quant and fits:
            rows = replace(settings, quant=quant, payload_dtype="bfloat16")
            yield Variant(f"{quant} rows", f"dispatch carries {quant} rows", rows, lambda bench: Putget(*bench))


@group("combine_input")
def combine_inputs(settings: Settings) -> Iterator[Variant]:
    """Rows that the experts wrote elsewhere, which combine has to take into the workspace first."""
    yield Variant("staged combine", "combine(x) takes rows from outside", settings, lambda bench: StagedPutget(*bench))


@group("got")
def got_rows(settings: Settings) -> Iterator[Variant]:
    """Rows that each rank gets where experts wrote them, whatever the batch."""
    if settings.combine_is_fp8:
        return
    got = Tuning(combine=Launch(sentinel_rows=False))
    yield Variant("got rows", "combine gets rows, none is sent", settings, lambda bench: Putget(*bench, tuning=got))


@group("combine_dtype")
def combine_dtypes(settings: Settings) -> Iterator[Variant]:
    """Rows that come back in fewer bytes."""
    if settings.hidden_size % FP8_PACK or settings.combine_is_fp8:
        return
    rows = replace(settings, combine_dtype="fp8_block")
    changes = "combine brings FP8 rows, a scale for 128 values"
    yield Variant("fp8_block back", changes, rows, lambda bench: Putget(*bench))


@group("halves")
def halves(settings: Settings) -> Iterator[Variant]:
    """Each call as a start and a finish half, one after the other."""
    yield Variant("halves", "start and finish instead of one call", settings, lambda bench: HalvedPutget(*bench))


@group("balancer")
def told_by_dispatch(settings: Settings) -> Iterator[Variant]:
    """The statistics that a balancer asks of dispatch beside the rows."""
    yield Variant("expert load", "dispatch counts this rank's choices by expert", settings, LoadPutget)
    yield Variant("statistics", f"dispatch tells all ranks {_STATS} numbers of each", settings, StatsPutget)


@group("num_sms")
def sm_counts(settings: Settings) -> Iterator[Variant]:
    """Bounds on the SMs of a call; none on the CPU."""
    if settings.device != "cuda":
        return
    most = hardware.gpus()[0].num_sms
    for count in (*(count for count in _SMS if count < most), most):

        def build(bench: Bench, count: int = count) -> Putget:
            return Putget(*bench, num_sms=count)

        yield Variant(f"{count} SMs", "all SMs" if count == most else f"at most {count} SMs", settings, build)


@group("exchange")
def exchanges(settings: Settings) -> Iterator[Variant]:
    """The facts that ranks must know of each other before rows can move, in putget's way and in that of collectives."""
    backend = "nccl" if settings.device == "cuda" else "gloo"
    only_dispatch = ("dispatch",)
    yield Variant(
        "ids by putget", "dispatch of counts, ids, weights and 16 bytes a row", settings, IdsByPutget, only_dispatch
    )
    yield Variant(
        f"ids by {backend}",
        "all-gather of all ids, which an all-to-all of collectives needs first",
        settings,
        lambda bench: IdsByAllGather(bench, dist.new_group(backend=backend)),
        only_dispatch,
    )


@group("floor")
def floors(settings: Settings) -> Iterator[Variant]:
    """The bytes and the flags of a round alone; and ways to find slots and to share out rows. GPUs only."""
    if settings.device != "cuda" or settings.ep_size > MAX_PROBED_RANKS:
        return
    for way, name, changes in (
        ("spread", "bytes and flags", "no logic: slots are known, rows are summed as integers"),
        ("longer", "bytes, longer pieces", "the same, and rows are got in pieces of 1024 bytes"),
        ("block", "bytes, a CTA a token", "the same, but a CTA puts the whole row of a token"),
        ("counted", "bytes, counted slots", "the same, and it counts slots with atomics"),
    ):

        def build(bench: Bench, way: str = way) -> floor.Floor:
            return floor.Floor(bench, way)

        yield Variant(name, changes, settings, build)
    sent = "the same, but rows come back as sentinel rows"
    yield Variant("bytes, sent back", sent, settings, floor.SentFloor)


def make(
    names: tuple[str, ...], communicator: Communicator, settings: Settings, rounds: Rounds, device: torch.device
) -> list[Entry]:
    """The variants of these groups. Collective: the same on every rank."""
    entries = []
    for name in names:
        for variant in GROUPS[name](settings):
            bench = Bench(communicator, variant.settings, rounds.experts(variant.settings), device)
            contender = variant.build(bench)
            contender.name = variant.name
            entries.append(Entry(contender, variant.settings, variant.phases, name, variant.changes))
    return entries


class StagedPutget(Putget):
    """putget whose experts write their rows to memory of their own."""

    def receive(self, round_: Round) -> str | None:
        """See `Putget.receive`."""
        self._outside: Tensor | None = None
        return super().receive(round_)

    def write_rows(self) -> None:
        """See `Contender.write_rows`."""
        if self._outside is None:
            self._outside = torch.empty_like(self.rows)
        self._outside.copy_(self.rows)

    def combine(self) -> None:
        """See `Contender.combine`."""
        self._all_to_all.combine(self._outside, out=self.output)


class HalvedPutget(Putget):
    """putget by halves."""

    def dispatch(self) -> Received:
        """See `Contender.dispatch`."""
        mine = self._round.mine
        self._all_to_all.dispatch_start(
            mine.topk_ids, mine.topk_weights, *mine.payloads, max_rows=max(1, self._round.num_tokens)
        )
        return self._all_to_all.dispatch_finish()

    def combine(self) -> None:
        """See `Contender.combine`."""
        self._all_to_all.combine_start()
        self._all_to_all.combine_finish(out=self.output)


class LoadPutget(Putget):
    """putget that counts the load of experts."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(*bench)
        self._beside = {"expert_load": torch.zeros(bench.settings.num_experts, dtype=torch.int32, device=bench.device)}

    def receive(self, round_: Round) -> str | None:
        """See `Putget.receive`. The counts must be those of the ids."""
        counted = self._beside["expert_load"].zero_()
        wrong = super().receive(round_)
        ids = round_.mine.topk_ids
        same = torch.equal(counted, torch.bincount(ids[ids >= 0], minlength=len(counted)).int())
        return wrong or (None if same else "dispatch counted another load than that of the ids")


class StatsPutget(Putget):
    """putget whose dispatch tells every rank numbers of all."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(*bench, num_stats=_STATS)
        ranks = torch.arange(bench.settings.ep_size, dtype=torch.int32, device=bench.device)
        self._told = ranks[:, None] + torch.arange(_STATS, dtype=torch.int32, device=bench.device)
        self._beside = {"stats": self._told[bench.communicator.rank]}

    def dispatch(self) -> Received:
        """See `Contender.dispatch`."""
        self._received = super().dispatch()
        return self._received

    def receive(self, round_: Round) -> str | None:
        """See `Putget.receive`. The numbers must be those of the ranks."""
        wrong = super().receive(round_)
        told = self._received.stats
        same = told is not None and torch.equal(told, self._told)
        return wrong or (None if same else f"dispatch told {told}, the ranks gave {self._told}")


class IdsByPutget:
    """A dispatch that moves no more than it must: counts, ids, weights and one small payload. It has no combine."""

    name = "ids by putget"

    def __init__(self, bench: Bench) -> None:
        settings = bench.settings
        self._all_to_all = AllToAll(
            bench.communicator,
            num_experts=settings.num_experts,
            top_k=settings.top_k,
            max_tokens_per_rank=settings.max_tokens_per_rank,
            payloads=[Payload((_LEAST_PAYLOAD_BYTES,), torch.uint8)],
            output=_LEAST_OUTPUT,
            device=bench.device,
            num_sms=settings.num_sms,
            timeout_s=ROUND_TIMEOUT_S,
        )
        self._row_bytes = _LEAST_PAYLOAD_BYTES + settings.top_k * (4 + 4)
        self._whole_row_bytes = settings.output().row_bytes

    def takes(self, num_tokens: int) -> bool:
        """See `Contender.takes`."""
        return num_tokens > 0

    def load(self, round_: Round) -> str | None:
        """See `Contender.load`."""
        small = [replace(sent, payloads=(_first_bytes(sent.topk_weights),)) for sent in round_.inputs]
        self._round = replace(round_, inputs=tuple(small))
        return self.verify()

    def dispatch(self) -> Received:
        """See `Contender.dispatch`."""
        mine = self._round.mine
        return self._all_to_all.dispatch(
            mine.topk_ids, mine.topk_weights, *mine.payloads, max_rows=max(1, self._round.num_tokens)
        )

    def write_rows(self) -> None:
        """See `Contender.write_rows`: there are none."""

    def combine(self) -> None:
        """See `Contender.combine`: the round ends without it."""
        self._all_to_all.release()

    def verify(self) -> str | None:
        """See `Contender.verify`."""
        wrong = received_differs(self.dispatch(), self._round)
        self.combine()
        self._all_to_all.check()
        return wrong

    def wire_bytes(self, traffic: Traffic) -> tuple[float, float]:
        """See `Contender.wire_bytes`."""
        return traffic.combine / self._whole_row_bytes * self._row_bytes, 0.0

    def close(self) -> None:
        """See `Contender.close`."""
        self._all_to_all.close()


class IdsByAllGather:
    """All-gather of every rank's ids. It has no combine."""

    name = "ids by all-gather"

    def __init__(self, bench: Bench, group: object) -> None:
        self._group: Any = group
        self._ep_size = bench.settings.ep_size

    def takes(self, num_tokens: int) -> bool:
        """See `Contender.takes`."""
        return num_tokens > 0

    def load(self, round_: Round) -> str | None:
        """See `Contender.load`."""
        self._sent = round_.mine.topk_ids
        self._everyone = torch.cat([sent.topk_ids for sent in round_.inputs])
        self._gathered = torch.empty_like(self._everyone)
        return self.verify()

    def dispatch(self) -> None:
        """See `Contender.dispatch`."""
        all_gather(self._gathered, self._sent, group=self._group)

    def write_rows(self) -> None:
        """See `Contender.write_rows`: there are none."""

    def combine(self) -> None:
        """See `Contender.combine`: there is none."""

    def verify(self) -> str | None:
        """See `Contender.verify`."""
        self._gathered.fill_(-2)
        self.dispatch()
        return None if same_bytes(self._gathered, self._everyone) else "all-gather delivered wrong ids"

    def wire_bytes(self, traffic: Traffic) -> tuple[float, float]:
        """See `Contender.wire_bytes`."""
        return float(self._sent.nbytes * (self._ep_size - 1)), 0.0

    def close(self) -> None:
        """See `Contender.close`."""


def _first_bytes(weights: Tensor) -> Tensor:
    """Rows of the least payload's size, out of weights [num_tokens, top_k]: repeated, so that there are enough."""
    rows = as_bytes(weights)
    return rows.repeat(1, -(-_LEAST_PAYLOAD_BYTES // rows.shape[1]))[:, :_LEAST_PAYLOAD_BYTES].contiguous()
