"""The bootstrap server: it tells decode servers which prefill ranks there are, and their sources."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

SOURCE = "putget_source"
"""The key of a prefill rank's `Prefiller.source`, as text in base 64."""


class PutgetKVBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """SGLang's bootstrap server, with sources."""

    def __init__(self, host: str, port: int) -> None:
        self.sources: dict[tuple[int, int, int, int], str] = {}
        super().__init__(host, port)

    async def _handle_route_put(self, request: Any) -> Any:
        told = await request.json()
        group = told["attn_dp_rank"] if told["system_dp_size"] == 1 else told["system_dp_rank"]
        # Before the rank is known: no decode server may see it without its source.
        self.sources[(group, told["attn_cp_rank"], told["attn_tp_rank"], told["pp_rank"])] = told.get(SOURCE, "")
        return await super()._handle_route_put(request)

    async def _handle_route_get(self, request: Any) -> Any:
        answer = await super()._handle_route_get(request)
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        if answer.status != 200:
            return answer
        group, context, tensor, stage = (int(request.query[name]) for name in names)
        source = self.sources.get((group, context, tensor, stage))
        if source is None:
            # The question was about the server, not a rank.
            return answer
        return web.json_response({**json.loads(answer.body), SOURCE: source})
