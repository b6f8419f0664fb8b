"""A request at a prefill server."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender


class PutgetKVSender(CommonKVSender):  # type: ignore[misc]
    """SGLang's sender. It ends when nothing reads the request's pages any more."""

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        reason = mgr.sending.take(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        if reason is not None:
            # The decode server has given it up before it came here.
            mgr.conclude(bootstrap_room, reason)

    def poll(self) -> Any:
        """Return the state of the request."""
        self.kv_mgr.sending.poll()
        status = super().poll()
        if status == KVPoll.Failed:
            # Those that SGLang has failed itself, as one that no decode rank has asked for in time.
            self._tell(self.kv_mgr.failure_records.get(self.bootstrap_room, "it has failed on another rank"))
        return status

    def poll_pp_consensus(self) -> Any:
        """Return the state of the request on all stages of the pipeline."""
        self.kv_mgr.sending.poll()
        return super().poll_pp_consensus()

    def _tell(self, reason: str) -> None:
        at = self.kv_mgr.sending.rooms.get(self.bootstrap_room)
        if at is not None and at.reason is None:
            self.kv_mgr.sending.fail(self.bootstrap_room, reason)

    def abort(self) -> None:
        """Give the request up. `poll` says Failed when nothing reads its pages any more."""
        self.kv_mgr.sending.fail(self.bootstrap_room, "Aborted by AbortReq.")

    def clear(self) -> None:
        """Forget the request."""
        super().clear()
        self.kv_mgr.sending.clear(self.bootstrap_room)
