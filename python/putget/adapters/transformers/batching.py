"""Continuous batching of transformers on a spread model: each rank has a queue of its own, all run passes together."""

from __future__ import annotations

import contextlib
import copy
import importlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from putget import PutgetError
from putget.adapters.engines import require_names
from putget.adapters.transformers.latent import has_latents, latent_cache
from putget.adapters.transformers.passes import Spread
from putget.lockstep import Bell

_MODULE = "transformers.generation.continuous_batching.continuous_api"
_CACHE = "PagedAttentionCache"
_NAMES = ("ContinuousBatchingManager", "BackgroundThreadStatus", "OutputRouter", _CACHE)
_HOOKS = (
    "_generation_loop_body",
    "_generation_step",
    "_create_batch_processor",
    "_handle_critical_error",
    "_fail_all_remaining_requests",
    "add_request",
    "cancel_request",
    "register_result_handler",
)
_KEPT = "_cached_continuous_batching_manager"  # where transformers looks for a manager of an earlier session
_turn = threading.Lock()
_UNQUOTED = str.maketrans({'"': "'", "\\": "/"})
_SLEEP_S = 1.0  # a rank that sleeps looks at the end of the process so often; requests and other ranks wake it


@dataclass
class Done:
    """Counts of requests that have ended on a rank.

    Attributes:
        ends: How many have finished, and how many have failed.
        tokens: Tokens that those have generated.
    """

    ends: dict[str, int] = field(default_factory=lambda: {"finished": 0, "failed": 0})
    tokens: int = 0

    def clear(self) -> None:
        """Counts from here on."""
        self.ends, self.tokens = dict.fromkeys(self.ends, 0), 0

    def add(self, output: Any) -> None:
        """Counts an output, if it is the last one of its request."""
        if output.is_finished():
            self.ends["finished" if output.error is None else "failed"] += 1
            self.tokens += len(output.generated_tokens)


def _nothing() -> None:
    pass


