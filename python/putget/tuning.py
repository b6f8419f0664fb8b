"""How kernels are launched: choices that a rule makes, made by the caller for measurements and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from putget import _abi

_MOST_THREADS = 768
PATHS = (  # by putget_path
    None,
    "few tokens",
    "one chunk",
    "many chunks",
    "sentinel rows, 2 a token",
    "sentinel rows, 4 a token",
    "sentinel rows, 8 a token",
    "sentinel rows, any number",
    "got rows, 2 a token",
    "got rows, 4 a token",
    "got rows, 8 a token",
    "got rows, any number",
    "got rows, narrow",
)
_RANGES = {  # of a field: what it is a multiple of, and at most
    "blocks": (1, 256),
    "threads": (32, _MOST_THREADS),
    "segment_bytes": (512, 1 << 26),
    "splits": (1, 128),
    "senders": (1, 256),
}


@dataclass(frozen=True)
class Launch:
    """The shape of one kernel launch. Where a field is None, the rule chooses (docs/protocol/paths.md).

    Attributes:
        blocks: CTAs; at most one an SM. On CPU threads.
        threads: Of a CTA, a multiple of 32 up to 768.
        segment_bytes: Of a row, for one warp at a time: a multiple of 512.
        splits: Dispatch: warps that share the targets of one segment, a power of two up to 128. Combine: above 1, the
            blocks that sum sentinel rows send some, too.
        senders: Combine: blocks that send sentinel rows and sum none, if there are others.
        sentinel_rows: Combine, on CPU too. True: this rank is sent the rows that it sums, and what has come differs
            from a sentinel. False: it gets them; not with ``combine_dtype``. Where sentinel rows cannot be had (rows
            whose bytes are no multiple of 16, more of them than the workspace has room for), it is False. The result
            is the same. Each rank as it likes.

    Raises:
        ValueError: A field is out of range.
    """

    blocks: int | None = None
    threads: int | None = None
    segment_bytes: int | None = None
    splits: int | None = None
    senders: int | None = None
    sentinel_rows: bool | None = None

    def __post_init__(self) -> None:
        for name, (multiple, most) in _RANGES.items():
            value: Any = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most or value % multiple:
                raise ValueError(
                    f"Launch {name} is {value!r}, expected None or a multiple of {multiple} from {multiple} to {most}"
                )
        if self.splits is not None and self.splits & (self.splits - 1):
            raise ValueError(f"Launch splits is {self.splits!r}, expected a power of two")
        if not isinstance(self.sentinel_rows, bool | None):
            raise ValueError(f"Launch sentinel_rows is {self.sentinel_rows!r}, expected None or a bool")

    def for_abi(self) -> _abi.Launch:
        """For the library, whose rule chooses where a field is 0."""
        rows = 0 if self.sentinel_rows is None else 1 + self.sentinel_rows
        return _abi.Launch(*(getattr(self, name) or 0 for name in _RANGES), rows)


@dataclass(frozen=True)
class ChosenLaunch(Launch):
    """A launch as ``AllToAll.launches`` shows it. A field is None where there is nothing to choose.

    Attributes:
        path: Which kernel. Of dispatch "few tokens", "one chunk" or "many chunks" (of 32 tokens that one block routes);
            of combine whether rows are sent or got, and how many of a token's are summed at once.
    """

    path: str | None = None

    @staticmethod
    def of(found: _abi.Launch) -> ChosenLaunch:
        """The library's choice."""
        numbers = {name: getattr(found, name) or None for name in _RANGES}
        rows = (None, False, True)[found.sentinel_rows]
        return ChosenLaunch(**numbers, sentinel_rows=rows, path=PATHS[found.path])


@dataclass(frozen=True)
class Tuning:
    """Choices that are made by rule, made by the caller: for measurements and tests. None: the rule's.

    Attributes:
        dispatch: Launch of dispatch. CUDA only.
        combine: Launch of combine.
        finish_num_sms: As ``num_sms``, for a finish half alone, when what ran beside the start half is over; None:
            num_sms.

    Raises:
        ValueError: A field has another type, or is out of range.
    """

    dispatch: Launch | None = None
    combine: Launch | None = None
    finish_num_sms: int | None = None

    def __post_init__(self) -> None:
        for name in ("dispatch", "combine"):
            launch: Any = getattr(self, name)
            if not isinstance(launch, Launch | None):
                raise ValueError(f"Tuning {name} is {launch!r}, expected None or a putget.tuning.Launch")
        sms: Any = self.finish_num_sms
        if sms is not None and (isinstance(sms, bool) or not isinstance(sms, int) or not 1 <= sms <= _abi.MAX_SMS):
            raise ValueError(f"Tuning finish_num_sms is {sms!r}, expected None or an int from 1 to {_abi.MAX_SMS}")
