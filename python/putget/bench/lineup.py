"""Who takes part in a bench."""

from __future__ import annotations

from dataclasses import asdict

import torch.distributed as dist

from putget.bench import peers
from putget.bench.contender import Contender, Putget, Round
from putget.bench.launch import Emit


class Lineup:
    """Who takes part: putget, which must, and peers, which may drop out at a size that they do not support."""

    def __init__(
        self, ours: Putget, by_peer: dict[str, list[Contender]], statuses: list[peers.PeerStatus], emit: Emit
    ) -> None:
        self._ours = ours
        self._by_peer = by_peer
        self._statuses = statuses
        self._emit = emit
        self._report()

    def load(self, round_: Round) -> tuple[list[Contender], dict[str, str | None]]:
        """Runs everyone once. Collective.

        Returns:
            Who is timed at this size, the same on every rank; and by name what is wrong with a result here.
        """
        present: list[Contender] = [self._ours]
        wrong = {self._ours.name: self._ours.load(round_)}
        for name, contenders in list(self._by_peer.items()):
            present_of_peer = [contender for contender in contenders if contender.takes(round_.num_tokens)]
            failed: str | None = None
            try:
                found = {contender.name: contender.load(round_) for contender in present_of_peer}
            except Exception as error:
                failed = peers.one_line(error)
            everyone = [failed] * dist.get_world_size()
            dist.all_gather_object(everyone, failed)
            failed = next((theirs for theirs in everyone if theirs is not None), None)
            if failed is None:
                present += present_of_peer
                wrong.update(found)
                continue
            self._drop(name, f"at {round_.num_tokens} tokens a rank: {failed}")
        return present, wrong

    def close(self) -> None:
        """Closes everyone."""
        for contender in (self._ours, *(c for contenders in self._by_peer.values() for c in contenders)):
            contender.close()

    def _drop(self, name: str, why: str) -> None:
        for contender in self._by_peer.pop(name):
            contender.close()
        self._statuses = [
            peers.PeerStatus(name, peers.NOT_SUPPORTED, why) if status.name == name else status
            for status in self._statuses
        ]
        self._report()

    def _report(self) -> None:
        self._emit({"kind": "peers", "peers": [asdict(status) for status in self._statuses]})