class LockstepBatching:
    """Methods that precede those of transformers' manager: all ranks run one pass at a time.

    A request ends with all of its tokens, with an error, or because its client has cancelled it.

    Attributes:
        spread: The model's expert layers.
        done: This rank's requests that have ended.
        room: Most tokens of a request, its prompt included.
        after_pass: Called behind each pass of this rank; the others may run the next one meanwhile.
        before_sleep: Called when there is nothing to do.
    """

    spread: Spread
    done: Done
    room: int
    after_pass: Callable[[], None] = staticmethod(_nothing)
    before_sleep: Callable[[], None] = staticmethod(_nothing)
    model: Any
    generation_config: Any
    output_router: Any
    batch_processor: Any
    background_thread_status: Any
    current_batch: int
    _wake_up_loop: Any
    _statuses: Any
    _taking: threading.Lock  # held while a request is taken, and while the last ones fail: none comes in behind these
    _cancelled: queue.SimpleQueue[str]
    _has_finished = False
    _asked: Callable[[Spread], Spread] | None = None

    def between_passes(self, run: Callable[[Spread], Spread]) -> None:
        """Has the manager's thread call something between two passes; any thread may ask.

        Args:
            run: Gets the expert layers, and returns those to go on with.
        """
        self._asked = run
        self._wake_up_loop.set()

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        """One pass, or a sleep. Whether the loop goes on."""
        asked = self._asked
        if asked is not None:  # else another thread may be asking now
            self._asked = None
            self.spread = asked(self.spread)
        lockstep = self.spread.lockstep
        if self.background_thread_status.local_status == self._statuses.HARD_STOP:
            # transformers' next step would take the waiting requests, and tell nobody of them.
            lockstep.close()
            return False
        cancelled = [self._cancelled.get() for _ in range(self._cancelled.qsize())]
        for request_id in cancelled:
            super().cancel_request(request_id)  # type: ignore[misc]
        has_batch = batch_processor.prepare_next_batch()
        self.output_router.forget(cancelled)  # no output of theirs comes any more
        if has_batch:
            self.spread.begin()
            self._generation_step()  # type: ignore[attr-defined]
            self.spread.end_pass()
            self.current_batch += 1
            batch_processor.update_batch()
            self.after_pass()
            return True
        status = self.background_thread_status.tp_status
        if status == self._statuses.HARD_STOP:
            lockstep.close()
            return False
        if status == self._statuses.FLUSH_AND_STOP and not batch_processor.has_pending_requests():
            if not self._has_finished:
                self._has_finished = True
                lockstep.finish()
            if lockstep.all_finished:
                self._has_finished = False
                return False
        if self.spread.begun() is not None:
            self.spread.idle_pass()
            self.after_pass()
        else:
            self.before_sleep()
            self.spread.wait(self._wake_up_loop, _SLEEP_S)
            self._wake_up_loop.clear()
        return True

    def _create_batch_processor(self) -> Any:
        """As transformers', which looks its cache up in the module, and has none for latents."""
        module = importlib.import_module(_MODULE)
        with _turn:
            cache = getattr(module, _CACHE)
            setattr(module, _CACHE, latent_cache(cache))
            try:
                return super()._create_batch_processor()  # type: ignore[misc]
            finally:
                setattr(module, _CACHE, cache)

    def add_request(
        self, input_ids: list[int], request_id: str | None = None, max_new_tokens: int | None = None, **options: Any
    ) -> Any:
        """As transformers': a request that asks for more tokens than there is room for gets as many as there is.

        Raises:
            ValueError: The prompt alone fills the cache, or the model's positions; nothing has happened.
            PutgetError: The manager has been stopped, or has failed: the request would never end.
        """
        try:
            left = self.room - len(input_ids)
            if left < 1:
                raise ValueError(f"the prompt has {len(input_ids)} tokens, a request has room for {self.room} in all")
            wanted = self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
            most = left if wanted is None else min(wanted, left)
            with self._taking:
                self._require_running()
                return super().add_request(  # type: ignore[misc]
                    input_ids, request_id=request_id, max_new_tokens=most, **options
                )
        except BaseException:
            self.output_router.forget([request_id])
            raise

    def _require_running(self) -> None:
        status = self.background_thread_status
        why = status.can_accept_new_requests()
        if why is not None:
            cause = "" if status.fatal_error is None else f" {status.fatal_error}"
            raise PutgetError(f"the request is not taken: {why}{cause}")

    def cancel_request(self, request_id: str) -> None:
        """As transformers', before the next pass: its loop has taken the request by then. The handler is left, too."""
        self._cancelled.put(request_id)
        self._wake_up_loop.set()

    def register_result_handler(self, request_id: str, callback: Callable[[Any], None]) -> None:
        """As transformers'. A request may have begun, and ended, before its caller comes here: that is told, too."""
        with self.output_router.turn:
            super().register_result_handler(request_id, callback)  # type: ignore[misc]
            self.output_router.tell_early(request_id)

    def _fail_all_remaining_requests(self, error: Exception, batch_processor: Any) -> None:
        """As transformers', when no request is taken any more; a request that is just being taken fails as well."""
        with self._taking:
            super()._fail_all_remaining_requests(error, batch_processor)  # type: ignore[misc]

    def _handle_critical_error(self, error: Exception, batch_processor: Any) -> None:
        """This rank cannot go on: the others hear it at once."""
        self.spread.lockstep.close()
        super()._handle_critical_error(error, batch_processor)  # type: ignore[misc]


