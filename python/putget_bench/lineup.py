"""The contenders of a bench."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from putget_bench import peers
from putget_bench.contender import PHASES, Contender
from putget_bench.launch import Emit
from putget_bench.rounds import Rounds
from putget_bench.settings import Settings


@dataclass(frozen=True)
class Entry:
    """One contender of a run.

    Attributes:
        contender: what is timed.
        settings: the rows that it moves.
        phases: what is timed of it.
        group: of a variant of putget, what it belongs to.
        changes: of a variant of putget, what it does differently.
    """

    contender: Contender
    settings: Settings
    phases: tuple[str, ...] = PHASES
    group: str | None = None
    changes: str | None = None

    @property
    def name(self) -> str:
        """The contender's name."""
        return self.contender.name


class Lineup:
    """Putget and its variants, which must take part, and peers, which may drop out at a size that they do not support.

    Attributes:
        ours: putget as it is by default in this run.
    """

    def __init__(
        self,
        ours: Entry,
        variants: Sequence[Entry],
        by_peer: dict[str, list[Contender]],
        statuses: Sequence[peers.PeerStatus],
        emit: Emit,
    ) -> None:
        self.ours = ours
        self._variants = variants
        self._by_peer = {
            name: [Entry(contender, ours.settings) for contender in contenders] for name, contenders in by_peer.items()
        }
        self._statuses = {status.name: status for status in statuses}
        self._emit = emit
        self._report()

    def load(self, rounds: Rounds, num_tokens: int) -> tuple[list[Entry], dict[str, str | None]]:
        """Runs everyone once. Collective.

        Returns:
            Who is timed at this size, the same on every rank; and by name what is wrong with a result here.
        """
        present = [entry for entry in (self.ours, *self._variants) if entry.contender.takes(num_tokens)]
        wrong = {entry.name: entry.contender.load(rounds.make(entry.settings, num_tokens)) for entry in present}
        for peer in list(self._by_peer):
            for entry in list(self._by_peer[peer]):
                if not entry.contender.takes(num_tokens):
                    continue
                found, failed = None, None
                try:
                    found = entry.contender.load(rounds.make(entry.settings, num_tokens))
                except Exception as error:
                    failed = peers.one_line(error)
                everyone = [failed] * dist.get_world_size()
                dist.all_gather_object(everyone, failed)
                failed = next((theirs for theirs in everyone if theirs is not None), None)
                if failed is None:
                    present.append(entry)
                    wrong[entry.name] = found
                else:
                    self._drop(peer, entry, f"{entry.name} at {num_tokens} tokens a rank: {failed}")
        return present, wrong

    def close(self) -> None:
        """Closes everyone."""
        for entry in (self.ours, *self._variants, *(e for entries in self._by_peer.values() for e in entries)):
            entry.contender.close()

    def _drop(self, peer: str, entry: Entry, why: str) -> None:
        entry.contender.close()
        self._by_peer[peer].remove(entry)
        status = self._statuses[peer]
        if self._by_peer[peer]:
            self._statuses[peer] = replace(status, detail=f"{status.detail}; left out: {why}")
        else:
            self._statuses[peer] = replace(status, status=peers.NOT_SUPPORTED, detail=why)
        self._report()

    def _report(self) -> None:
        self._emit({"kind": "peers", "peers": [asdict(status) for status in self._statuses.values()]})
