"""The map of the workspace in docs/protocol.md, generated from native/protocol/round/layout.h.

`python -m tests.protocol.memory_map` writes it again after a change of the layout.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from tests.protocol.tags import DOCUMENT, ROOT

BEGIN, END = "<!-- memory map: begin -->\n", "<!-- memory map: end -->\n"
SOURCE = ROOT / "tests" / "native" / "memory_map.cpp"


def generated() -> str:
    """The table, as the compiled layout has it."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "memory_map"
        compiler = os.environ.get("CXX", "c++")
        subprocess.run(
            [compiler, "-std=c++17", f"-I{ROOT / 'native'}", "-o", str(program), str(SOURCE)], check=True, timeout=400
        )
        return subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout


def documented() -> str:
    """The table, as the document has it."""
    return DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    """Writes the table into the document."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(before + BEGIN + generated() + END + after)


if __name__ == "__main__":
    main()
