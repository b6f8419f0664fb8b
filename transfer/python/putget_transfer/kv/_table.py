"""Tables for the terminal: rich's where it is installed, plain columns otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def show(title: str, names: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table whose first column is text; numbers stand at the right."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(title=title, title_justify="left")
            for name in names:
                table.add_column(name, justify="right")
            for line in lines:
                table.add_row(*line)
            Console().print(table)
            return
    widths = [max(len(line[at]) for line in (names, *lines)) for at in range(len(names))]
    text = [title, *("  ".join(map(str.rjust, line, widths)) for line in (names, *lines))]
    sys.stdout.write("\n".join(text) + "\n\n")
