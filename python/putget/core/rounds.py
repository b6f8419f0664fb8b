"""The rounds of an AllToAll: which call may come next, views of the workspace, expert-major rows."""

from __future__ import annotations

import weakref

import torch

from putget.core.expert_major import ExpertMajor, ExpertMajorMemory, Grouper
from putget.core.geometry import Geometry
from putget.core.native_object import NativeObject
from putget.core.received import Received, combine_input_view, received_views
from putget.errors import ProtocolMisuse
from putget.memory.workspace import Workspace


class Rounds:
    """Which round of an ``AllToAll`` is open, and where its rows are.

    Attributes:
        grouper: Of expert-major rows.
    """

    def __init__(self, workspace: Workspace, geometry: Geometry, native: NativeObject) -> None:
        self._workspace = workspace
        self._geometry = geometry
        self._native = native
        self._turns = workspace.turns
        self._owner = object()  # of rounds
        self.grouper = Grouper(geometry, workspace.comm.rank, native.expert_to_rank, native.received_tokens)
        with torch.inference_mode(False):
            self._memory_bytes = workspace.memory.tensor()
        self._views: dict[int, Received] = {}
        self._inputs: dict[int, torch.Tensor] = {}

    def combine_input(self) -> torch.Tensor:
        """The rows that experts write in the round of the last dispatch; see ``AllToAll.combine_input``."""
        self._native.require_open()
        max_rows = self._native.max_rows
        view = self._inputs.get(max_rows)
        if view is None:
            with torch.inference_mode(False):  # or it could not be written outside of that mode
                view = self._inputs[max_rows] = combine_input_view(self._memory_bytes, self._geometry, max_rows)
        return view

    def require_finished(self, call: str) -> None:
        """For calls that may not stand between a start half and its finish; raises as ``_require``."""
        self._require(self._turns.refuse_unfinished(call))

    def require_started(self, finish: str) -> None:
        """For finish halves; raises as ``_require``."""
        self._require(self._turns.refuse_unstarted(self._owner, finish))

    def require_open(self, call: str) -> None:
        """For what needs a round of this object; raises as ``_require``."""
        self._require(self._turns.refuse_without_round(self._owner, call))

    def start(self, half: str) -> None:
        """A start half has been called: peers may write over the rows of the last round, or sum them."""
        self._turns.start(self._owner, half)
        self.grouper.end()

    def end(self) -> None:
        """A combine, its finish half or a release has been called."""
        self._turns.end()
        self.grouper.end()

    def forget(self) -> None:
        """The workspace may be gone."""
        self.grouper.close()
        self._views.clear()
        self._inputs.clear()
        del self._memory_bytes

    def _require(self, refused: str | None) -> None:
        """Raises ProtocolMisuse with the reason, or the fault that stands: then that is the reason."""
        if refused is not None:
            self._workspace.raise_fault()
            raise ProtocolMisuse(refused)

    def received(self) -> Received:
        """The rows that the round that begins has delivered."""
        self._turns.open(self._owner)
        number = self.grouper.begin()
        max_rows = self._native.max_rows
        views = self._views.get(max_rows)
        if views is None:
            group = weakref.WeakMethod(self._group)
            tokens = self._native.received_tokens
            views = self._views[max_rows] = received_views(self._memory_bytes, self._geometry, max_rows, tokens, group)
        return views.of_round(number)

    def _group(
        self, max_rows: int, number: int, alignment: int, copy_rows: bool, memory: ExpertMajorMemory | None
    ) -> ExpertMajor:
        """For ``Received.expert_major``."""
        self._native.require_open()
        # Where a graph was captured, its replays are rounds that the host does not see.
        seen = number if self._turns.known else None
        self._require(self.grouper.refuse_rows(max_rows, self._native.max_rows, seen))
        if self._turns.refuse_without_round(self._owner, "expert_major") is not None:
            self._require("expert_major: the round of these rows has ended: another object has dispatched since")
        combine_input: torch.Tensor = getattr(self.combine_input(), "flat")  # noqa: B009  (see combine_input_view)
        flat = self._views[max_rows].flat
        into = self.grouper.memory_for(alignment, max_rows, memory, copy_rows)
        expected_rows = self._native.busiest_tokens * self._geometry.ep_size
        return self.grouper.group(flat, combine_input, into, copy_rows=copy_rows, expected_rows=expected_rows)
