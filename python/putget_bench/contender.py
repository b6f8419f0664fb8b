"""Contenders of the bench: the interface, the expected results, and putget itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from putget import AllToAll, Communicator, Received, reference
from putget_bench.inputs import Experts, Inputs, Source, StandInExperts, same_bytes
from putget_bench.settings import Settings
from putget_bench.traffic import Traffic

PHASES = ("dispatch", "combine", "pair")
_FP8_TOLERANCE = 0.06  # rows rounded to E4M3, which has 3 bits of mantissa
ROUND_TIMEOUT_S = 120.0  # ranks compute the expected results between rounds, on few cores one after the other


@dataclass(frozen=True)
class Round:
    """One size: what every rank sends, and what this rank must get back.

    Attributes:
        rank: this rank.
        inputs: the arguments of every rank.
        routings: the reference's routing of every rank.
        output: [num_tokens, hidden_size], what combine must return here.
    """

    rank: int
    inputs: tuple[Inputs, ...]
    routings: tuple[reference.Routing, ...]
    output: Tensor

    @property
    def mine(self) -> Inputs:
        """The tokens that this rank sends."""
        return self.inputs[self.rank]

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return len(self.mine.topk_ids)

    def tokens_from(self, src: int, dst: int) -> Tensor:
        """The tokens that src sends to dst in slot order: [num_rows] int64."""
        return (self.routings[src].target_ranks == dst).any(dim=1).nonzero()[:, 0]


def make_round(settings: Settings, source: Source, rank: int, num_tokens: int) -> Round:
    """Generates the inputs of one size and routes them with the reference. The result is still empty."""
    inputs = tuple(source.inputs(src, num_tokens) for src in range(settings.ep_size))
    table = reference.default_expert_to_rank(settings.num_experts, settings.ep_size)
    routings = tuple(reference.route(sent.topk_ids, table, settings.ep_size) for sent in inputs)
    return Round(rank, inputs, routings, torch.empty(0))


def with_output(
    settings: Settings, experts: StandInExperts, round_: Round, domain_of: tuple[int, ...] | None = None
) -> Round:
    """Computes this rank's result with the reference, from what this rank sends and from what the experts are.

    Args:
        settings: shapes.
        experts: what runs between dispatch and combine.
        round_: of this rank.
        domain_of: the domain of each rank; None: all ranks are one.
    """
    held = []
    for dst in range(settings.ep_size):
        tokens = round_.tokens_from(round_.rank, dst)
        rows = experts.rows(
            dst,
            round_.mine.topk_ids[tokens],
            round_.mine.topk_weights[tokens],
            [payload[tokens] for payload in round_.mine.payloads],
        )
        held.append(rows[None].expand(settings.ep_size, *rows.shape))  # the reference reads this source's split only
    output = reference.combine(round_.routings[round_.rank], held, round_.rank, domain_of=domain_of)
    return replace(round_, output=output)


class Contender(Protocol):
    """One implementation of the all-to-all under measurement. `load` comes first; the others work on its inputs."""

    name: str

    def takes(self, num_tokens: int) -> bool:
        """Whether it is timed at this size. The same on every rank."""

    def load(self, round_: Round) -> str | None:
        """Takes the inputs of one size and runs it once. Returns what is wrong with the result, or None."""

    def dispatch(self) -> object:
        """Sends tokens to experts."""

    def write_rows(self) -> None:
        """Stands for the experts: writes the rows that combine sends back."""

    def combine(self) -> None:
        """Brings the experts' rows back and adds them."""

    def verify(self) -> str | None:
        """Looks at the last combine's result, or plays a round to look at. Returns what is wrong, or None."""

    def wire_bytes(self, traffic: Traffic) -> tuple[float, float]:
        """Bytes that leave a rank in dispatch and in combine."""

    def close(self) -> None:
        """Gives everything back."""


