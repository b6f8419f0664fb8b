"""Who takes part in a bench."""

from __future__ import annotations

from dataclasses import asdict, replace

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
        self._statuses = {status.name: status for status in statuses}
        self._emit = emit
        self._report()

    def load(self, round_: Round) -> tuple[list[Contender], dict[str, str | None]]:
        """Runs everyone once. Collective.

        Returns:
            Who is timed at this size, the same on every rank; and by name what is wrong with a result here.
        """
        present: list[Contender] = [self._ours]
        wrong = {self._ours.name: self._ours.load(round_)}
        for name in list(self._by_peer):
            for contender in list(self._by_peer[name]):
                if not contender.takes(round_.num_tokens):
                    continue
                found, failed = None, None
                try:
                    found = contender.load(round_)
                except Exception as error:
                    failed = peers.one_line(error)
                everyone = [failed] * dist.get_world_size()
                dist.all_gather_object(everyone, failed)
                failed = next((theirs for theirs in everyone if theirs is not None), None)
                if failed is not None:
                    self._drop(name, contender, f"{contender.name} at {round_.num_tokens} tokens a rank: {failed}")
                    continue
                present.append(contender)
                wrong[contender.name] = found
        return present, wrong

    def close(self) -> None:
        """Closes everyone."""
        for contender in (self._ours, *(c for contenders in self._by_peer.values() for c in contenders)):
            contender.close()

    def _drop(self, name: str, contender: Contender, why: str) -> None:
        contender.close()
        self._by_peer[name].remove(contender)
        status = self._statuses[name]
        if self._by_peer[name]:
            self._statuses[name] = replace(status, detail=f"{status.detail}; left out: {why}")
        else:
            self._statuses[name] = replace(status, status=peers.NOT_SUPPORTED, detail=why)
        self._report()

    def _report(self) -> None:
        self._emit({"kind": "peers", "peers": [asdict(status) for status in self._statuses.values()]})
