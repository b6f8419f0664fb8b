"""Groups that span hosts, in virtual time: networks, schemes and what is published of them."""

from __future__ import annotations

import ctypes
from ctypes import c_uint64
from dataclasses import dataclass

import numpy as np

from putget_bench.probe_library import DomainsArgs, call

AGENTS, ROUTES = range(2)


@dataclass(frozen=True)
class Network:
    """A rank's NIC, fitted on the published latencies of the paper's scheme.

    Attributes:
        name: as the command line has it.
        latency_us: from a byte's leaving to its landing.
        gbps: GB/s of a rank's NIC, out and in.
        post_us: a host thread's time for a write.
        write_us: a NIC's time for a write, beside its bytes.
        private_tokens: rows to each rank that the paper's scheme sends ahead.
    """

    name: str
    latency_us: float
    gbps: float
    post_us: float
    write_us: float
    private_tokens: int


NETWORKS = {
    "cx7": Network("cx7", 11.2, 45.4, 0.3, 0.05, 24),
    "efa": Network("efa", 32.0, 42.8, 1.0, 0.05, 32),
}
# Figures of the paper (Table 2): dispatch and combine in us, by network and ranks, for Round's defaults.
PUBLISHED = {
    ("cx7", 16): (110, 186),
    ("cx7", 32): (154, 266),
    ("cx7", 64): (188, 309),
    ("efa", 16): (215, 242),
    ("efa", 32): (229, 335),
    ("efa", 64): (267, 391),
}


BACK_ROW_BYTES = {"bfloat16": 14336, "fp8_block": 7168 + 56 * 4}  # of 7168 elements, as combine sends them home


@dataclass(frozen=True)
class Round:
    """The bytes that a round moves.

    Attributes:
        ep_size: ranks.
        domain_size: ranks of a host.
        num_tokens: of each rank.
        num_experts: of all ranks.
        top_k: experts of a token, drawn at random.
        row_bytes: of a row out.
        back_row_bytes: of a row back.
    """

    ep_size: int
    domain_size: int = 8
    num_tokens: int = 128
    num_experts: int = 256
    top_k: int = 8
    row_bytes: int = 7456
    back_row_bytes: int = BACK_ROW_BYTES["bfloat16"]


def published(shape: Round, network: Network) -> tuple[int, int] | None:
    """The time of the paper's scheme, dispatch and combine in us; None where nobody has said so."""
    is_theirs = shape == Round(shape.ep_size)
    return PUBLISHED.get((network.name, shape.ep_size)) if is_theirs else None


@dataclass(frozen=True)
class Times:
    """Times of one round: the median rank's times in us, and what all ranks' writes were."""

    dispatch_us: float
    combine_us: float
    dispatch_bytes: int
    combine_bytes: int
    dispatch_writes: int
    combine_writes: int


def simulate(
    shape: Round,
    network: Network,
    scheme: int,
    *,
    first_write_us: float = 15.0,
    in_domain_us: float = 5.0,
    private_tokens: int | None = None,
    chunk_rows: int = 0,
    seed: int = 0,
) -> Times:
    """One round in virtual time, with the product's proxies (AGENTS) or by routes first (ROUTES).

    Raises:
        ValueError: A number is out of range; the message names it.
        BackendUnavailable: The library of probes is not there.
    """
    times = [(c_uint64 * max(1, shape.ep_size))() for _ in range(2)]
    args = DomainsArgs(
        scheme=scheme,
        ep_size=shape.ep_size,
        domain_size=shape.domain_size,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        num_tokens=shape.num_tokens,
        row_bytes=shape.row_bytes,
        back_row_bytes=shape.back_row_bytes,
        private_tokens=network.private_tokens if private_tokens is None else private_tokens,
        chunk_rows=chunk_rows,
        seed=seed,
        first_write_ns=round(1000 * first_write_us),
        in_domain_ns=round(1000 * in_domain_us),
        latency_ns=round(1000 * network.latency_us),
        post_ns=round(1000 * network.post_us),
        write_ns=round(1000 * network.write_us),
        bytes_per_ns=network.gbps,
        dispatch_ns=times[0],
        combine_ns=times[1],
    )
    call("putget_probe_domains", ctypes.byref(args))
    dispatch, combine = (float(np.median(np.array(one))) / 1000 for one in times)
    counts = args.dispatch_bytes, args.combine_bytes, args.dispatch_writes, args.combine_writes
    return Times(dispatch, combine, *counts)
