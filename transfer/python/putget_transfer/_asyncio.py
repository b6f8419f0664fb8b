"""How a task waits for a transfer."""

from __future__ import annotations

import asyncio
import contextlib

from putget_transfer._native import Transfer


async def wait(transfer: Transfer) -> None:
    """Wait until a transfer is over; raise what it failed with.

    A task that is cancelled stops waiting. The transfer goes on: `Transfer.cancel` ends it.
    """
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def finish() -> None:
        if not over.done():
            over.set_result(None)

    # The transfer has `tell` until it ends, which may be long after a cancelled task and its loop.
    waiting = [(loop, finish)]

    def tell(_error: BaseException | None) -> None:
        for loop, finish in tuple(waiting):
            # A loop that has closed meanwhile has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finish)

    transfer.add_done_callback(tell)
    try:
        await over
    finally:
        waiting.clear()
    transfer.result()
