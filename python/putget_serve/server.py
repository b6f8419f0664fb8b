"""One rank of ``putget serve``: the model, spread over all ranks, and transformers' app around it."""

from __future__ import annotations

import datetime
import functools
import importlib
import os
from typing import Any

import torch
import torch.distributed as dist

import putget
from putget.adapters import transformers as adapter
from putget_serve import metrics
from putget_serve.garbage import Garbage
from putget_serve.names import TellApart
from putget_serve.parent import Parent
from putget_serve.settings import APP_MODULES, Settings, listen

_CLI = "transformers.cli.serving"
_NOT_HERE = {"/load_model", "/reset"}  # a rank that drops its model leaves all others waiting
_JOIN_S = 30.0  # of each step in which ranks that serve meet a new process
_CACHE_TOKENS = 32768  # of a rank on CPUs, where transformers would take a share of the whole memory


def run_rank(settings: Settings, rank: int, store: str | None, parent: Parent) -> None:
    """Loads, spreads and serves, until SIGTERM.

    Args:
        settings: The server's.
        rank: This rank.
        store: A file by which the ranks meet; None: this process takes the place of a lost rank, and hears of the file.
        parent: Hears what becomes of this rank.

    Raises:
        PutgetError: The other ranks go on without this process.
    """
    import uvicorn

    device = _device_of(settings, rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    models = _load(settings, device)
    model = models.loaded_models[settings.path].model
    attempt = 0  # in which this process joins
    if store is None:
        _warm_up(model)
        store, attempt = parent.wait_for_meeting()
    spread = adapter.spread(
        model,
        _meet(settings, rank, store, settings.setup_timeout_s),
        num_slots=settings.num_slots,
        balance=settings.balance,
        max_tokens_per_rank=settings.max_tokens_per_rank,
        timeout_s=settings.timeout_s,
        setup_timeout_s=settings.setup_timeout_s,
    )
    spread.on_members = parent.tell_members
    if attempt:
        spread.try_out()
    manager = adapter.batching_manager(
        model,
        spread,
        continuous_batching_config=_batching(settings, device),
        stream_interval=settings.stream_interval,
    )
    garbage = Garbage()
    app = _app(models, model, settings.path, manager, garbage)
    if attempt and not parent.agree(attempt, None):
        raise putget.PutgetError("the other ranks go on without this process")
    _try_out(manager)
    garbage.start()
    manager.after_pass, manager.before_sleep = garbage.after_pass, garbage.before_sleep
    parent.on_meeting = functools.partial(_take_in, settings, rank, manager, parent)
    with listen(settings.host, settings.port) as sock:
        parent.say("ready")
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[sock])
    if manager.is_running():
        manager.stop(block=True, timeout=10.0)
    manager.spread.end()


def _meet(settings: Settings, rank: int, store: str, timeout_s: float) -> putget.Communicator:
    """The communicator of all ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=settings.ep_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return putget.Communicator()


def _take_in(settings: Settings, rank: int, manager: Any, parent: Parent, store: str, number: int) -> None:
    """Has the manager meet new processes of lost ranks between two of its passes."""

    def meet() -> putget.Communicator:
        return _meet(settings, rank, store, _JOIN_S)

    agree = functools.partial(parent.agree, number)
    manager.between_passes(lambda spread: adapter.take_in(spread, number, meet, agree, _JOIN_S))


def _warm_up(model: Any) -> None:
    """A first forward takes long; no other rank shall wait for it."""
    with torch.no_grad():
        model(input_ids=torch.tensor([[0]], device=model.device))


def _device_of(settings: Settings, rank: int) -> torch.device:
    if settings.device == "cuda":
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // settings.ep_size))
    return torch.device("cpu")


def _load(settings: Settings, device: torch.device) -> Any:
    """transformers' model manager with the one model in it."""
    importlib.import_module("transformers.utils.logging").set_verbosity_error()  # else a line for each request
    manager = importlib.import_module(f"{_CLI}.model_manager")
    return manager.ModelManager(
        device=str(device), dtype=settings.dtype, continuous_batching=True, force_model=settings.path
    )


def _batching(settings: Settings, device: torch.device) -> Any:
    configs = importlib.import_module("transformers.generation.configuration_utils")
    config = configs.ContinuousBatchingConfig(max_batch_tokens=settings.max_tokens_per_rank)
    tokens = settings.cache_tokens or (_CACHE_TOKENS if device.type == "cpu" else None)
    if tokens is not None:
        config.num_blocks = -(-tokens // config.page_size)
    return config


def _try_out(manager: Any) -> None:
    """One request of each rank before others come: a model that cannot be batched is an error of the start.

    Raises:
        PutgetError: It failed; the message has the reason.
    """
    number = manager.add_request([0], max_new_tokens=2)
    found = None
    while found is None and manager.is_running():
        found = manager.get_result(request_id=number, timeout=0.5)
    reason = manager.background_thread_status.fatal_error if found is None else found.error
    if reason is not None:
        raise putget.PutgetError(f"{type(manager.model).__name__} cannot be served by continuous batching: {reason}")
    manager.done.clear()


def _app(models: Any, model: Any, path: str, manager: Any, garbage: Garbage) -> Any:
    """transformers' app, whose manager runs from now on, and ``/metrics``."""
    chat, completion, response, systemone, transcription, server, utils = map(importlib.import_module, APP_MODULES)
    from fastapi.responses import JSONResponse, PlainTextResponse

    state = utils.GenerationState(continuous_batching=True)
    state.get_manager(path, use_cb=True).init_cb(model, manager.generation_config)  # finds the manager, and starts it
    app = server.build_server(
        models,
        chat.ChatCompletionHandler(model_manager=models, generation_state=state),
        completion_handler=completion.CompletionHandler(model_manager=models, generation_state=state),
        response_handler=response.ResponseHandler(model_manager=models, generation_state=state),
        transcription_handler=transcription.TranscriptionHandler(models, state),
        systemone_handler=systemone.SystemOneHandler(model_manager=models, generation_state=state),
        generation_state=state,
    )
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") not in _NOT_HERE]

    async def refuse(_request: Any, error: Exception) -> Any:
        return JSONResponse({"error": str(error)}, status_code=400)

    async def end(_request: Any, error: Exception) -> Any:
        return JSONResponse({"error": str(error)}, status_code=503)

    async def tell() -> Any:
        return PlainTextResponse(metrics.text(manager, garbage))

    app.add_middleware(TellApart)
    app.add_exception_handler(ValueError, refuse)
    app.add_exception_handler(putget.PutgetError, end)
    app.add_api_route("/metrics", tell)
    return app
