"""A rank's engine and cache, in one of the two roles."""

from __future__ import annotations

import base64
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import AbortNotification, CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_parallel

from putget_transfer import kv
from putget_transfer.adapters.options import Options
from putget_transfer.adapters.sglang import layers
from putget_transfer.adapters.sglang.bootstrap import SOURCE
from putget_transfer.adapters.sglang.pools import Metadata, Rank, cache_of, last_layer, model_of
from putget_transfer.adapters.sglang.receiving import Receiving
from putget_transfer.adapters.sglang.sending import GIVEN_UP, Sending

logger = logging.getLogger(__name__)

ASK = b"PUTGET"
"""The first part of the message by which a decode rank says that it has asked."""
LOOK_MS = 200
DRAIN_S = 30.0
"""How long a role switch waits for pages that may still be written to, before the engine is closed over them."""


def refuse(mode: Any) -> None:
    """Refuse what is not moved, when a server starts.

    Raises:
        ValueError: Such an option was chosen; it is named.
    """
    parallel = get_parallel()
    refused = {
        "context parallelism of attention": parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1,
        "--enable-kv-cache-sharding": parallel.enable_kv_cache_sharding,
        "pipeline parallelism of decode servers": mode == DisaggregationMode.DECODE and parallel.pp_size > 1,
        "SGLANG_DISAGG_STAGING_BUFFER": envs.SGLANG_DISAGG_STAGING_BUFFER.get(),
        "SGLANG_RUST_SERVER": envs.SGLANG_RUST_SERVER.get(),
    }
    named = [name for name, chosen in refused.items() if chosen]
    if named:
        raise ValueError(f"--disaggregation-transfer-backend putget: {', '.join(named)} came; it is not supported")


