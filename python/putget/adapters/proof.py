"""One round against the oracle, for an engine that is newer than those that putget was tested with.

Signatures are compared when a name is replaced (``engines.require_arguments``). What is left is whether the engine
places experts as putget believes, and whether rows come back whole: every token counts how many of its experts it has
met on the ranks that hold them, in the engine's own words.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from putget import BackendUnavailable
from putget.adapters.engines import unproven_version
from putget.adapters.rounds import Rounds


def prove(
    engine: str, rounds: Rounds, row: torch.Size | tuple[int, ...], dtype: torch.dtype, here: Collection[int]
) -> None:
    """Does nothing for an engine in a known version; else one round of small whole numbers (collective).

    Args:
        engine: As in ``engines.require_version``.
        rounds: The layer's rounds, of which none is open.
        row: Shape of a row.
        dtype: Its element type: bfloat16, float16 or float32.
        here: The experts of this rank, as the engine says.

    Raises:
        BackendUnavailable: The sums differ from the oracle's; the message says how.
        PeerTimeout: A rank did not come.
    """
    version = unproven_version(engine)
    if version is None:
        return
    rank, device = rounds.shared.comm.rank, rounds.shared.device
    num_tokens = min(rounds.max_tokens_per_rank, rank % 3 + 1)
    first = torch.arange(num_tokens)[:, None] * 5 + rank
    ids = ((first + torch.arange(rounds.top_k)) % rounds.num_experts).int().to(device)
    values = torch.arange(1, num_tokens + 1).to(device)
    rows = values.to(dtype).view(-1, *[1] * len(row)).expand(-1, *row).contiguous()
    flat = rounds.dispatch(ids, None, [rows], names=["the rows of the self-check"]).flat
    mine = torch.isin(flat.topk_ids, torch.tensor(sorted(here), dtype=torch.int32, device=device))
    met = mine.sum(1).view(-1, *[1] * len(row))
    given = torch.where(met > 0, flat.payloads[0], 0) * met.to(dtype)
    sums = rounds.combine(given.to(dtype).contiguous(), name="the rows of the self-check")
    expected = rows * rounds.top_k
    if not torch.equal(sums, expected):
        wrong = int((sums != expected).flatten(1).any(1).sum())
        raise BackendUnavailable(
            f"{engine} {version} is newer than what putget knows, and its self-check failed on rank {rank}: {wrong} of "
            f"{num_tokens} tokens did not meet each of their {rounds.top_k} experts. {engine} says that this rank has "
            f"{len(here)} of {rounds.num_experts} experts; start without PUTGET_ENGINES=1"
        )
