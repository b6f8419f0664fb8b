"""Passes of all ranks through a spread model: idle ranks take part, and ranks that are lost are left out."""

from __future__ import annotations

import bisect
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from putget import AllToAll, Communicator, PeerTimeout, PutgetError
from putget.adapters.shared import SharedWorkspace, close_shared
from putget.adapters.transformers.drafts import kept_drafts
from putget.adapters.transformers.slots import LayerSlots, Terms
from putget.balancer import Balancer, HostStore
from putget.lockstep import Bell, Lockstep

logger = logging.getLogger("putget")
_SLEEP_S = 1.0
_ATTEMPTS = 8  # further ranks may be lost while the others go on


Guard = Callable[[Callable[[], torch.Tensor]], torch.Tensor]


@dataclass
class Waits:
    """Time that passes spend in rounds. On CPU ranks it is the wait for slower ranks, beside the copies themselves.

    Attributes:
        BOUNDS_S: Times that passes are counted by, 0.1 ms to 13 s.
        seconds: Of all passes.
        counts: Passes by time: those up to each of ``BOUNDS_S``, and the longer ones.
    """

    BOUNDS_S: ClassVar[tuple[float, ...]] = tuple(1e-4 * 2**step for step in range(18))
    seconds: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * 19)

    def add(self, seconds: float) -> None:
        """Counts a pass."""
        self.seconds += seconds
        self.counts[bisect.bisect_left(self.BOUNDS_S, seconds)] += 1


class Layer(Protocol):
    """An expert layer of a spread model."""

    timeout_s: float
    waited_s: float
    num_local_experts: int
    max_tokens_per_rank: int

    def attach(self, guard: Guard, balancer: Balancer | None) -> None:
        """Runs rounds by the guard from now on; the balancer's numbers travel with them."""

    def idle(self) -> None:
        """A round without a token of this rank."""

    def idle_once(self) -> None:
        """The same without the guard."""

    def move(self, comm: Communicator, slots: LayerSlots, warmup_timeout_s: float) -> Callable[[], None]:
        """Runs rounds between other processes from now on. The call that it returns takes that back."""

    @property
    def slots(self) -> LayerSlots | None:
        """Where experts may have replicas, or move."""

    @property
    def shared(self) -> SharedWorkspace:
        """The memory of its rounds."""

    @property
    def all_to_all(self) -> AllToAll | None:
        """The all-to-all of its last round; None before the first."""


