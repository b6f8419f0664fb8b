"""The half of the connector that lives in vLLM's workers: it owns the engine, and moves the bytes."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

import putget_transfer as pt
from putget_transfer import kv
from putget_transfer.adapters.options import Options
from putget_transfer.adapters.vllm.layers import Layers
from putget_transfer.adapters.vllm.metadata import Ask, Handshake, Metadata, source_of
from putget_transfer.adapters.vllm.stats import Stats
from putget_transfer.adapters.vllm.steps import Steps

logger = init_logger(__name__)

PATIENCE_S = 2.0
"""How long a step waits for reads of blocks that are taken away, before it fails the request."""


class Worker:
    """A rank's prefiller and decoder, as far as its role needs them."""

    def __init__(self, config: Any, kv_cache_config: Any, options: Options, rank: int) -> None:
        self.config, self.kv_cache_config, self.options, self.rank = config, kv_cache_config, options, rank
        self.engine: pt.Engine | None = None
        self.layers: Layers
        self.prefiller: kv.Prefiller | None = None
        self.decoder: kv.Decoder | None = None
        self.steps: Steps | None = None
        """The forward steps of a prefill rank."""
        self.handed: dict[str, str] = {}
        """Names of prefills whose blocks wait, and their requests."""
        self.ended: set[str] = set()
        """Names of prefills that ended before they were handed over."""
        self.asking: dict[int, tuple[str | None, kv.Receive, float]] = {}
        """Receives under way by number: the request that waits, and since when."""
        self.groups: dict[tuple[str, ...], kv.Sources] = {}
        self.done = KVConnectorTransferResults()
        self.stats = Stats()

    def register(self, tensors: dict[str, Any]) -> None:
        """Describe the cache and begin to listen."""
        device = next(iter(tensors.values())).device
        name = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
        self.engine = self.options.engine(name)
        self.layers = Layers(self.engine, self.config, self.kv_cache_config, tensors, self.rank)
        transfer, most = self.config.kv_transfer_config, self.options.max_requests
        if transfer.is_kv_producer:
            self.prefiller = kv.Prefiller(self.layers.cache, lease_s=self.options.lease_s, max_requests=most)
            self.steps = self.steps_on(device)
        if transfer.is_kv_consumer:
            self.decoder = kv.Decoder(self.layers.cache, max_requests=most, confirm_s=self.options.confirm_s)
        logger.info("putget moves this cache:\n%s", self.layers.cache.describe())

    def handshake(self) -> Handshake | None:
        """Return what decode servers must know."""
        return Handshake(self.prefiller.source()) if self.prefiller is not None else None

    def preempt(self, metadata: Metadata) -> None:
        """Wait until nothing is read from blocks that the next step may overwrite."""
        if self.prefiller is None:
            return
        end = time.monotonic() + PATIENCE_S
        for name in metadata.preempted:
            while not self.prefiller.rewind(name):
                if time.monotonic() > end:
                    with contextlib.suppress(ValueError):
                        self.prefiller.fail(name, "its blocks were taken away")
                time.sleep(0.0001)

    def steps_on(self, device: Any) -> Steps:
        """Return the steps of a device's layers, before the first."""
        assert self.prefiller is not None
        if device.type == "cpu":
            return Steps(self.prefiller, self.layers.index)
        import torch

        return Steps(
            self.prefiller,
            self.layers.index,
            stream=torch.cuda.current_stream,
            captures=torch.cuda.is_current_stream_capturing,
            # Two halves of a batch that take turns call each layer twice, on streams of their own.
            by_layer=not self.config.parallel_config.use_ubatching,
        )

    def begin(self, metadata: Metadata) -> None:
        """Say what the next forward step computes."""
        if self.steps is None:
            return
        if metadata.work:
            # A name that ended before may have another life: its blocks wait for decoders again.
            self.ended.difference_update(one.name for one in metadata.work)
            self.steps.begin([(one.name, one.tokens, self.layers.pages(one.blocks)) for one in metadata.work])
        else:
            self.steps.begin_without()

    def reports(self) -> bool:
        """Return whether layers of this pass are to be reported: those of a graph that is captured are, too."""
        return self.steps is not None and self.steps.reports()

    def layer_done(self, name: str) -> None:
        """Say that a layer is computed."""
        if self.steps is not None:
            self.steps.layer_done(name)

    def step_done(self) -> None:
        """Say that all layers are computed, also those without attention; of a pass that raised, that none is.

        vLLM calls it in a `finally`.
        """
        if self.steps is None:
            return
        if sys.exc_info()[0] is None:
            self.steps.end()
        else:
            self.steps.abandon()

    def start(self, metadata: Metadata) -> None:
        """Do what the scheduler's half has asked for."""
        for handed, name in metadata.finished:
            self.hand_over(handed, name, None)
        for aborted, name in metadata.aborted:
            self.hand_over(aborted, name, "its prefill was aborted")
        for ask in metadata.asks:
            try:
                self.ask(ask)
            except (ValueError, pt.EngineBusy, pt.EngineError) as error:
                self.refused(ask, error)
        cancelled = set(metadata.cancelled)
        for request_id, receive, _ in list(self.asking.values()):
            if request_id in cancelled:
                receive.cancel()
        for name, sources in metadata.renewed:
            self.renew(name, sources)

    def hand_over(self, request_id: str | None, name: str, reason: str | None) -> None:
        """Let a prefill's blocks wait for decoders, or say that it has failed."""
        assert self.prefiller is not None
        try:
            if name in self.ended:
                raise ValueError("it has ended before")
            if reason is None:
                self.prefiller.finish(name)
            else:
                self.prefiller.fail(name, reason)
        except ValueError as error:
            logger.warning("%s: it is not handed over: %s", name, error)
            self.ended.discard(name)
            if request_id is not None:
                self.done.finished_sending.add(request_id)
            return
        if request_id is not None:
            self.handed[name] = request_id

    def sources(self, texts: tuple[str, ...]) -> kv.Sources:
        """Return the ranks of a prefill server."""
        assert self.decoder is not None
        if texts not in self.groups:
            if len(self.groups) >= self.options.max_requests:
                self.groups.clear()
            self.groups[texts] = self.decoder.sources([source_of(text) for text in texts])
        return self.groups[texts]

    def ask(self, ask: Ask) -> None:
        """Ask a prefill server for a request."""
        if self.decoder is None:
            raise ValueError(
                f"kv_role {self.config.kv_transfer_config.kv_role!r} came; a decode server is a kv_consumer"
            )
        receive = self.decoder.request(
            self.sources(ask.sources),
            ask.name,
            self.layers.wanted(ask.blocks, ask.first_token, ask.tokens),
            tokens=ask.tokens,
            first_token=ask.first_token,
            segment_tokens=self.options.segment_tokens,
            num_targets=self.config.parallel_config.world_size,
            deadline_s=self.options.deadline_s,
        )
        self.asking[receive.number] = (ask.request_id if ask.waits else None, receive, time.monotonic())

    def refused(self, ask: Ask, error: Exception) -> None:
        """Note that a request could not be asked for: nothing will be written to its blocks."""
        logger.warning("%s: its prompt is not received: %s", ask.request_id, error)
        self.stats.count("failed")
        if ask.waits:
            self.done.finished_recving.add(ask.request_id)
            self.done.failed_recving.add(ask.request_id)

    def renew(self, name: str, sources: tuple[str, ...]) -> None:
        """Keep a prefill's pages for a request that is still to ask."""
        if self.decoder is None:
            return
        try:
            self.decoder.renew(self.sources(sources), name)
        except (ValueError, pt.EngineError) as error:
            logger.warning("%s: its lease is not renewed: %s", name, error)

    def poll_prefills(self) -> None:
        """Note which prefills have ended."""
        for name, end in self.prefiller.poll() if self.prefiller is not None else ():
            self.stats.count("aborted" if end == "failed" else end)
            request_id = self.handed.pop(name, None)
            if request_id is None:
                self.ended.add(name)
            else:
                self.done.finished_sending.add(request_id)

    def poll_receives(self) -> None:
        """Note which receives have ended. Blocks of failed ones come back when nothing can write to them any more."""
        if self.decoder is None:
            return
        arrived, failed, released = self.decoder.poll()
        for number, reason in failed:
            if number in self.asking:
                logger.warning("%s: its prompt does not arrive: %s", self.asking[number][0], reason)
        for number in arrived + released:
            request_id, _, since = self.asking.pop(number, (None, None, 0.0))
            if number not in arrived:
                self.stats.count("failed")
            elif request_id is not None:
                self.stats.received(time.monotonic() - since)
            if request_id is not None:
                self.done.finished_recving.add(request_id)
                if number not in arrived:
                    self.done.failed_recving.add(request_id)
        self.stats.quarantined(self.decoder.quarantined)

    def results(self) -> KVConnectorTransferResults:
        """Return which requests are over since the last call."""
        self.poll_prefills()
        self.poll_receives()
        done, self.done = self.done, KVConnectorTransferResults()
        return done

    def close(self) -> None:
        """End the engine: nothing is written any more."""
        if self.engine is not None:
            self.engine.close()