class PutgetKVManager(CommonKVManager):  # type: ignore[misc]
    """SGLang's manager with an engine of putget."""

    supports_role_switch = True
    supports_deferred_decode_kv_release = True
    reports_transfer_latency = True

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        """Register the cache, and begin to listen.

        Raises:
            ValueError: The cache, or an option, is of a kind that is not supported.
        """
        refuse(disaggregation_mode)
        self.options = Options.from_environment()
        self.kv_args, self.disaggregation_mode, self.server_args = args, disaggregation_mode, server_args
        self.latent = bool(is_mla_backend or getattr(args, "is_hybrid_mla_backend", False))
        self.metadata = Metadata(args)
        self.stopped = threading.Event()
        self.open()
        try:
            super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        except BaseException:
            self.engine.close()
            raise
        # Whatever the environment says: pages of a failed request stay until nothing can write to them.
        self.enable_deferred_decode_kv_release = True
        # Each byte of a decode rank comes from one rank, for MLA too.
        self._kv_replica_factor = 1
        self.deadline_s = self.options.deadline_s
        self.listener: threading.Thread | None = None
        if disaggregation_mode == DisaggregationMode.PREFILL:
            self.listener = threading.Thread(target=self._listen, name="putget-kv", daemon=True)
            self.listener.start()
        else:
            self.deadline_s = min(self.deadline_s, self.waiting_timeout)
            self._start_heartbeat_checker_thread()

    def _rank(self) -> Rank:
        parallel, device = get_parallel(), get_device()
        name = "cpu" if device.device == "cpu" else f"cuda:{self.kv_args.gpu_id}"
        config = ModelConfig.from_server_args(self.server_args)
        first = getattr(self.kv_args, "prefill_start_layer", 0)
        return Rank(
            rank=parallel.attn_tp_rank,
            ranks=parallel.attn_tp_size,
            num_kv_heads=1 if self.latent else config.get_total_num_kv_heads(),
            first_layer=first if self.disaggregation_mode == DisaggregationMode.PREFILL else 0,
            device=name,
            model=model_of(config, self.kv_args, name),
        )

    def open(self) -> None:
        """Start an engine, and describe the cache to it."""
        rank, page_tokens = self._rank(), self.kv_args.page_size
        self.engine = self.options.engine(rank.device)
        try:
            cache, most = cache_of(self.engine, self.kv_args, rank, latent=self.latent), self.options.max_requests
            if self.disaggregation_mode == DisaggregationMode.PREFILL:
                self.prefiller = kv.Prefiller(cache, lease_s=self.options.lease_s, max_requests=most)
                self.sending = Sending(self.prefiller, cache, page_tokens, self.conclude, self._dropped)
                if rank.device == "cpu":
                    # A GPU's calls return before they have computed.
                    self.last_layer = last_layer(self.kv_args, rank, latent=self.latent)
                    layers.install()
            else:
                decoder = kv.Decoder(cache, max_requests=most, confirm_s=self.options.confirm_s)
                self.receiving = Receiving(decoder, cache, page_tokens, int(self.options.segment_tokens))
        except BaseException:
            self.engine.close()
            raise
        logger.info("putget moves this cache:\n%s", cache.describe())

    def states_of(self, state_indices: Sequence[Any] | None) -> list[int]:
        """Return the row of each state.

        Raises:
            ValueError: A state has no row, or several.
        """
        found = []
        for kind, rows in zip(self.kv_args.state_types, state_indices or (), strict=bool(state_indices)):
            rows = [] if rows is None else list(rows)
            if len(rows) != 1:
                raise ValueError(f"state_indices: {len(rows)} rows came for {kind.value!r}; 1 is needed")
            found.append(int(rows[0]))
        return found

    # Prefill.

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        source = base64.b64encode(self.prefiller.source()).decode()
        super()._register_topology_row(url, {**payload, SOURCE: source})

    def conclude(self, room: int, reason: str | None) -> None:
        """Note the end of a room whose pages have come back."""
        if room not in self.request_status:
            return
        if reason is not None:
            with self.failure_lock:
                self.failure_records.setdefault(room, reason)
        self.update_status(room, KVPoll.Success if reason is None else KVPoll.Failed)

    def _dropped(self, room: int) -> None:
        self.request_status.pop(room, None)
        self.req_to_decode_prefix_len.pop(room, None)

    def asking(self, room: int, name: str, num_targets: int, prefix: int) -> list[bytes]:
        """Return the message by which a decode rank says that it has asked for a room."""
        return [ASK, str(room).encode(), name.encode(), str(num_targets).encode(), str(prefix).encode()]

    def _hear(self, message: list[bytes]) -> None:
        notification = AbortNotification.from_zmq(message) if message[0] == b"ABORT" else None
        if notification is not None:
            room = notification.room
            if self.request_status.get(room) != KVPoll.Success:
                self.sending.fail(room, GIVEN_UP)
        elif message[0] == ASK:
            room, name, num_targets, prefix = int(message[1]), message[2].decode(), int(message[3]), int(message[4])
            if self.sending.asked(room, name, num_targets):
                self.req_to_decode_prefix_len[room] = prefix
                self.update_status(room, KVPoll.WaitingForInput)
        else:
            logger.warning("a message %r came; it is not known", message[0][:20])

    def _listen(self) -> None:
        while not self.stopped.is_set():
            try:
                if self.server_socket.poll(LOOK_MS):
                    self._hear(self.server_socket.recv_multipart())
                # Leases end, and lost decoders come back, also while no request asks.
                self.sending.poll()
            except Exception:
                if self.stopped.is_set():
                    return
                logger.exception("a message of a decode server could not be handled")

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        num_kv_tokens: int | None = None,
        *,
        wait_event: Any = None,
        indices_event: Any = None,
        trace_ctx: Any = None,
    ) -> None:
        """Let a chunk's pages leave. They are computed, unless `wait_event` says otherwise."""
        if wait_event is not None and not wait_event.query():
            if not is_last_chunk:
                # They leave with the next chunk, whose results have been awaited.
                self.sending.keep(bootstrap_room, kv_indices)
                return
            wait_event.synchronize()
        context, states = None, None
        if is_last_chunk:
            try:
                states = self.states_of(state_indices)
            except ValueError as error:
                self.sending.fail(bootstrap_room, str(error))
                return
            context = self.metadata.read(int(aux_index or 0))
        self.sending.add(bootstrap_room, kv_indices, states, context)

    # Decode.

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Return whether nothing can write to a failed request's pages any more."""
        return self.receiving.is_free(bootstrap_room)

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """Forget a failed request whose pages are used again."""
        super().clear_deferred_abort_state(bootstrap_room)
        self.receiving.forget(bootstrap_room)

    # Both.

    def shut(self) -> None:
        """End the engine, when nothing is under way: nothing is read or written any more."""
        side: Sending | Receiving = (
            self.sending if self.disaggregation_mode == DisaggregationMode.PREFILL else self.receiving
        )
        end = time.monotonic() + DRAIN_S
        while not side.is_idle() and time.monotonic() < end:
            time.sleep(0.01)
        self.engine.close()

    def deregister_buffer_to_engine(self) -> None:
        """Let go of the cache, whose memory is given back."""
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            for room in list(self.sending.rooms):
                self.sending.fail(room, "the cache is released")
        self.shut()

    def register_buffer_to_engine(self) -> None:
        """Take the cache again."""
        self.open()
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.register_to_bootstrap()

    def teardown(self) -> None:
        """End this role: the engine, threads and sockets. The cache is SGLang's."""
        self.stopped.set()
        if self.listener is not None:
            self.listener.join(5)
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            self._heartbeat_shutdown.set()
        self.shut()
        with self._socket_lock:
            for socket in (*self._socket_cache.values(), *self._monitor_cache.values()):
                with contextlib.suppress(Exception):
                    socket.close(linger=0)
            self._socket_cache.clear()
            self._monitor_cache.clear()
        self.server_socket.close(linger=0)
        self._zmq_ctx.destroy(linger=0)
