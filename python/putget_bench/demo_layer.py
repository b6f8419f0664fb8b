"""The work of one rank of `putget demo`: a mixture-of-experts layer with real experts, checked in two ways."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

from putget import Communicator, reference
from putget_bench import quantise
from putget_bench.contender import Putget, Round, make_round
from putget_bench.inputs import Source
from putget_bench.launch import Emit, RankContext
from putget_bench.lineup import Entry
from putget_bench.measure import Clock, count_bytes, summarise, time_contenders
from putget_bench.roofline import Link, make_timer
from putget_bench.settings import Settings
from putget_bench.timing import median

INTERMEDIATE_SIZE = 16  # of an expert's gated FFN: small, so that 256 experts fit anywhere
TOLERANCE = 2.0**-7  # relative error of a token: rows and result are rounded to BF16, which has 8 bits
_PAIRS = 5
_CEILING_BYTES = 1 << 20
_EXPERT_RUNS = 3

ExpertWeights = tuple[Tensor, Tensor, Tensor]


def expert_weights(settings: Settings, expert: int, device: torch.device) -> ExpertWeights:
    """Gate and up projection [intermediate, hidden] and down projection [hidden, intermediate] of one expert, float32.

    They follow from the seed alone, so that every rank can compute the dense reference.
    """
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + 500_000 + expert)
    drawn = torch.randn(3, INTERMEDIATE_SIZE, settings.hidden_size, generator=generator)
    gate, up, down = drawn.to(device)
    return gate * settings.hidden_size**-0.5, up * settings.hidden_size**-0.5, down.T * INTERMEDIATE_SIZE**-0.5


def feed_forward(weights: ExpertWeights, rows: Tensor) -> Tensor:
    """A gated feed-forward network, [n, hidden] to [n, hidden] in float32."""
    gate, up, down = weights
    return (silu(rows @ gate.T) * (rows @ up.T)) @ down.T


class FeedForwardExperts:
    """The experts of one rank."""

    def __init__(self, settings: Settings, rank: int, device: torch.device) -> None:
        self._settings = settings
        owners = reference.default_expert_to_rank(settings.num_experts, settings.ep_size).tolist()
        local = [expert for expert, owner in enumerate(owners) if owner == rank]
        self._weights = {expert: expert_weights(settings, expert, device) for expert in local}

    def rows(self, rank: int, topk_ids: Tensor, topk_weights: Tensor, payloads: Sequence[Tensor]) -> Tensor:
        """See `putget_bench.inputs.Experts.rows`; the rank is this one."""
        hidden_size = self._settings.hidden_size
        total = torch.zeros(*topk_ids.shape[:2], hidden_size, device=topk_ids.device)
        for expert, weights in self._weights.items():
            src, slot, k = (topk_ids == expert).nonzero(as_tuple=True)
            if len(src) == 0:
                continue
            carried = tuple(payload[src, slot] for payload in payloads)
            hidden = quantise.dequantise(self._settings.quant, carried, hidden_size)
            # A token names an expert once, so no row is added to twice here.
            total[src, slot] += feed_forward(weights, hidden) * topk_weights[src, slot, k, None]
        return total.to(self._settings.output().dtype)


def run_layer(context: RankContext, settings: Settings, emit: Emit) -> int:
    """Runs all sizes on one rank. Emits "ceiling", and per size "size" or "mismatch".

    Returns:
        0, or 1 if a result was wrong. The same on every rank.
    """
    communicator = Communicator()
    domain_of = None if communicator.network is None else communicator.domain_of
    emit({"kind": "stage", "text": "measuring the link"})
    link = Link(communicator, context, _CEILING_BYTES, settings.cuda_graph)
    ceiling = link.ceiling(_CEILING_BYTES, settings.iters)
    emit({"kind": "ceiling", "ceiling": asdict(ceiling), "empty_us": None})
    emit({"kind": "stage", "text": "making tokens and experts"})
    source = Source(settings, context.device)
    experts = FeedForwardExperts(settings, context.rank, context.device)
    layer = Putget(communicator, settings, experts, context.device)
    entry = Entry(layer, settings)
    clock = Clock(ceiling, empty_us=0.0)
    timer = make_timer(context.device, link.barrier, settings.cuda_graph)
    emit({"kind": "stage", "text": "computing the dense float32 reference"})
    dense = dense_reference(settings, source, context)

    exit_code = 0
    for num_tokens in settings.batches:
        emit({"kind": "stage", "text": f"{num_tokens} tokens a rank: checking"})
        round_ = make_round(settings, source, context.rank, num_tokens)
        wrong = layer.receive(round_)
        round_ = replace(round_, output=_oracle(round_, layer.rows, domain_of))
        wrong = wrong or layer.finish(round_)
        error = relative_error(layer.output, dense[:num_tokens])
        if wrong is None and not error <= TOLERANCE:
            wrong = f"relative error {error:.3g} against the dense reference is above {TOLERANCE}"
        everyone: list[tuple[str | None, float]] = [(None, 0.0)] * context.size
        dist.all_gather_object(everyone, (wrong, error))
        for rank, (text, _) in enumerate(everyone):
            if text is not None:
                emit({"kind": "mismatch", "text": f"{num_tokens} tokens a rank: rank {rank}: {text}"})
                exit_code = 1
        if exit_code:
            break
        emit({"kind": "stage", "text": f"{num_tokens} tokens a rank: timing"})
        readings = time_contenders(timer, [entry], settings, _PAIRS)[entry.name]
        counted = count_bytes(settings, round_, domain_of)
        size = {
            "batch_size": num_tokens,
            "checked": True,
            "bytes": asdict(counted),
            "contenders": [summarise(entry, readings, readings, counted, clock, with_percentiles=False)],
            "experts_us": _time_experts(context, experts, layer),
            "relative_error": max(error for _, error in everyone),
        }
        emit({"kind": "size", "size": size})
    layer.close()
    link.close()
    communicator.close()
    return exit_code


def _oracle(round_: Round, rows: Tensor, domain_of: tuple[int, ...] | None) -> Tensor:
    """The expected result of combine, bit for bit: the experts' rows come over sockets, the reference adds them."""
    here = rows.cpu().contiguous()
    back = torch.empty_like(here)
    dist.all_to_all_single(back.view(torch.uint8), here.view(torch.uint8))
    held = [split[None].expand(len(back), *split.shape) for split in back.to(rows.device)]
    return reference.combine(round_.routings[round_.rank], held, round_.rank, domain_of=domain_of)


