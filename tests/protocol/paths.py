"""The table of docs/protocol/paths.md, made by native/choose.cpp.

`python -m tests.protocol.paths` writes it again after a change of the rule.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from putget.tuning import PATHS
from tests.protocol.tags import ROOT

DOCUMENT = ROOT / "docs" / "protocol" / "paths.md"
BEGIN, END = "<!-- paths: begin -->\n", "<!-- paths: end -->\n"
SOURCE = ROOT / "tests" / "native" / "paths.cpp"
HEAD = (
    "| ranks | SMs | tokens from | dispatch | CTAs x threads | combine | CTAs x threads |\n"
    "|---:|---:|---:|---|---:|---|---:|\n"
)


def generated() -> str:
    """The table, as the compiled rule has it."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "paths"
        compiler = os.environ.get("CXX", "c++")
        includes = [f"-I{ROOT / 'native'}", f"-I{ROOT / 'native' / 'include'}"]
        subprocess.run([compiler, "-std=c++17", *includes, "-o", str(program), str(SOURCE)], check=True, timeout=400)
        told = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout
    return HEAD + "".join(_row(*map(int, line.split())) for line in told.splitlines())


def _row(ranks: int, sms: int, tokens: int, *launches: int) -> str:
    cells = [str(ranks), str(sms), str(tokens)]
    for path, blocks, threads in (launches[:3], launches[3:]):
        cells += [str(PATHS[path]), f"{blocks} x {threads}"]
    return f"| {' | '.join(cells)} |\n"


def documented() -> str:
    """The table, as the page has it."""
    return DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    """Writes the table into the page."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(before + BEGIN + generated() + END + after)


if __name__ == "__main__":
    main()
