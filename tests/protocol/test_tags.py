"""The code and docs/protocol.md speak of the same operations."""

from __future__ import annotations

import re

from tests.protocol import tags


def test_table_and_code_have_the_same_tags() -> None:
    documented = [row.tag for row in tags.table()]
    assert len(documented) == len(set(documented)), "a tag stands twice in the table"
    in_code = {*tags.enumerators("Tag"), *tags.enumerators("Join"), *tags.commented()}
    # The experts' reads and, where they write in place, their writes are the caller's code, not the library's.
    assert set(documented) == in_code | {"D5"}


def test_every_flag_operation_is_used_and_tagged() -> None:
    kinds = (tags.published(), tags.observed(), tags.polled())
    assert set.union(*kinds) == set(tags.enumerators("Tag"))
    assert sum(map(len, kinds)) == len(tags.enumerators("Tag")), "a tag is of two kinds"
    assert set(re.findall(r"Join::(\w+)", tags.native_text())) == set(tags.enumerators("Join"))


def test_table_says_how_each_flag_operation_is_ordered() -> None:
    order = {row.tag: row.order for row in tags.table()}
    assert {tag for tag, text in order.items() if text.startswith("release")} == tags.published()
    assert {tag for tag, text in order.items() if text.startswith("acquire,")} == tags.observed()
    relaxed = {tag for tag, text in order.items() if text.startswith("relaxed")}
    assert tags.polled() <= relaxed <= tags.polled() | tags.commented()
    joins = set(tags.enumerators("Join"))
    assert {tag for tag, text in order.items() if text.startswith("acquire and release")} == joins


def test_pairs_name_tags_of_the_table() -> None:
    rows = tags.table()
    known = {row.tag for row in rows}
    for row in rows:
        assert set(re.findall(tags.TAG, row.pairs_with)) <= known, row


def test_every_proof_cites_only_tags_of_the_table() -> None:
    cited = set(re.findall(rf"\b({tags.TAG})\b", tags.DOCUMENT.read_text()))
    assert cited - {row.tag for row in tags.table()} == set()


def test_atomics_are_used_where_the_mutations_reach_them() -> None:
    # The stress job can weaken what goes through Exec::publish and Exec::observe: the text must use nothing else.
    for path in sorted(tags.PROTOCOL.rglob("*.h")):
        if path.name == "atomics.h":
            continue
        assert not re.search(r"__atomic|std::atomic|store_release|load_acquire|asm", path.read_text()), path
