"""Names of requests: those of clients stay, one that comes again is told apart."""

from __future__ import annotations

import asyncio
from typing import Any

from putget_serve import names


def served(app: names.TellApart, *headers: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """The headers that an application sees."""
    scope: dict[str, Any] = {"type": "http", "headers": list(headers)}
    found: list[tuple[bytes, bytes]] = []

    async def inner(seen: dict[str, Any], _receive: Any, _send: Any) -> None:
        found.extend(seen["headers"])

    app.app = inner
    asyncio.run(app(scope, None, None))
    assert scope["headers"] == list(headers), "the caller's own list stays"
    return found


def test_a_name_that_comes_again_is_told_apart() -> None:
    app = names.TellApart(None)
    other = (b"accept", b"*/*")
    assert served(app, other, (names.HEADER, b"a")) == [other, (names.HEADER, b"a")]
    again = [served(app, (names.HEADER, b"a"))[0][1] for _ in range(3)]
    assert len({b"a", *again}) == 4
    assert all(one.startswith(b"a.") for one in again)
    assert served(app, (names.HEADER, b"b")) == [(names.HEADER, b"b")]
    assert served(app, other) == [other]


def test_a_name_of_long_ago_is_as_new() -> None:
    app = names.TellApart(None)
    assert app.name(b"a") == b"a"
    for number in range(names.MOST):
        app.name(b"%d" % number)
    assert app.name(b"a") == b"a"
    assert len(app._known) == names.MOST
