"""Shows what a run is doing: a live line with a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_WIDTH = 120  # of lines where there is no terminal to ask


def make_console(quiet: bool = False) -> Console:
    """Where a subcommand prints."""
    console = Console(quiet=quiet, highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(quiet=quiet, highlight=False, markup=False, width=_WIDTH)
    return console


class RunProgress:
    """Progress over a known number of units. A context manager; leaves nothing live behind."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._done = 0
        self._live: Progress | None = None
        if console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._live = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
            self._task = self._live.add_task(title, total=total)

    def __enter__(self) -> RunProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def stage(self, text: str) -> None:
        """The step that is running now."""
        if self._live is not None:
            self._live.update(self._task, description=f"{self._title}: {text}")
        else:
            self.line(text)

    def line(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, soft_wrap=True)

    def advance(self) -> None:
        """One unit is done."""
        self._done += 1
        if self._live is not None:
            self._live.advance(self._task)
