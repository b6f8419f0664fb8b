"""Agreement of ranks on who goes on together (docs/protocol.md, *Agreement*; the model is native/model/agreement.pml).

Every member tells every rank whom it wants (*join*), and once all members have joined alike, which joins it has heard
(*confirm*). Members that have heard equal confirms meet: they take the two steps of ``Workspace`` that share memory,
and across domains the two of ``DomainRounds`` that join networks. A
member that gives up says whom it missed (*left*), and whoever is with it in that attempt gives up too, missing the same
ranks. Where two miss each other, the one that said so first is believed: the other's word says that it is an answer.
So the ranks that answer each other stay together, whatever becomes of the others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from putget.errors import PeerLeft, PeerTimeout
from putget.group import files as descriptors
from putget.group.mesh import Deadline, Mesh, error_of, farewell

_ANSWER_S = 3.0  # in which a rank that lives says whom it misses, at most half of the deadline: also on a busy host
_PATIENCE_S = 1.0  # with a wish that differs: its rank may be about to give up

# How far an attempt has come. Whoever is further waits longer for word of those behind it.
_JOINING, _CONFIRMING, SHARING, STARTING, CONNECTING, RUNNING = 1, 2, 3, 4, 5, 6


@dataclass
class _Join:
    """A peer's wish: its last join, until that is taken back."""

    number: int
    workspace: int
    members: list[int]
    epoch: int
    step: int
    given_up: list[int]  # ranks that it missed since it last went on, and does not want
    answers: list[int]  # those of them that had missed it before
    files: list[int]  # descriptors that it has left, and needs
    heard_at: float
    is_fresh: bool  # heard during this rank's attempt


class _Patience(Deadline):
    """The deadline of one stage. At its end all are asked once more: those who are behind say whom they miss.

    Whoever is asked asks too, and whoever has come further waits longer for an answer.
    """

    def __init__(self, attempt: Attempt, timeout_s: float, answer_s: float) -> None:
        super().__init__(timeout_s)
        self._attempt = attempt
        self._answer_s = answer_s
        self._asked_at: float | None = None

    def left(self) -> float:
        end = self.at if self._asked_at is None else self._asked_at + self._attempt.stage * self._answer_s
        return max(end, self._attempt.held_until) - time.monotonic()

    def put_off(self) -> bool:
        if self.left() > 0:
            return True  # for a word that came at the end, and is held
        if self._asked_at is not None or self._attempt.stage == _JOINING:
            return False  # a rank that has not joined has not come
        self.ask()
        return True

    def ask(self) -> None:
        """This deadline has passed, or a peer's: what is to be said is said soon."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._attempt.ask()


class Agreement:
    """Messages between the ranks of one mesh about who goes on. Attempts come one after the other."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.joins: dict[int, _Join] = {}
        self.confirms: dict[int, list[int]] = {}
        self.given_up: set[int] = set()  # missed since this rank last went on
        self.answers: set[int] = set()  # those of them that had missed this rank before
        self._missed_by: set[int] = set()  # ranks that gave up on this one, and have not wanted it since
        self._number = 0

    @contextlib.contextmanager
    def attempt(
        self, workspace: int, members: list[int], epoch: int, timeout_s: float, files: int = 0
    ) -> Iterator[Attempt]:
        """Agrees on members; the body meets them. Any error, also the body's, takes the join back.

        Args:
            workspace: Its number.
            members: Ranks in order, with this one.
            epoch: This rank's.
            timeout_s: Deadline of each stage, in seconds.
            files: Descriptors that the body opens: every member has so many left, or all end.

        Raises:
            ValueError: A member wants other members, or is at another workspace.
            PeerTimeout: A member does not answer, or one that does misses it.
            PeerLeft: A member has left this attempt by an error of its own, or may not open as many files as it needs.
            PutgetError: This rank may not.
        """
        self._number += 1
        attempt = Attempt(self, self._number, workspace, members, epoch, timeout_s, files)
        try:
            attempt.agree()
            self.mesh.begin("set_active_ranks", members, after=attempt.after)
            yield attempt
        except BaseException as error:
            is_own = isinstance(error, PeerLeft) or not isinstance(error, PeerTimeout)
            # A rank that has left by an error of its own answers: nobody misses it.
            missing = error.missing if isinstance(error, PeerTimeout) and not is_own else ()
            if is_own:
                self.mesh.leave(error)
            self.given_up.update(missing)
            self.answers.update(self._missed_by.intersection(missing))
            answers = sorted(self.answers.intersection(missing))
            left = {"left": self._number, "missing": missing, "answers": answers}
            if is_own:
                left["word"] = attempt.heard or farewell(self.mesh.rank, "set_active_ranks", error)
            self.say(self.mesh.peers, left, timeout_s)
            raise
        finally:
            self.mesh.end()
        for ranks in (self.given_up, self.answers, self._missed_by):
            ranks.clear()

    def say(self, ranks: Iterable[int], fields: dict[str, Any], timeout_s: float) -> None:
        """Says the same to several ranks."""
        for rank in ranks:
            self.mesh.peers[rank].send(fields, [], timeout_s)

    def hear_old(self) -> None:
        """Takes what was said before this rank's attempt: joins stand, the rest is over."""
        for rank, peer in self.mesh.peers.items():
            peer.receive_all()
            while peer.agreement:
                self.note(rank, peer.agreement.popleft(), is_fresh=False)

    def note(self, rank: int, fields: dict[str, Any], is_fresh: bool) -> None:
        """Keeps a join or a confirm of this rank; forgets a join that is taken back."""
        if self.mesh.rank in fields.get("members", ()):
            self._missed_by.discard(rank)
        elif self.mesh.rank in fields.get("missing", ()):
            self._missed_by.add(rank)
        if "join" in fields:
            self.joins[rank] = _Join(
                number=fields["join"],
                workspace=fields["workspace"],
                members=fields["members"],
                epoch=fields["epoch"],
                step=fields["step_at"],
                given_up=fields["given_up"],
                answers=fields["answers"],
                files=fields.get("files", [0, 0]),
                heard_at=time.monotonic(),
                is_fresh=is_fresh,
            )
        elif "left" in fields and rank in self.joins and self.joins[rank].number == fields["left"]:
            del self.joins[rank]
        elif "confirm" in fields:
            self.confirms[rank] = fields["confirm"]


