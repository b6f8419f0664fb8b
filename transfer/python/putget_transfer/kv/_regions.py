"""Regions: one layer's part of a cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Region:
    """One layer's part of a cache, as one rank holds it.

    The bytes of page p, plane k, token t and head h (counted from the rank's first) begin at
    `offset + p * page_stride + k * plane_stride + t * token_stride + h * head_stride`; `head_bytes` follow.

    Attributes:
        name: The name by which both sides know it.
        layer: Its place in the order in which the rank computes layers. Several regions may belong to one layer.
        num_pages: How many pages it has.
        page_tokens: Tokens of a page; 1 for a state.
        num_heads: Heads of the whole model; 1 for a latent cache.
        heads: First head that this rank holds, and the last one plus 1.
        head_bytes: Bytes of one head's token in one plane.
        page_stride: Bytes from one page to the next.
        token_stride: Bytes from one token to the next.
        head_stride: Bytes from one head to the next.
        planes: 2 where keys and values are told apart, otherwise 1.
        plane_stride: Bytes from keys to values.
        offset: Bytes in the memory before page 0.
        memory: The registered memory that it lies in, by its place in the geometry's list.
        group: The list of a request's pages that it uses: caches of one page size share one.
        window: Only the last so many tokens have a place; None: all have.
        state: One page a request, whatever its length. It moves once, when the prefill is over.
        whole: A page moves as a whole, as soon as its last token is computed: tokens have no places of their own in it.
            Both sides have pages of one size then.
    """

    name: str
    layer: int
    num_pages: int
    page_tokens: int
    num_heads: int
    heads: tuple[int, int]
    head_bytes: int
    page_stride: int
    token_stride: int
    head_stride: int
    planes: int = 1
    plane_stride: int = 0
    offset: int = 0
    memory: int = 0
    group: int = 0
    window: int | None = None
    state: bool = False
    whole: bool = False
