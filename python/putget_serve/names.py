"""Names of requests, which clients and proxies choose by a header."""

from __future__ import annotations

import itertools
from typing import Any

HEADER = b"x-request-id"
MOST = 10_000
"""So many names are remembered: longer than a cancel takes that a proxy's second try may overtake."""


class TellApart:
    """An ASGI application around another one: a name that comes again gets a number behind it.

    A proxy that tries again sends the name again. Requests are cancelled by name, so the end of the first would end the
    second too.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self._known: dict[bytes, None] = {}  # the oldest first
        self._numbers = itertools.count(2)

    def name(self, asked: bytes) -> bytes:
        """The name under which a request is taken."""
        own = asked
        while own in self._known:
            own = b"%s.%d" % (asked, next(self._numbers))
        self._known[own] = None
        if len(self._known) > MOST:
            del self._known[next(iter(self._known))]
        return own

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Serve a request."""
        if scope["type"] == "http":
            headers = [(key, self.name(value) if key == HEADER and value else value) for key, value in scope["headers"]]
            scope = {**scope, "headers": headers}
        await self.app(scope, receive, send)
