"""Two batches through one layer: experts work on one while the rows of the other travel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from putget._arguments import check_int
from putget.moe.layer import ExpertParallelMoE
from putget.moe.streams import Beside


class TwoBatch:
    """Two-batch overlap, as DeepSeek describes it for prefill (technical report of DeepSeek-V3, section 3.4.1).

    Each batch has an ``AllToAll`` and a workspace of its own. Dispatch and combine of both run on a second stream, with
    few SMs; routers and experts run on the current stream, with the others. So the second batch's rows travel while
    experts work on the first, and the first batch's go home while they work on the second. Both batches can be captured
    in one CUDA graph.

    Args:
        layer: The layer whose weights are used. Construction is collective.
        num_sms: SMs for rows to travel with; FP8 experts leave them free. ``torch._grouped_mm``, which BF16 experts
            use, cannot be told to. CUDA only.

    Raises:
        ValueError: num_sms is out of range.
    """

    def __init__(self, layer: ExpertParallelMoE, *, num_sms: int = 16) -> None:
        check_int("num_sms", num_sms, 1, 1 << 16)
        self._layer = layer
        self._expert_sms: int | None = None
        options: dict[str, Any] = {}
        if layer.device.type == "cuda":
            all_sms = torch.cuda.get_device_properties(layer.device).multi_processor_count
            if num_sms >= all_sms:
                raise ValueError(f"num_sms is {num_sms}, the GPU has {all_sms} and experts need some")
            self._expert_sms = all_sms - num_sms
            options["num_sms"] = num_sms
        self._lanes = (layer.make_lane(**options), layer.make_lane(**options))
        self._travel = Beside(layer.device)

    @torch.no_grad()
    def __call__(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """The layer for two batches.

        Args:
            first: [num_tokens, hidden_size] bfloat16, as for ``ExpertParallelMoE.forward``.
            second: The same, of any other number of tokens.

        Returns:
            The output of each.

        Raises:
            ValueError: A batch is wrong; nothing has happened on any rank.
            PeerTimeout: A rank is missing. On CUDA a later call raises it.
        """
        layer, travel = self._layer, self._travel
        batches = (first, second)
        for name, x in zip(("first", "second"), batches, strict=True):
            layer.check_input(name, x)
        # Allocated here, so that all memory belongs to the current stream; and kept until both streams have met again.
        outputs = [torch.empty_like(x) for x in batches]
        kept: list[Any] = []
        arrivals = []
        for x, lane in zip(batches, self._lanes, strict=True):
            ids, weights, payloads = layer.route(x)
            travel.fork()
            with layer.range("dispatch"), travel.on_it():
                received = lane.a2a.dispatch(ids, weights, *payloads)
            arrivals.append((received, payloads, travel.mark()))
            kept.append((ids, weights))
        for x, lane, (received, payloads, arrived), out in zip(batches, self._lanes, arrivals, outputs, strict=True):
            addend = layer.run_shared(payloads, self._expert_sms)
            travel.wait_for(arrived)
            with layer.range("expert_major"):
                grouped = received.expert_major(memory=lane.memory)
            rows = layer.run_experts(grouped, len(x), self._expert_sms)
            travel.fork()
            with layer.range("combine"), travel.on_it():
                lane.a2a.combine(rows, layout=grouped, out=out, addend=addend)
            kept.append((rows, addend))
        travel.join()
        return outputs[0], outputs[1]

    def check(self) -> None:
        """See ``AllToAll.check``, for both batches."""
        for lane in self._lanes:
            lane.a2a.check()

    def close(self) -> None:
        """Frees both objects and their workspaces; the layer stays open. Needs no peer. Idempotent.

        Raises:
            PeerTimeout, CapacityExceeded, ProtocolMisuse: A fault that no call has raised yet; both are closed all the
                same.
        """
        try:
            self._lanes[0].a2a.close()
        finally:
            self._lanes[1].a2a.close()

    def __enter__(self) -> TwoBatch:
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            self._lanes[0].a2a.__exit__(*exception)
        finally:
            self._lanes[1].a2a.__exit__(*exception)
