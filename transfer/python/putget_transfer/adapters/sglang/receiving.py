"""The decode side: what was asked for, and pages of failed requests that may still be written to."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence

from putget_transfer import kv

OVER = ("arrived", "released")
"""States of a receive whose pages nothing can write to any more."""


class Receiving:
    """The receives of a decode rank."""

    def __init__(self, decoder: kv.Decoder, cache: kv.Cache, page_tokens: int, segment_tokens: int) -> None:
        self.decoder, self.cache, self.page_tokens = decoder, cache, page_tokens
        # Segments end with pages.
        self.segment_tokens = max(segment_tokens // page_tokens, 1) * page_tokens
        self.groups: dict[tuple[str, ...], kv.Sources] = {}
        self.held: dict[int, list[kv.Receive]] = {}
        """Receives of rooms that have failed."""

    def sources(self, texts: tuple[str, ...]) -> kv.Sources:
        """Return prefill ranks.

        Raises:
            ValueError: A rank's cache does not fit this one; both values are named.
        """
        if texts not in self.groups:
            if len(self.groups) >= 1024:
                self.groups.clear()
            self.groups[texts] = self.decoder.sources([base64.b64decode(text, validate=True) for text in texts])
        return self.groups[texts]

    def ask(
        self, texts: tuple[str, ...], room: int, pages: Sequence[int], states: Sequence[int], deadline_s: float
    ) -> tuple[str, kv.Receive]:
        """Ask prefill ranks for a room; return the name under which it was asked for.

        Raises:
            ValueError: The caches do not fit, or pages are another request's.
            EngineBusy: There are too many requests.
        """
        self.decoder.poll()  # The receives themselves know the report's content.
        name = f"{room}.{secrets.token_hex(8)}"
        receive = self.decoder.request(
            self.sources(texts),
            name,
            [[int(page) for page in pages], *([int(page)] for page in states)],
            tokens=len(pages) * self.page_tokens,
            segment_tokens=self.segment_tokens,
            deadline_s=deadline_s,
        )
        return name, receive

    def hold(self, room: int, receive: kv.Receive) -> None:
        """Give a receive up. The room's pages are held until nothing can write to them."""
        held = self.held.setdefault(room, [])
        if receive not in held:
            held.append(receive)
        if receive.state not in OVER:
            receive.cancel()

    def is_free(self, room: int) -> bool:
        """Return whether nothing can write to a room's pages any more."""
        return all(receive.state in OVER for receive in self.held.get(room, ()))

    def forget(self, room: int) -> None:
        """Forget a room whose pages are free."""
        if self.is_free(room):
            self.held.pop(room, None)

    def is_idle(self) -> bool:
        """Return whether no page may still be written to, but for those of requests under way."""
        return all(self.is_free(room) for room in self.held)
