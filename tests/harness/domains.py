"""Virtual domains for tests: their cases, the bodies that ranks play in them, and masks of active ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import putget
from tests.harness.cases import COMBINE, DISPATCH, ENDINGS, Case, Round
from tests.harness.compare import check_round, play_round
from tests.harness.rank import Rank
from tests.harness.run import run_ranks


@dataclass(frozen=True)
class World:
    """The network of the domains, and the device of the ranks: ranks on CUDA are emulated on one GPU."""

    provider: str = "sim"
    device: str = "cpu"

    def run(self, size: int, domain_size: int, body: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        joined = network(domain_size, self.provider)
        return run_ranks(size, body, *args, mode="thread", device=self.device, timeout=timeout, network=joined)


def network(size: int, provider: str = "sim") -> putget.Network:
    return putget.Network(provider, domain_size=size)


def in_domains(case: Case, domain_size: int) -> Case:
    return replace(case, domain_of=network(domain_size).domain_of(case.ep_size))


def ragged(ep_size: int, count: int, seed: int, most: int) -> tuple[Round, ...]:
    """Rounds with few tokens, none on some ranks and in some rounds none at all."""
    generator = torch.Generator().manual_seed(seed)
    rounds = []
    for number in range(count):
        drawn = torch.randint(-most // 2, most + 1, (ep_size,), generator=generator).clamp(min=0)
        tokens = tuple(drawn.tolist()) if number % 7 else (0,) * ep_size
        ending = ENDINGS[int(torch.randint(len(ENDINGS), (1,), generator=generator))]
        halves = tuple(torch.randint(DISPATCH + COMBINE + 1, (ep_size,), generator=generator).tolist())
        rounds.append(Round(seed * 1000 + number, tokens, ending, no_expert=0.2, addend=number % 3 == 0, halves=halves))
    return tuple(rounds)


def ragged_case(ep_size: int, domain_size: int, count: int) -> Case:
    """Such rounds, with rows of two kinds and statistics."""
    case = Case(
        ep_size,
        ragged(ep_size, count, ep_size + domain_size, 9),
        num_experts=2 * ep_size + 1,
        top_k=5,
        max_tokens_per_rank=9,
        payloads=(((24,), torch.bfloat16), ((3,), torch.uint8)),
        output=((24,), torch.bfloat16),
        num_stats=3,
    )
    return in_domains(case, domain_size)


def play_many(rank: Rank, case: Case, repeats: int) -> int:
    """A body: plays the rounds of a case again and again; the number of wrong ones."""
    wrong = 0
    with rank.all_to_all(**case.options()) as a2a:
        first = [play_round(a2a, rank, case, index) for index in range(len(case.rounds))]
        for _ in range(repeats - 1):
            for index, want in enumerate(first):
                got = play_round(a2a, rank, case, index)
                same = (got.combined is None) == (want.combined is None)
                if same and got.combined is not None and want.combined is not None:
                    same = torch.equal(got.combined, want.combined)
                wrong += not (same and torch.equal(got.topk_ids, want.topk_ids))
        rank.wait()
        rank.meet()  # as in play
    return wrong


def outlast(rank: Rank, gone: int, step: str, rounds: int) -> str | None:
    """A body: plays rounds until rank `gone` stops; what the others then raise.

    All keep their objects open until the last one has raised: a rank that leaves earlier may be missed, too.
    """
    a2a = rank.all_to_all(timeout_s=3.0, warmup_timeout_s=20.0, num_experts=rank.size, top_k=rank.size)
    ids = torch.arange(rank.size, dtype=torch.int32).expand(2, rank.size).contiguous().to(rank.device)
    rows, weights = torch.ones(2, 4, device=rank.device), torch.ones(2, rank.size, device=rank.device)
    rank.meet()
    try:
        for number in range(rounds + 1):
            if number == rounds and rank.rank == gone and step == "dispatch":
                return _close_together(rank, a2a)
            received = a2a.dispatch(ids, weights, rows)
            if number == rounds and rank.rank == gone:
                return _close_together(rank, a2a)
            a2a.combine_input.copy_(received.payloads[0])
            a2a.combine()
            a2a.check()
    except putget.PeerTimeout as error:
        _close_together(rank, a2a)
        return f"{error.phase} {error.missing}"
    a2a.close()
    return None


def _close_together(rank: Rank, a2a: putget.AllToAll) -> None:
    """Closes it when all ranks are here."""
    rank.comm.exchange("the others have raised", None, 60.0)
    a2a.close()


class Masks:
    """Active ranks that change; the members of each mask meet by themselves, and all when it is over."""

    def __init__(self, *masks: tuple[bool, ...]) -> None:
        self.masks = masks
        self._over = threading.Barrier(len(masks[0]))
        self._members = [threading.Barrier(sum(mask)) for mask in masks]

    def play(self, rank: Rank, a2a: putget.AllToAll, body: Callable[[Rank, tuple[bool, ...]], Any]) -> list[Any]:
        """The results of the body under each mask; None where the rank is left out."""
        outcomes: list[Any] = []
        for number, mask in enumerate(self.masks):
            outcomes.append(None)
            if mask[rank.rank]:
                if number > 0:
                    a2a.set_active_ranks(mask)
                assert a2a.active_ranks == mask
                me = rank if rank._barrier is None else replace(rank, _barrier=self._members[number])
                outcomes[-1] = body(me, mask)
                rank.wait()
            self._over.wait(60)
        return outcomes


def come_and_go(rank: Rank, case: Case, masks: Masks) -> list[Any]:
    """A body: the rounds of a case under one mask after the other; ranks that are left out wait for their turn."""
    with rank.all_to_all(**case.options()) as a2a:

        def rounds(me: Rank, mask: tuple[bool, ...]) -> list[Any]:
            under_it = replace(case, active=mask)
            return [play_round(a2a, me, under_it, index) for index in range(len(case.rounds))]

        return masks.play(rank, a2a, rounds)


def check_masks(case: Case, masks: Masks, found: list[Any]) -> None:
    """Every round under every mask has the bits of the oracle."""
    for number, mask in enumerate(masks.masks):
        for index in range(len(case.rounds)):
            held = {rank: found[rank][number][index] for rank in range(case.ep_size) if mask[rank]}
            check_round(replace(case, active=mask), index, held)


def only(size: int, *members: int) -> tuple[bool, ...]:
    return tuple(rank in members for rank in range(size))