class Putget:
    """putget itself, with zero-copy combine.

    Args:
        communicator: the ranks.
        settings: shapes.
        experts: what runs between dispatch and combine.
        device: where this rank works.
        **options: further arguments of `putget.AllToAll`, or others for those that settings give.

    Attributes:
        rows: [ep_size, max_rows, hidden_size], what the experts of this rank made of the rows they received.
        output: [num_tokens, hidden_size], the result of the last combine.
    """

    name: str = "putget"

    rows: Tensor
    output: Tensor

    def __init__(
        self,
        communicator: Communicator,
        settings: Settings,
        experts: Experts,
        device: torch.device,
        **options: Any,
    ) -> None:
        self._experts = experts
        arguments: dict[str, Any] = {
            "num_experts": settings.num_experts,
            "top_k": settings.top_k,
            "max_tokens_per_rank": settings.max_tokens_per_rank,
            "payloads": settings.payloads(),
            "output": settings.output(),
            "device": device,
            "num_sms": settings.num_sms,
            "num_threads": torch.get_num_threads() if device.type == "cpu" else 1,  # as many as peers have
            "timeout_s": ROUND_TIMEOUT_S,
            **settings.combine_options(),
        }
        self._settings = settings
        self._beside: dict[str, Any] = {}
        self._all_to_all = AllToAll(communicator, **{**arguments, **options})

    def memory_map(self) -> str:
        """The workspace of one rank."""
        return str(self._all_to_all)

    def takes(self, num_tokens: int) -> bool:
        """See `Contender.takes`: also nothing at all, because a round still meets every rank."""
        return True

    def load(self, round_: Round) -> str | None:
        """See `Contender.load`. The received bytes and the result must be those of the reference, bit for bit."""
        wrong = self.receive(round_)
        wrong_result = self.finish(round_)  # the other ranks are in it, whatever this one has received
        return wrong or wrong_result

    def receive(self, round_: Round) -> str | None:
        """Dispatches and runs the experts. Returns what is wrong with what arrived, or None."""
        self._round = round_
        received = self.dispatch()
        wrong = received_differs(received, round_)
        self.rows = self._experts.rows(round_.rank, received.topk_ids, received.topk_weights, received.payloads)
        self.write_rows()
        return wrong

    def finish(self, round_: Round) -> str | None:
        """Combines. Returns what is wrong with the result, or None."""
        self._round = round_
        self.output = torch.empty_like(round_.output)
        self.combine()
        return self.verify()

    def dispatch(self) -> Received:
        """See `Contender.dispatch`."""
        mine = self._round.mine
        # Every rank has the same number of tokens, so receivers may be as small as that. An engine knows it likewise.
        max_rows = max(1, self._round.num_tokens)
        return self._all_to_all.dispatch(
            mine.topk_ids, mine.topk_weights, *mine.payloads, max_rows=max_rows, **self._beside
        )

    def write_rows(self) -> None:
        """See `Contender.write_rows`."""
        self._all_to_all.combine_input.copy_(self.rows)

    def combine(self) -> None:
        """See `Contender.combine`."""
        self._all_to_all.combine(out=self.output)

    def verify(self) -> str | None:
        """See `Contender.verify`."""
        self._all_to_all.check()
        if self._settings.combine_is_fp8:
            return differs_beyond_rounding(self.output, self._round.output, _FP8_TOLERANCE)
        if same_bytes(self.output, self._round.output):
            return None
        differ = (self.output != self._round.output).any(dim=1).nonzero()[:, 0].tolist()
        of = self._round.num_tokens
        return f"combine differs from the reference in {len(differ)} of {of} tokens, first {differ[:3]}"

    def wire_bytes(self, traffic: Traffic) -> tuple[float, float]:
        """See `Contender.wire_bytes`."""
        saved = 1 - self._all_to_all.combine_row_bytes / self._settings.output().row_bytes
        # Rows stay as they are written inside a domain, where there are several.
        shrunk = traffic.combine if self._settings.network is None else traffic.combine_between_domains
        return traffic.dispatch, traffic.combine - saved * shrunk

    def sends_rows(self) -> bool:
        """Whether the rows of combine leave a rank by stores, as sentinel rows, at the loaded size."""
        launch = self._all_to_all.launches(self._round.num_tokens)[1]
        return launch.sentinel_rows is True

    def close(self) -> None:
        """See `Contender.close`."""
        self._all_to_all.close()


class NoWaits(Putget):
    """putget, in a library that waits for nobody: unsafe, and its results are not looked at."""

    name = "putget, no waits (UNSAFE)"

    def load(self, round_: Round) -> str | None:
        """See `Contender.load`. What arrived is not looked at, and experts do not work on it."""
        self._round = round_
        self.output = torch.empty_like(round_.output)
        self.dispatch()
        self.rows = torch.zeros_like(self._all_to_all.combine_input)
        self.write_rows()
        self.combine()
        return None

    def verify(self) -> str | None:
        """See `Contender.verify`; likewise."""
        return None


def received_differs(received: Received, round_: Round) -> str | None:
    """Compares what arrived with what the reference says that every source sent; None if every byte is right."""
    num_tokens = received.num_tokens.tolist()
    for src, sent in enumerate(round_.inputs):
        tokens = round_.tokens_from(src, round_.rank)
        if num_tokens[src] != len(tokens):
            return f"dispatch delivered {num_tokens[src]} rows of rank {src}, the reference {len(tokens)}"
        got = [split[src, : len(tokens)] for split in (received.topk_ids, received.topk_weights, *received.payloads)]
        want = [values[tokens] for values in (sent.topk_ids, sent.topk_weights, *sent.payloads)]
        names = ["topk_ids", "topk_weights", *(f"payload {i}" for i in range(len(sent.payloads)))]
        for name, a, b in zip(names, got, want, strict=True):
            if not same_bytes(a, b):
                return f"dispatch: {name} of rank {src} differs from the reference"
        if bool((received.topk_ids[src, len(tokens) :] != -1).any()):
            return f"dispatch: an empty slot of rank {src} has an expert"
    return None


def differs_beyond_rounding(got: Tensor, want: Tensor, tolerance: float) -> str | None:
    """Relative error of peers, which add in an order of their own: None if every token is within the tolerance."""
    if len(want) == 0:
        return None
    error = (got.float() - want.float()).norm(dim=1) / want.float().norm(dim=1).clamp(min=1e-30)
    worst = error.max().item()
    return None if worst <= tolerance else f"relative error {worst:.3g} is above {tolerance}"