def batching_manager(
    model: Any,
    spread: Spread,
    generation_config: Any = None,
    *,
    continuous_batching_config: Any = None,
    stream_interval: int = 1,
) -> Any:
    """A ContinuousBatchingManager of transformers for a spread model, left where transformers looks for one.

    ``model.generate_batch(..., persistent_manager=True)``, ``init_continuous_batching`` and ``transformers serve``
    find it. All ranks start theirs, and stop it; each adds requests of its own at any time, or none.

    Args:
        model: The model.
        spread: What ``spread`` returned for it.
        generation_config: transformers' GenerationConfig; None: the model's.
        continuous_batching_config: transformers' ContinuousBatchingConfig. ``max_batch_tokens`` is bounded by
            the workspace's tokens per rank; batches are prepared when the one before has ended.
        stream_interval: A stream tells its first token at once, then every so many, and its end.

    Raises:
        ValueError: stream_interval is not a positive int, or max_batch_tokens has no room in the workspace.
        BackendUnavailable: This transformers is not known.
    """
    if not isinstance(stream_interval, int) or isinstance(stream_interval, bool) or stream_interval < 1:
        raise ValueError(f"stream_interval is {stream_interval!r}, expected a positive int")
    module = importlib.import_module(_MODULE)
    require_names("transformers", module, _NAMES)
    require_names("transformers", module.ContinuousBatchingManager, _HOOKS)
    configs = importlib.import_module("transformers.generation.configuration_utils")
    config = copy.copy(continuous_batching_config or configs.ContinuousBatchingConfig())
    room = min(layer.max_tokens_per_rank for layer in spread.layers)
    if config.max_batch_tokens is None:
        config.max_batch_tokens = room
    if config.max_batch_tokens > room:
        raise ValueError(
            f"max_batch_tokens is {config.max_batch_tokens}, the workspace has room for {room} tokens of a rank: call "
            "spread(max_tokens_per_rank=...) with more"
        )
    config.use_async_batching = False
    if has_latents(model.config.get_text_config()):
        config.max_blocks_per_request = 0  # kernels that read pages by a block table know no latents
    kind = type("PutgetBatching", (LockstepBatching, module.ContinuousBatchingManager), {})
    generation_config = copy.copy(model.generation_config if generation_config is None else generation_config)
    if generation_config.eos_token_id is None:
        generation_config.eos_token_id = -1
    manager = kind(model, generation_config, config)
    manager.spread, manager._statuses, manager._wake_up_loop = spread, module.BackgroundThreadStatus, Bell()
    manager.done, manager._taking, manager._cancelled = Done(), threading.Lock(), queue.SimpleQueue()
    manager.output_router = _router(module.OutputRouter, stream_interval, manager.done)
    manager.batch_processor = manager._create_batch_processor()
    cache, positions = (
        manager.batch_processor.cache,
        getattr(model.config.get_text_config(), "max_position_embeddings", None),
    )
    manager.room = min(cache.max_tokens_read, positions or cache.max_tokens_read)
    setattr(model, _KEPT, manager)
    return manager


def _router(base: Any, interval: int, done: Done) -> Any:
    """transformers' router, which counts, and leaves out what a stream does not tell: an output holds all tokens.

    An output either finds its request's handler, or lies in the queue before the handler is registered.
    """

    class IntervalRouter(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.turn = self._lock = threading.RLock()

        def deliver(self, output: Any) -> None:
            done.add(output)
            if output.error is not None:  # transformers writes it between quotes in a stream
                output.error = " ".join(output.error.translate(_UNQUOTED).split())
            with self.turn:
                super().deliver(output)

        def deliver_batch(self, outputs: list[Any]) -> None:
            for output in outputs:
                done.add(output)
            told = [one for one in outputs if one.is_finished() or (len(one.generated_tokens) - 1) % interval == 0]
            if told:
                with self.turn:
                    super().deliver_batch(told)

        def tell_early(self, request_id: str) -> None:
            """Outputs that came before their handler follow now."""
            waiting = []
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.append(self.output_queue.get_nowait())
            for output in waiting:
                if output.request_id == request_id:
                    super().deliver(output)
                else:
                    self.output_queue.put(output)

        def forget(self, request_ids: list[str | None]) -> None:
            """Leaves the handlers of requests that have no further output."""
            with self.turn:
                for request_id in request_ids:
                    self.result_handlers.pop(request_id, None)

    return IntervalRouter()
