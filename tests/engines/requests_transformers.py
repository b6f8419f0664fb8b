"""Requests at moments that a busy machine brings about: python -m tests.engines.requests_transformers FOLDER.

transformers' own manager for servers asks one rank with a tiny model. FOLDER/found.json has what each client gets.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.cli.serving.utils import CBGenerateManager

import putget
from putget.adapters import transformers as putget_transformers
from tests.engines.models import save_model, save_tokenizer

EXPERTS, TOKENS, PROMPT = 4, 6, [3, 17, 41]
PATIENCE_S = 20.0  # a request that takes longer has no end
LATE_S = 1.0


def ended(found: Any) -> Any:
    """The text of a request, its error, or that it does not end."""
    try:
        return asyncio.run(asyncio.wait_for(found, PATIENCE_S))
    except TimeoutError:
        return "it does not end"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Client:
    """A client of a manager, as transformers' app is one."""

    def __init__(self, folder: Path, manager: Any) -> None:
        self.manager = manager
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._asks = CBGenerateManager()
        self._asks._cb = manager
        self._count = 0

    def _arguments(self, prompt: list[int]) -> tuple[Any, ...]:
        self._count += 1
        wanted = SimpleNamespace(max_new_tokens=TOKENS, eos_token_id=None)
        return None, self._tokenizer, {"input_ids": prompt}, wanted, f"request {self._count}"

    async def whole(self) -> str:
        """An answer in one piece."""
        text, _, _ = await self._asks.generate_non_streaming(*self._arguments(PROMPT))
        return str(text)

    async def stream(self, prompt: list[int] = PROMPT) -> str:
        """An answer in pieces."""
        pieces, _ = self._asks.generate_streaming(*self._arguments(prompt))
        told = []
        while (piece := await pieces.get()) is not None:
            told.append(piece if isinstance(piece, str) else f"error: {piece.msg}")
        return "".join(told)

    async def cancelled(self) -> int:
        """A stream whose client goes away; the handlers that are left when the next request has ended."""
        pieces, streamer = self._asks.generate_streaming(*self._arguments(PROMPT))
        await pieces.get()
        streamer.cancel()
        await self.whole()
        return len(self.manager.output_router.result_handlers)


def told_late(client: Client) -> Any:
    """The event loop gets no core between the request and its handler: all tokens come meanwhile."""
    manager, register = client.manager, client.manager.register_result_handler
    before = manager.done.ends["finished"]

    def late(request_id: str, callback: Callable[[Any], None]) -> None:
        until(lambda: manager.done.ends["finished"] > before)
        register(request_id, callback)

    manager.register_result_handler = late
    try:
        return ended(client.stream())
    finally:
        del manager.register_result_handler


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise SystemExit("it does not come so far")


def taken_at_the_end(client: Client, ask: Callable[[], Awaitable[str]], end: Callable[[], None]) -> Any:
    """The manager ends after a request has been let in, and before it lies in the queue."""
    manager, fails, put = client.manager, threading.Event(), client.manager.input_queue.put
    fail = manager._fail_all_remaining_requests

    def failing(*arguments: Any) -> None:
        fails.set()
        fail(*arguments)

    def late(state: Any, **options: Any) -> None:
        end()
        fails.wait(PATIENCE_S)
        manager._generation_thread.join(LATE_S)
        put(state, **options)

    manager._fail_all_remaining_requests, manager.input_queue.put = failing, late
    found = ended(ask())
    manager.stop()
    return found


def stopped_hard(client: Client) -> list[Any]:
    """A request comes during a pass of another one, and the manager is stopped before the next pass."""
    manager, step = client.manager, client.manager._generation_step
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(ended(client.whole())))

    def stepping() -> None:
        step()
        if not other.ident:
            other.start()
            until(lambda: not manager.input_queue.empty())
            manager.background_thread_status.request_stop(manager._statuses.HARD_STOP, 0)

    manager._generation_step = stepping
    first = ended(client.whole())
    other.join()
    return [first, *found]


def break_down(manager: Any) -> None:
    """The next pass fails."""

    def fail() -> None:
        raise putget.PutgetError('rank 1 says "no"')

    manager._generation_step = fail


def main(folder: Path) -> None:
    save_model(folder, EXPERTS)
    save_tokenizer(folder)
    found: dict[str, Any] = {}
    config = transformers.ContinuousBatchingConfig(num_blocks=16, page_size=32)
    (comm,) = putget.Communicator.local(1)

    def made() -> Client:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        spread = putget_transformers.spread(model, comm, max_tokens_per_rank=64)
        manager = putget_transformers.batching_manager(model, spread, continuous_batching_config=config)
        manager.start()
        return Client(folder, manager)

    client = made()
    manager = client.manager
    found["whole"], found["stream"] = ended(client.whole()), ended(client.stream())
    found["too long"] = ended(client.stream(PROMPT * 100))
    found["told late"] = told_late(client)
    found["left"] = [ended(client.cancelled()), manager.output_router.output_queue.qsize()]
    stop = lambda: manager.background_thread_status.request_stop(manager._statuses.FLUSH_AND_STOP, 0)  # noqa: E731
    found["taken as it stops"] = taken_at_the_end(client, client.whole, stop)
    found["behind the stop"] = [ended(client.whole()), ended(client.stream())]
    found["stopped hard"] = stopped_hard(made())
    client = made()
    break_down(client.manager)
    found["broken"] = ended(client.stream())
    found["behind the break"] = ended(client.whole())
    folder.joinpath("found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