class Spread:
    """A model's expert layers on all ranks, as ``spread`` returns them.

    With draft layers, passes take turns: the model, its draft layers, the model. So ranks agree on a pass without a
    question, and ranks that only need the other one run this one idle.

    Attributes:
        comm: The ranks.
        layers: The expert layers, in the order of a pass; those of drafts behind the model's.
        drafts: transformers' MtpModel; None: there are no draft layers.
        lockstep: The passes of all ranks.
        balancer: Of the layers' experts; None where there are no spare slots.
        store: A copy of all experts; None likewise.
        members: The ranks that take part.
        recoveries: How often the ranks have gone on after a time-out.
        on_members: Called with the members after each of these.
        terms: With spare slots, what new processes of lost ranks go by.
        waits: Of the passes in which this rank had tokens.
    """

    def __init__(
        self,
        model: Any,
        comm: Communicator,
        layers: Sequence[Layer],
        timeout_s: float,
        balancer: Balancer | None = None,
        store: HostStore | None = None,
        drafts: Any = None,
        num_draft_layers: int = 0,
        terms: Terms | None = None,
    ) -> None:
        self.comm = comm
        self.terms = terms
        self.layers, self.drafts = layers, drafts
        most = len(layers) - num_draft_layers
        self._of_pass = {"model": layers[:most]} | ({} if drafts is None else {"draft": layers[most:]})
        self._names = tuple(self._of_pass)
        self.lockstep = Lockstep(comm, self._names, timeout_s=timeout_s, what="Spread.together")
        self.balancer = balancer
        self.members = tuple(range(comm.size))
        self.recoveries = 0
        self.on_members: Callable[[tuple[int, ...]], None] | None = None
        self.waits = Waits()
        self._waited_s = 0.0  # of all layers, when the last pass ended
        self._model, self.store = model, store
        self._num_draft_layers = num_draft_layers
        self._rounds = 0  # that have ended here
        self._in_pass = self._in_round = False
        self._unbalanced = -1  # a turn of passes that ranks have ended at different times, whose step all leave out
        for layer in layers:
            layer.attach(self._complete, balancer)

    # --- passes -------------------------------------------------------------------------------------------------------

    def begin(self, name: str = "model") -> None:
        """This rank begins the next pass of that name, "model" or "draft", with tokens."""
        while self._next != name:
            self._until_heard(lambda: self._begin(self._next))
            self.idle_pass()
        self._until_heard(lambda: self._begin(name))
        self._in_pass = True

    def _begin(self, name: str) -> None:
        """The same, and ranks that have finished hear of it where this one is about to go on without a rank."""
        try:
            self.lockstep.begin(name)
        except PeerTimeout:
            if self._can_recover:
                self.lockstep.announce()
            raise

    def begun(self) -> str | None:
        """The name of the next pass if another rank has begun it: this one takes part."""
        found: str | None = self._until_heard(self.lockstep.begun)
        return found

    def wait(self, bell: Bell | None, timeout_s: float) -> None:
        """Sleeps until another rank says something, the bell rings, or the time is over."""
        self._until_heard(lambda: self.lockstep.wait(bell, timeout_s))

    def end_pass(self, was_idle: bool = False) -> None:
        """This rank has run all layers of the pass."""
        turn, place = divmod(self.lockstep.number, len(self._names))
        if self.balancer is not None and place == 0 and turn != self._unbalanced:
            self.balancer.step()
        self.lockstep.end(was_idle)
        self._in_pass = False
        waited_s = sum(layer.waited_s for layer in self.layers)
        if not was_idle:
            self.waits.add(waited_s - self._waited_s)
        self._waited_s = waited_s

    def idle_pass(self) -> None:
        """Takes part in a pass of other ranks: the expert layers alone, without a token."""
        self._in_pass = True
        self._end_idle(0)

    def _end_idle(self, num_rounds: int) -> None:
        """The rest of a pass without a token, behind so many of its rounds."""
        with torch.no_grad():
            for layer in self._of_pass[self._next][num_rounds:]:
                layer.idle()
        self.end_pass(was_idle=True)

    def _can_end_idle(self, error: BaseException) -> bool:
        """Whether an error has left the rest of its pass to run: it has broken off no round."""
        if isinstance(error, Exception):
            return isinstance(error, ValueError) or not isinstance(error, PutgetError)
        # An interrupt comes anywhere, also in a forked child. The end of a broken round would wait for the deadline.
        return not self._in_round and self.comm.is_own

    def _try_end_idle(self, num_rounds: int) -> None:
        """The same for a pass that an error has ended, which the caller is to get, and no other one."""
        try:
            self._end_idle(num_rounds)
        except Exception:
            logger.exception("putget: rank %d cannot end its pass after an error", self.comm.rank)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Inside, each forward of the model, or of its drafts, is a pass. Ranks may make different numbers of them.

        If a forward raises between two rounds, this rank ends its pass without tokens: no other rank waits for it.
        At its end a rank takes part in the passes of others, until all have come there. All ranks enter it.

            with spread.together():
                model.generate(...)

        If a rank leaves it by an exception, the others hear of that between two passes: they raise, or with spare slots
        go on without that rank. A rank whose round waits for it already does so at the deadline of the round.

        Raises:
            PeerLeft: Another rank has left it by an exception, and this rank or a third one still has passes.
            PeerTimeout: A rank is gone, or did not come to a round in time.
        """
        before = self.lockstep.num_finished
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._in_step(self._model, "model"))
                if self.drafts is not None:
                    stack.enter_context(self._in_step(self.drafts, "draft"))
                    stack.enter_context(kept_drafts(self._model, self.drafts))
                yield
            self.lockstep.finish()
            while not self.lockstep.all_finished:
                if self.begun() is None:
                    self.wait(None, _SLEEP_S)
                else:
                    self.idle_pass()
        except BaseException:  # also a task that is cancelled
            self.lockstep.leave(has_finished=self.lockstep.num_finished > before)
            raise

    @property
    def _next(self) -> str:
        """The name of the next pass, or of the one that is under way."""
        return self._names[self.lockstep.number % len(self._names)]

    @contextlib.contextmanager
    def _in_step(self, module: Any, name: str) -> Iterator[None]:
        """Inside of it each forward of a module is a pass of that name."""
        forward = module.forward

        @functools.wraps(forward)  # transformers looks at its parameters
        def in_step(*args: Any, **options: Any) -> Any:
            self.begin(name)
            before, self._in_round = self._rounds, False
            try:
                found = forward(*args, **options)
            except BaseException as error:
                if self._can_end_idle(error):
                    self._try_end_idle(self._rounds - before)
                raise
            self.end_pass()
            return found

        module.forward = in_step
        try:
            yield
        finally:
            module.forward = forward

    def on(self, comm: Communicator, balancer: Balancer, store: HostStore, timeout_s: float) -> Spread:
        """The same layers on other processes, with this rank's counts. Collective.

        Args:
            comm: The ranks.
            balancer: Of the layers' experts.
            store: A copy of all experts.
            timeout_s: Deadline in seconds.
        """
        found = Spread(
            self._model,
            comm,
            self.layers,
            timeout_s,
            balancer,
            store,
            self.drafts,
            self._num_draft_layers,
            self.terms,
        )
        found.recoveries, found.waits, found.on_members = self.recoveries, self.waits, self.on_members
        return found

    def try_out(self) -> None:
        """A pass of each name in which no rank has a token. Collective: the first one between new processes.

        Raises:
            PeerTimeout: A rank does not take part; nobody goes on without it.
        """
        for name in self._names:
            with torch.no_grad():
                for layer in self._of_pass[name]:
                    layer.idle_once()
                    self._rounds += 1
            self.end_pass(was_idle=True)

    def pause(self, number: int) -> None:
        """Returns when all ranks are between two passes; none of them begins one before its caller goes on.

        Args:
            number: Of the pause, the same on all ranks, and higher than that of the one before.
        """
        self._until_heard(lambda: self.lockstep.pause(number))
        while not self.lockstep.all_paused:
            if self.begun() is None:
                self.wait(None, _SLEEP_S)
            else:
                self.idle_pass()

    def end(self) -> None:
        """Frees the workspace and ends the connections; the model cannot run any more. Idempotent."""
        self.lockstep.close()
        if self.balancer is not None:
            self.balancer.close()
        if self.store is not None:
            self.store.close()
        self.balancer = self.store = None
        close_shared(self.comm)

    # --- ranks that are lost ------------------------------------------------------------------------------------------

    def _until_heard(self, ask: Callable[[], Any]) -> Any:
        while True:
            try:
                return ask()
            except PeerTimeout as error:
                self._recover(error)

    def _complete(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One round of a layer, run again after a rank is lost."""
        self._in_round = True
        found = self._until_heard(run)
        self._in_round = False
        self._rounds += 1
        assert isinstance(found, torch.Tensor)
        return found

    @property
    def _can_recover(self) -> bool:
        return self.balancer is not None and self._rounds > 0 and self.layers[0].shared.device.type == "cpu"

    def _recover(self, error: PeerTimeout) -> None:
        """Goes on with the ranks that answer. Collective among them.

        Raises:
            PeerTimeout: There are no spare slots, or experts are on a GPU, where a round ends behind its call.
            PutgetError: The other ranks have too few slots for all experts.
        """
        if not self._can_recover:
            raise error
        for _ in range(_ATTEMPTS):
            try:
                self._go_on()
                self._catch_up()
                break
            except PeerTimeout as again:
                error = again
        else:
            raise error
        self.recoveries += 1
        if self.on_members is not None:
            self.on_members(self.members)

    def _go_on(self) -> None:
        """The ranks that answer agree, and have all experts again."""
        assert self.balancer is not None
        members = self.layers[0].shared.recover()
        lost = sorted(set(self.members) - set(members))
        self.members = members
        if lost:
            placement = self.balancer.placement
            room = placement.num_replicas // self.comm.size * len(members)
            if room < placement.num_experts:
                raise PutgetError(
                    f"rank(s) {lost} are lost; the others have {room} slots for {placement.num_experts} experts: give "
                    "more num_slots, and start again"
                )
            logger.warning("putget: rank(s) %s are lost, rank %d goes on with %s", lost, self.comm.rank, members)
        self.balancer.set_active_ranks([rank in members for rank in range(self.comm.size)])
        self.lockstep.leave_out(lost)

    def _catch_up(self) -> None:
        """Each rank comes to the round that it was in. A rank that has ended the earliest one helps the others end it.

        Ranks are never apart by more than one round, because a round ends on no rank before all have begun it.
        """
        own = [self._rounds, self.lockstep.number, int(self._in_pass)]
        said = self.comm.exchange_among(
            "round", own, self.layers[0].timeout_s, members=self.members, phase="set_active_ranks"
        )
        earliest = min(rounds for rounds, _, _ in said.values())
        self._unbalanced = earliest // len(self.layers)
        if self._rounds > earliest:
            self.layers[earliest % len(self.layers)].idle_once()
        for rank, (_, number, is_in_pass) in said.items():
            if is_in_pass and number == self.lockstep.number and rank != self.comm.rank:
                self.lockstep.join(rank, self._next)