def dense_reference(settings: Settings, source: Source, context: RankContext) -> Tensor:
    """The layer with no parallelism for the tokens of this rank, largest size: [num_tokens, hidden_size] float32.

    It works on the rows as they were quantised, so what remains is the rounding of rows and result to BF16.
    """
    sent = source.inputs(context.rank, max(settings.batches))
    hidden = quantise.dequantise(settings.quant, sent.payloads, settings.hidden_size)

    def expert(index: int, rows: Tensor) -> Tensor:
        return feed_forward(expert_weights(settings, index, context.device), rows)

    return reference.dense_moe(hidden, sent.topk_ids, sent.topk_weights, expert)


def relative_error(got: Tensor, want: Tensor) -> float:
    """The largest relative error of a token, by the Euclidean norm; NaN if there is one in the result."""
    error = (got.float() - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-30)
    return float(error.max())


def _time_experts(context: RankContext, experts: FeedForwardExperts, layer: Putget) -> float:
    """Median time of the experts in microseconds, slowest rank. They are plain torch: only there to be real."""
    received = layer.dispatch()

    def run() -> float:
        _synchronize(context)
        start = time.perf_counter()
        experts.rows(context.rank, received.topk_ids, received.topk_weights, received.payloads)
        _synchronize(context)
        return (time.perf_counter() - start) * 1e6

    times = torch.tensor(sorted(run() for _ in range(_EXPERT_RUNS)), dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return median(times)


def _synchronize(context: RankContext) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize()
