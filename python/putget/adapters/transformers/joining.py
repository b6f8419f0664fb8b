"""New processes take the places of ranks that are lost, while the other ranks serve."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from putget import Communicator, PutgetError
from putget.adapters.transformers.passes import Spread
from putget.adapters.transformers.slots import Terms

logger = logging.getLogger("putget")


def take_in(
    spread: Spread,
    number: int,
    meet: Callable[[], Communicator],
    agree: Callable[[str | None], bool],
    timeout_s: float,
) -> Spread:
    """Goes on with new processes in the places of lost ranks. Collective among the ranks that are left.

    Call it between two passes. The new processes call ``spread``, ``Spread.try_out`` and the same ``agree`` meanwhile.
    Requests of this rank stay where they are. Experts lie afterwards as they did at the start. What the ranks have now
    is kept until all agree: if one process does not come, they go on as before. Then the former communicator is closed.

    Args:
        spread: The model on the ranks that are left.
        number: Of the attempt, the same on all ranks, and higher than that of the one before.
        meet: Makes the communicator of all ranks. Collective between them, as the constructor.
        agree: Hears why this rank cannot, or None. Returns on all ranks alike whether all can.
        timeout_s: Deadline of each step, in seconds.

    Returns:
        The model on all ranks; or ``spread`` itself.

    Raises:
        ValueError: There are no spare slots, or ``spread`` has ended: no rank could be lost. Nothing has been said.
    """
    if spread.terms is None or spread.store is None:
        raise ValueError("spread has no spare slots: give spread(num_slots=...) to go on without a rank")
    spread.pause(number)
    with contextlib.ExitStack() as undo:
        why: str | None = None
        try:
            found = _on(spread, spread.terms, meet, timeout_s, undo)
            found.try_out()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            logger.warning("putget: rank %d goes on as before: %s", spread.comm.rank, why)
        if not agree(why) or why is not None:
            return spread
        undo.pop_all()
    _close(spread.end)
    _close(spread.comm.close)
    assert found.store is not None
    for layer, experts in enumerate(found.layers):
        slots = experts.slots
        assert slots is not None
        slots.bring(spread.terms.placement, layer, found.comm.rank, found.store)
    return found


def _on(
    spread: Spread, terms: Terms, meet: Callable[[], Communicator], timeout_s: float, undo: contextlib.ExitStack
) -> Spread:
    """The model's layers on other processes, in the steps of ``spread``; ``undo`` takes them back."""
    comm = meet()
    undo.callback(_close, comm.close)
    comm.compare("spread", terms.said, timeout_s)
    store = terms.host_store(comm, timeout_s)
    undo.callback(_close, store.close)
    assert spread.store is not None
    slots: Sequence[Any] = [
        layer.slots.again(terms.placement, number, comm, store, spread.store)
        for number, layer in enumerate(spread.layers)
        if layer.slots is not None
    ]
    comm.compare("host store", {"step": "saved"}, timeout_s)
    balancer = terms.balancer(comm, slots, store)
    undo.callback(_close, balancer.close)
    for layer, own in zip(spread.layers, slots, strict=True):
        undo.callback(layer.move(comm, own, timeout_s))
    found = spread.on(comm, balancer, store, timeout_s)
    undo.callback(_close, found.lockstep.close)
    return found


def _close(close: Callable[[], None]) -> None:
    """A fault that comes out meanwhile does not matter any more."""
    with contextlib.suppress(PutgetError):
        close()