class Attempt:
    """One call of ``set_active_ranks``.

    Attributes:
        stage: How far it has come.
        held_until: When the last of the words that only answer others is believed all the same.
        epoch: This rank's; once agreed, the highest among the members.
        deadline: Of the stage.
        heard: The word of a member that has left it by an error of its own, once it has come.
        after: Once agreed, the highest number of an attempt that is over on another member (``Mesh.begin``).
    """

    def __init__(
        self,
        agreement: Agreement,
        number: int,
        workspace: int,
        members: list[int],
        epoch: int,
        timeout_s: float,
        files: int,
    ) -> None:
        self._agreement = agreement
        self._mesh = agreement.mesh
        self._number = number
        self._workspace = workspace
        self._members = members
        self._others = [rank for rank in members if rank != self._mesh.rank]
        self._timeout_s = timeout_s
        self._files = files
        self._since = time.monotonic()
        self._own: dict[str, Any] = {}  # this rank's join
        self._told: list[int] = []  # numbers of the joins that this rank has confirmed
        self._together: dict[int, int] = {}  # once agreed: the number of each member's join
        self._held: dict[int, tuple[float, set[int]]] = {}  # answers: until when, and whom they miss
        self.after = 0
        self.heard: dict[str, Any] = {}
        self.stage = _JOINING
        self.held_until = 0.0
        self.epoch = epoch
        self._answer_s = min(_ANSWER_S, timeout_s / 2)
        # A member may come one round's deadline after this rank: its last round may wait for this rank.
        self.deadline = _Patience(self, 2 * timeout_s, self._answer_s)

    def agree(self) -> None:
        """Returns once every member has confirmed the same joins. Raises as ``Agreement.attempt``."""
        agreement, mesh = self._agreement, self._mesh
        agreement.hear_old()
        self._own = {
            "join": self._number,
            "workspace": self._workspace,
            "members": self._members,
            "epoch": self.epoch,
            "step_at": mesh.number,
            "files": [descriptors.left(), self._files],
            "given_up": sorted(agreement.given_up - set(self._members)),
            "answers": sorted(agreement.answers - set(self._members)),
        }
        agreement.say(mesh.peers, self._own, self._timeout_s)
        mesh.wait(self._look, self._missing, self.deadline, "set_active_ranks", self.epoch)
        joins = {peer: agreement.joins.pop(peer) for peer in self._others}
        self._together = {peer: join.number for peer, join in joins.items()}
        self.after = max(join.step for join in joins.values()) if joins else 0
        self.epoch = max([self.epoch, *(join.epoch for join in joins.values())])
        self._require_files({mesh.rank: self._own["files"], **{peer: join.files for peer, join in joins.items()}})

    def _require_files(self, files: dict[int, list[int]]) -> None:
        """All members raise alike where one may not open the files that it needs: nothing has changed yet."""
        for rank, (left, needed) in sorted(files.items()):
            if left < needed:
                error = descriptors.lacking(rank, left, needed)
                self.heard = farewell(rank, "set_active_ranks", error)
                raise error if rank == self._mesh.rank else error_of(self.heard, self._mesh.rank, "set_active_ranks")

    def begin(self, stage: int) -> None:
        """The members have agreed, and take the next step together: SHARING, STARTING, and across domains two more."""
        self.stage = stage
        self.deadline = _Patience(self, self._timeout_s, self._answer_s)

    def ask(self) -> None:
        """A deadline has passed: whoever misses others is to say so."""
        self._agreement.say(self._others, {"hurry": self._number}, self._timeout_s)

    def heed(self) -> None:
        """Takes what members have said.

        Raises:
            PeerTimeout: A member that was with this rank has given up; the same ranks are missing.
            PeerLeft: It has left by an error of its own.
            ValueError: A member has found a conflict.
        """
        for peer in self._others:
            queue = self._mesh.peers[peer].agreement
            while queue:
                self._take(peer, queue.popleft())
        for until, missing in self._held.values():
            if until <= time.monotonic():
                self._give_up(missing)

    def _take(self, peer: int, fields: dict[str, Any]) -> None:
        is_with = self._is_with(peer)
        if "left" in fields:
            number = self._number_of(peer)
            self._agreement.note(peer, fields, is_fresh=True)
            if is_with and number == fields["left"]:
                self._end_with(fields.get("word"))
                self._follow(peer, set(fields["missing"]), fields["answers"])
        elif "hurry" in fields:
            if is_with and self._number_of(peer) == fields["hurry"]:
                self.deadline.ask()
        elif "conflict" in fields:
            if fields["yours"] == self._number:
                raise ValueError(fields["conflict"])
        else:
            self._agreement.note(peer, fields, is_fresh=True)

    def _end_with(self, word: dict[str, Any] | None) -> None:
        """Raises what a member says that has left by an error of its own; None: it misses others."""
        if word is not None:
            self.heard = word
            raise error_of(word, self._mesh.rank, "set_active_ranks")

    def _follow(self, peer: int, missing: set[int], answers: Iterable[int]) -> None:
        """A member has given up: so does this rank, unless it is missed itself, or the earlier word is on its way."""
        if missing and self._mesh.rank not in missing and not self._is_held(peer, time.monotonic(), missing, answers):
            self._give_up(missing)

    def _is_held(self, peer: int, heard_at: float, missing: set[int], answers: Iterable[int]) -> bool:
        """Whether a word of a peer only answers members' words, which come with it or soon behind it."""
        if missing.intersection(answers, self._others):
            self._held.setdefault(peer, (heard_at + self._answer_s, missing))
            self.held_until = max(until for until, _ in self._held.values())
        return peer in self._held

    def _number_of(self, peer: int) -> int | None:
        if self._together:
            return self._together[peer]
        join = self._agreement.joins.get(peer)
        return None if join is None else join.number

    def _is_with(self, peer: int) -> bool:
        """Whether a member wants what this rank wants."""
        join = self._agreement.joins.get(peer)
        return bool(self._together) or (
            join is not None and (join.workspace, join.members) == (self._workspace, self._members)
        )

    def _give_up(self, missing: set[int]) -> None:
        raise PeerTimeout("set_active_ranks", self._mesh.rank, self.epoch, missing)

    def _look(self) -> bool:
        self.heed()
        agreement = self._agreement
        if not all(self._is_with(peer) for peer in self._others):
            self.stage = _JOINING
            for peer in self._others:
                self._judge(peer)
            return False
        self.stage = _CONFIRMING
        heard = [self._number if rank == self._mesh.rank else agreement.joins[rank].number for rank in self._members]
        if heard != self._told:
            self._told = heard
            agreement.say(self._others, {"confirm": heard}, self._timeout_s)
        return all(agreement.confirms.get(peer) == heard for peer in self._others)

    def _missing(self) -> set[int]:
        """Those who have not joined alike; only when all have, those who have not confirmed it."""
        absent = {peer for peer in self._others if not self._is_with(peer)}
        return absent or {peer for peer in self._others if self._agreement.confirms.get(peer) != self._told}

    def _judge(self, peer: int) -> None:
        """A member that wants others than this rank: it has missed some in the meantime, or it is a conflict.

        Raises:
            PeerTimeout: It does not want ranks that it has missed: here they are missing too.
            ValueError: It goes on wanting others for no such reason.
        """
        join = self._agreement.joins.get(peer)
        if join is None or self._is_with(peer) or self._mesh.rank not in join.members:
            return
        fewer = set(self._members) - set(join.members)
        more = set(join.members) - set(self._members)
        has_waited = time.monotonic() - max(join.heard_at, self._since) >= min(_PATIENCE_S, self._timeout_s / 4)
        same_workspace = join.workspace == self._workspace
        if same_workspace and fewer <= set(join.given_up) and more <= self._agreement.given_up:
            is_ripe = fewer and (join.is_fresh or has_waited)
            if is_ripe and not self._is_held(peer, max(join.heard_at, self._since), fewer, join.answers):
                self._give_up(fewer)
        elif join.is_fresh and has_waited:
            self._refuse(peer, join)

    def _refuse(self, peer: int, join: _Join) -> None:
        own = self._mesh.rank
        if join.workspace != self._workspace:
            conflict = f"workspace: rank {peer} is at {join.workspace}, rank {own} at {self._workspace}"
        else:
            conflict = f"mask: rank {peer} wants the active ranks {join.members}, rank {own} wants {self._members}"
        for other in self._others:
            known = self._agreement.joins.get(other)
            number = None if known is None else known.number
            self._agreement.say([other], {"conflict": conflict, "yours": number}, self._timeout_s)
        raise ValueError(conflict)
