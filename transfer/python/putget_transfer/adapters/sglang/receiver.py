"""A request at a decode server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver

import putget_transfer as pt
from putget_transfer import kv
from putget_transfer.adapters.sglang.bootstrap import SOURCE


class PutgetKVReceiver(CommonKVReceiver):  # type: ignore[misc]
    """SGLang's receiver. It knows by its own count that all has arrived; no message of the prefill server says so."""

    receive: kv.Receive | None = None
    aux_index: int = -1

    def _register_kv_args(self) -> bool:
        """Return True: a prefill rank learns this cache from the first request."""
        return self.bootstrap_infos is not None

    def _fail(self, reason: str) -> Any:
        """Note the first reason; return Failed."""
        with self.kv_mgr.failure_lock:
            self.kv_mgr.failure_records.setdefault(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed
        # The server may have started again, with other ranks.
        self.invalidate_cached_bootstrap_infos()
        if self.receive is not None:
            self.kv_mgr.receiving.hold(self.bootstrap_room, self.receive)
        return KVPoll.Failed

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """Ask the prefill ranks for the pages, and tell their schedulers that they were asked."""
        if destination != KVTransferDestination.DEVICE or device_kv_indices is not None:
            raise NotImplementedError("putget writes to the device's cache only")
        if self.bootstrap_infos is None:
            self._fail(f"no prefill ranks are known at {self.bootstrap_addr}")
            return
        mgr, room = self.kv_mgr, self.bootstrap_room
        self.aux_index = -1 if aux_index is None else aux_index
        try:
            texts = tuple(info.get(SOURCE) or "" for info in self.bootstrap_infos)
            if not all(texts):
                raise ValueError(f"the prefill server at {self.bootstrap_addr} does not use putget")
            states = mgr.states_of(state_indices)
            name, self.receive = mgr.receiving.ask(texts, room, kv_indices, states, mgr.deadline_s)
        except (ValueError, pt.EngineBusy, pt.EngineError) as error:
            self._fail(str(error))
            return
        for info in self.bootstrap_infos:
            message = mgr.asking(room, name, self.required_dst_info_num, decode_prefix_len or 0)
            if not self._send_bootstrap_message(bootstrap_info=info, message=message, operation="send_metadata"):
                self._fail("a prefill rank could not be told")
                return
        self.init_time = time.time()

    def _poll(self) -> Any:
        if self.conclude_state is not None or self.receive is None:
            return super()._poll()
        state = self.receive.state
        if self.kv_mgr.check_status(self.bootstrap_room) == KVPoll.Failed:
            return self._fail("it has failed")
        if state == "arrived":
            self.kv_mgr.metadata.write(self.aux_index, self.receive.context)
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
            self.conclude_state = KVPoll.Success
            return KVPoll.Success
        if state in ("failed", "released"):
            return self._fail(self.receive.reason or "it has failed")
        return KVPoll.Transferring

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        """Take back what was asked for, and tell the prefill ranks' schedulers."""
        if self.receive is not None:
            self.kv_mgr.receiving.hold(self.bootstrap_room, self.receive)
        if self.receive is None or self.receive.state != "arrived":
            super()._send_abort_notification(force_arm=force_arm)

    def failure_exception(self) -> None:
        """Raise why it has failed. What was asked for is taken back, also if the failure is another rank's."""
        if self.receive is not None:
            self.kv_mgr.receiving.hold(self.bootstrap_room, self.receive)
        super().failure_exception()
