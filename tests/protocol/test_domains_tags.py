"""docs/protocol/domains.md and the proxies speak of the same operations."""

from __future__ import annotations

import re

from tests.protocol.tags import ROOT

DOCUMENT = (ROOT / "docs" / "protocol" / "domains.md").read_text()
TABLE = re.findall(r"^\| \*\*(X\d+)\*\* \| ([^|]*) \|", DOCUMENT, re.MULTILINE)
SOURCES = {
    "proxies": ROOT / "native" / "domains" / "proxy.cpp",
    "kernels": ROOT / "tests" / "native" / "domains_world.h",
}
KERNELS = "\n".join(path.read_text() for path in sorted((ROOT / "native" / "protocol" / "domains").glob("*.h")))


PUBLISHED = set(re.findall(r"\bpublish<Tag::(X\d+)>", KERNELS))
AWAITED = set(re.findall(r"\bawait_(?:word|shared)<Tag::(X\d+)>", KERNELS))


def comments_in(text: str) -> set[str]:
    return {tag for comment in re.findall(r"//.*", text) for tag in re.findall(r"\[(X\d+)\]", comment)}


def tagged(name: str) -> set[str]:
    return comments_in(SOURCES[name].read_text())


def test_each_operation_stands_once_in_the_table() -> None:
    assert [tag for tag, _ in TABLE] == [f"X{n}" for n in range(12)]


def test_what_proxies_do_is_tagged_in_the_proxy() -> None:
    done = {tag for tag, actor in TABLE if "proxy" in actor}
    read = {"X2", "X6", "X7"}  # words that kernels store
    assert tagged("proxies") == done | read


def test_what_kernels_do_is_tagged_in_what_stands_for_them() -> None:
    done = {tag for tag, actor in TABLE if "kernels" in actor}
    read = {"X0", "X4", "X9"}  # words that proxies store
    assert tagged("kernels") == done | read


def test_the_text_has_an_operation_for_each_tag_of_kernels() -> None:
    """Words are published and waited for by tag, and rows carry it in a comment."""
    assert {"X2", "X6", "X7"} == PUBLISHED
    assert {"X0", "X4", "X9"} == AWAITED
    done = {tag for tag, actor in TABLE if "kernels" in actor}
    assert PUBLISHED | {"X1", "X5"} == done
    assert comments_in(KERNELS) == {"X1", "X5", "X7", "X9"}  # rows: stored, got, summed, added
    signal = (ROOT / "native" / "protocol" / "round" / "signal.h").read_text()
    match = re.search(r"enum class Tag : \w+ \{([^}]*)\}", signal)
    assert match is not None
    assert set(re.findall(r"\bX\d+\b", match[1])) == PUBLISHED | AWAITED


def test_proofs_and_models_cite_tags_of_the_table() -> None:
    known = {tag for tag, _ in TABLE}
    model = (ROOT / "native" / "model" / "domains.pml").read_text()
    assert set(re.findall(r"\bX\d+\b", DOCUMENT + model)) <= known
