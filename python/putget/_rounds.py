"""What an AllToAll shows of its rounds: views of the workspace, routes, expert-major rows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from putget._arguments import check_expert_to_rank
from putget._geometry import Geometry
from putget._object import NativeObject
from putget.errors import ProtocolMisuse
from putget.expert_major import ExpertMajor, ExpertMajorMemory, Grouper
from putget.received import Received, combine_input_view, received_views
from putget.workspace import Workspace


class RoundViews:
    """The part of ``AllToAll`` that knows which round is open, and where its rows are."""

    def __init__(self, workspace: Workspace, geometry: Geometry, native: NativeObject) -> None:
        self._workspace = workspace
        self._geometry = geometry
        self._native = native
        self._device = workspace.device
        self._turns = workspace.turns
        self._owner = object()  # of rounds
        self._grouper = Grouper(geometry, workspace.comm.rank, native.expert_to_rank, native.received_tokens)
        self._memory_bytes = workspace.memory.tensor()
        self._views: dict[int, Received] = {}
        self._inputs: dict[int, torch.Tensor] = {}

    @property
    def combine_input(self) -> torch.Tensor:
        """[ep_size, max_rows, *shape] in the workspace: experts write row (src, slot) here.

        max_rows is the last dispatch's. Writable from the end of dispatch to the start of combine. Its attribute
        ``flat`` is the same memory as contiguous [max_rows * ep_size, *shape].
        """
        self._native.require_open()
        max_rows = self._native.max_rows
        view = self._inputs.get(max_rows)
        if view is None:
            view = self._inputs[max_rows] = combine_input_view(self._memory_bytes, self._geometry, max_rows)
        return view

    @property
    def target_ranks(self) -> torch.Tensor:
        """[num_tokens, top_k] int32 of the last dispatch: the rank of the expert that owns the slot; -1 elsewhere."""
        return self._native.target_ranks[: self._native.num_tokens]

    @property
    def target_slots(self) -> torch.Tensor:
        """[num_tokens, top_k] int32 of the last dispatch: the slot on that rank; -1 elsewhere."""
        return self._native.target_slots[: self._native.num_tokens]

    @property
    def expert_to_rank(self) -> torch.Tensor:
        """[num_experts] int32 on the device, read at every dispatch; change it in place, or assign to copy into it."""
        return self._native.expert_to_rank

    @expert_to_rank.setter
    def expert_to_rank(self, value: torch.Tensor | Sequence[int]) -> None:
        table = check_expert_to_rank(value, self._geometry.num_experts, self.ep_size, self._device)
        self._native.expert_to_rank.copy_(table)

    @property
    def ep_size(self) -> int:
        """Ranks of the expert-parallel group."""
        return self._geometry.ep_size

    def expert_major_memory(
        self, alignment: int = 1, max_rows: int | None = None, *, copy_rows: bool = True
    ) -> ExpertMajorMemory:
        """Memory for ``received.expert_major(alignment, memory=...)``, zeroed; it waits for the current stream.

        Args:
            alignment: Groups begin at multiples of this many rows, 1 to 4096.
            max_rows: As for dispatch; by default max_tokens_per_rank.
            copy_rows: As for ``expert_major``: False leaves no room for payloads.

        Raises:
            ValueError: One of them is out of range.
        """
        rows = self._geometry.max_tokens_per_rank if max_rows is None else max_rows
        return ExpertMajorMemory(self._grouper.sizes(alignment, rows, copy_rows))

    @property
    def num_local_experts(self) -> int:
        """Groups of an expert-major layout: experts that this rank had at construction."""
        return self._grouper.num_local_experts

    def _end(self) -> None:
        """A combine, its finish half or a release has been called."""
        self._turns.end()
        self._grouper.end()

    def _forget(self) -> None:
        """The workspace may be gone."""
        self._grouper.close()
        self._views.clear()
        self._inputs.clear()
        del self._memory_bytes

    def _require(self, refused: str | None) -> None:
        """Raises ProtocolMisuse with the reason, or the fault that stands: then that is the reason."""
        if refused is not None:
            self._workspace.raise_fault()
            raise ProtocolMisuse(refused)

    def _received(self) -> Received:
        """What the round that begins has delivered."""
        self._turns.open(self._owner)
        number = self._grouper.begin()
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
        self._require(self._grouper.refuse_rows(max_rows, self._native.max_rows, seen))
        if self._turns.refuse_without_round(self._owner, "expert_major") is not None:
            self._require("expert_major: the round of these rows has ended: another object has dispatched since")
        combine_input: torch.Tensor = getattr(self.combine_input, "flat")  # noqa: B009  (see combine_input_view)
        flat = self._views[max_rows].flat
        into = self._grouper.memory_for(alignment, max_rows, memory, copy_rows)
        return self._grouper.group(flat, combine_input, into)
