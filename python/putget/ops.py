"""Dispatch and combine as torch operators, so that ``torch.compile`` traces a layer without a graph break.

    traced = putget.ops.Traced(a2a)
    rows = traced.dispatch(topk_ids, topk_weights, hidden)
    out = traced.combine(my_experts(rows), topk_ids.shape[0])

The operators are ``torch.ops.putget.dispatch``, ``received`` and ``combine``. A compiler owns what an operator returns
and reuses its memory as it likes, but the workspace is written by other ranks. So the received rows are copied out, and
combine copies the experts' rows in: that is what compilation costs here. Keep ``max_rows`` small; or capture
``putget.AllToAll`` itself in CUDA graphs, where nothing is copied.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from putget._arguments import check_int
from putget.alltoall import AllToAll
from putget.core.expert_major import FlatRows
from putget.errors import ProtocolMisuse

_IDS, _WEIGHTS = -1, -2  # which rows `received` copies, besides those of payload 0, 1, ...

# Every operator is said to change `state`, one byte: that keeps them in order, and keeps a compiler from leaving one
# out or merging two.
_SCHEMAS = (
    "dispatch(int key, Tensor(a!) state, Tensor topk_ids, Tensor topk_weights, Tensor[] payloads, int ep_size, "
    "int max_rows, Tensor? num_valid_tokens) -> Tensor",
    "received(int key, Tensor(a!) state, Tensor like, int which, int num_rows) -> Tensor",
    "combine(int key, Tensor(a!) state, Tensor rows, SymInt num_tokens, Tensor? addend) -> Tensor",
)


class TracedRows(NamedTuple):
    """The received rows, copied: row index = slot * ep_size + source rank.

    Attributes:
        payloads: Each [max_rows * ep_size, *shape].
        topk_ids: [max_rows * ep_size, top_k] int32; -1 in every empty slot.
        topk_weights: [max_rows * ep_size, top_k] float32; undefined in empty slots.
        num_tokens: [ep_size] int32: rows that each source rank sent here.
    """

    payloads: tuple[Tensor, ...]
    topk_ids: Tensor
    topk_weights: Tensor
    num_tokens: Tensor


class _Entry:
    """The object that a key stands for."""

    def __init__(self, a2a: AllToAll) -> None:
        self._a2a = weakref.ref(a2a)
        self.flat: FlatRows | None = None

    @property
    def a2a(self) -> AllToAll:
        found = self._a2a()
        if found is None:
            raise ProtocolMisuse("the AllToAll of this operator is gone")
        return found


_entries: weakref.WeakValueDictionary[int, _Entry] = weakref.WeakValueDictionary()
_keys = itertools.count(1)


class Traced:
    """An ``AllToAll`` whose calls a compiler can trace. There is no backward pass.

    Args:
        a2a: The object; it must live as long as this one is used.
        max_rows: Slots of each source rank that this rank looks at; by default all.

    Raises:
        ValueError: An argument is wrong.
    """

    def __init__(self, a2a: AllToAll, *, max_rows: int | None = None) -> None:
        if not isinstance(a2a, AllToAll):
            raise ValueError(f"a2a is {a2a!r}, expected a putget.AllToAll")
        capacity = a2a._geometry.max_tokens_per_rank
        self.ep_size = a2a.ep_size
        self.max_rows = capacity if max_rows is None else check_int("max_rows", max_rows, 1, capacity)
        self._key = next(_keys)
        self._state = torch.zeros(1, dtype=torch.uint8, device=a2a.workspace.device)
        self._entry = _entries[self._key] = _Entry(a2a)

    def dispatch(
        self, topk_ids: Tensor, topk_weights: Tensor, *payloads: Tensor, num_valid_tokens: Tensor | None = None
    ) -> TracedRows:
        """As ``AllToAll.dispatch``; returns copies, which stay what they are."""
        ops, rows = torch.ops.putget, self.max_rows * self.ep_size
        num_tokens = ops.dispatch(
            self._key,
            self._state,
            topk_ids,
            topk_weights,
            list(payloads),
            self.ep_size,
            self.max_rows,
            num_valid_tokens,
        )
        copied = [ops.received(self._key, self._state, like, index, rows) for index, like in enumerate(payloads)]
        ids = ops.received(self._key, self._state, topk_ids, _IDS, rows)
        weights = ops.received(self._key, self._state, topk_weights, _WEIGHTS, rows)
        return TracedRows(tuple(copied), ids, weights, num_tokens)

    def combine(self, rows: Tensor, num_tokens: int, addend: Tensor | None = None) -> Tensor:
        """As ``AllToAll.combine``: [num_tokens, *shape].

        Args:
            rows: [max_rows * ep_size, *shape], in the order of the rows that dispatch returned.
            num_tokens: That of the dispatch, e.g. ``topk_ids.shape[0]``.
            addend: [num_tokens, *shape], added last.
        """
        combined: Tensor = torch.ops.putget.combine(self._key, self._state, rows, num_tokens, addend)
        return combined


def _entry_of(key: int) -> _Entry:
    found = _entries.get(key)
    if found is None:
        raise ProtocolMisuse("the Traced of this operator is gone")
    return found


def _dispatch(
    key: int,
    state: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    payloads: list[Tensor],
    ep_size: int,
    max_rows: int,
    num_valid_tokens: Tensor | None,
) -> Tensor:
    entry = _entry_of(key)
    received = entry.a2a.dispatch(
        topk_ids, topk_weights, *payloads, max_rows=max_rows, num_valid_tokens=num_valid_tokens
    )
    entry.flat = received.flat
    return received.num_tokens.clone()


def _dispatch_shape(key: int, state: Tensor, topk_ids: Tensor, *rest: Any) -> Tensor:
    ep_size: int = rest[2]
    return topk_ids.new_empty((ep_size,), dtype=torch.int32)


def _received(key: int, state: Tensor, like: Tensor, which: int, num_rows: int) -> Tensor:
    flat = _entry_of(key).flat
    if flat is None:
        raise ProtocolMisuse("received: no dispatch came before it")
    rows = {_IDS: flat.topk_ids, _WEIGHTS: flat.topk_weights}.get(which)
    return (flat.payloads[which] if rows is None else rows).clone()


def _received_shape(key: int, state: Tensor, like: Tensor, which: int, num_rows: int) -> Tensor:
    dtype = torch.int32 if which == _IDS else like.dtype
    return like.new_empty((num_rows, *like.shape[1:]), dtype=dtype)


def _combine(key: int, state: Tensor, rows: Tensor, num_tokens: int, addend: Tensor | None) -> Tensor:
    a2a = _entry_of(key).a2a
    sent = a2a.target_ranks.shape[0]
    if num_tokens != sent:
        raise ValueError(f"num_tokens is {num_tokens}, the last dispatch had {sent} tokens")
    return a2a.combine(rows.contiguous(), addend=addend)


def _combine_shape(key: int, state: Tensor, rows: Tensor, num_tokens: int, addend: Tensor | None) -> Tensor:
    return rows.new_empty((num_tokens, *rows.shape[1:]))


def _register() -> Any:
    kernels: Any = ((_dispatch, _dispatch_shape), (_received, _received_shape), (_combine, _combine_shape))
    library: Any = torch.library.Library("putget", "DEF")  # type: ignore[no-untyped-call]
    for schema, (kernel, shape) in zip(_SCHEMAS, kernels, strict=True):
        name = schema.partition("(")[0]
        library.define(schema)
        for backend in ("CPU", "CUDA"):
            library.impl(name, kernel, backend)
        torch.library.register_fake(f"putget::{name}", shape, lib=library)
    return library


_library = _register()  # the operators live as long as this
