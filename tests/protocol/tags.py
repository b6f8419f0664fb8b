"""The tags of the protocol's operations, as the code has them and as docs/protocol.md has them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = ROOT / "native" / "protocol"
DOCUMENT = ROOT / "docs" / "protocol.md"

TAG = r"[A-Z]\d"


def native_text(*folders: str) -> str:
    """All sources below native/protocol and the named folders of native, but for what crosses domains."""
    files = [
        path
        for folder in ("protocol", *folders)
        for path in sorted((ROOT / "native" / folder).rglob("*"))
        if path.suffix in {".h", ".cuh", ".cpp", ".cu"} and path.parent.name != "domains"
    ]
    return "\n".join(path.read_text() for path in files)


def of_landing(tag: str) -> bool:
    """Whether it is an operation of landing areas, which the stress job runs apart from rounds."""
    return tag[0] in "LH" or tag == "J4"


def of_domains(tag: str) -> bool:
    """Whether it is an operation of rounds across domains, which have a table and tests of their own."""
    return tag[0] == "X" or tag in {"J5", "J6", "J7"}


def enumerators(name: str) -> list[str]:
    """The enumerators of an enum of native/protocol/round/signal.h, in order, without those across domains."""
    match = re.search(rf"enum class {name} : \w+ {{([^}}]*)}}", (PROTOCOL / "round" / "signal.h").read_text())
    assert match is not None, f"signal.h has no enum {name}"
    return [tag for tag in re.findall(r"\w+", match[1]) if not of_domains(tag)]


def published() -> set[str]:
    """Tags that the protocol text publishes."""
    return set(re.findall(r"\bpublish\w*<Tag::(\w+)>", native_text()))


def observed() -> set[str]:
    """Tags that the protocol text waits for."""
    return set(re.findall(r"\bobserve\w*<Tag::(\w+)>", native_text()))


def polled() -> set[str]:
    """Tags of flags that the protocol text waits for without an order: they say all that there is to know."""
    return set(re.findall(r"\bpoll\w*<Tag::(\w+)>", native_text()))


def commented() -> set[str]:
    """Tags beside plain accesses: `// [D2]`, also several in one comment."""
    comments = re.findall(rf"//((?: \[{TAG}\])+)", native_text("cpu", "cuda"))
    return {tag for comment in comments for tag in re.findall(TAG, comment)}


@dataclass(frozen=True)
class Row:
    """One row of the document's table of operations."""

    tag: str
    actor: str
    operation: str
    order: str
    pairs_with: str


def table() -> list[Row]:
    """The document's table of operations."""
    cells = r"\s*\|\s*".join([rf"\*\*({TAG})\*\*", *[r"([^|\n]*?)"] * 4])
    return [Row(*found) for found in re.findall(rf"^\|\s*{cells}\s*\|$", DOCUMENT.read_text(), re.MULTILINE)]
