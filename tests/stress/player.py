"""One rank's run: two layers over one workspace, their graphs, and the plan played round by round."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

import putget
from tests.stress.layer import CHECKS, SHAPES, Counters, Layer
from tests.stress.meeting import Meeting, in_turn
from tests.stress.plan import COMBINE, ENDINGS, RELEASE, batches_for, make_plan


class Player:
    """Plays a plan on one rank; construction and every method are collective."""

    def __init__(
        self, comm: putget.Communicator, device: torch.device, meeting: Meeting, options: argparse.Namespace
    ) -> None:
        self._options, self._device, self._meeting, self._rank = options, device, meeting, comm.rank
        self._plan = make_plan(options.rounds, comm.size, options.max_tokens, options.replay_share, options.seed)
        limits = (options.max_tokens, options.top_k, 2 * comm.size + 1)
        kinds: dict[str, Any] = {"max_tokens_per_rank": limits[0], "top_k": limits[1], "num_experts": limits[2]}
        needed = [
            putget.workspace_bytes(ep_size=comm.size, payloads=shape.payloads, output=shape.output, **kinds)
            for shape in SHAPES
        ]
        common = {"device": device, "timeout_s": options.timeout_s, "warmup_timeout_s": 3 * options.timeout_s}
        self._workspace = putget.Workspace(comm, sum(needed), **common)
        self._counters = Counters.make(device)
        sizes = self._plan.sizes.to(device)
        common.update(kinds, workspace=self._workspace, num_sms=options.num_sms)
        self._layers = []
        for index, shape in enumerate(SHAPES):
            a2a = putget.AllToAll(comm, payloads=shape.payloads, output=shape.output, **common)
            self._layers.append(Layer(a2a, index, limits, sizes, self._counters))
        self._batches = batches_for(options.max_tokens)
        self._graphs: dict[tuple[int, int, int], torch.cuda.CUDAGraph] = {}
        self._counts = {"replayed": 0, "eager": 0, "not_combined": 0, "tokens": 0}

    def prepare(self) -> None:
        """Plays every layer eagerly, so that nothing is loaded or allocated later; then captures the graphs."""
        for layer in self._layers:
            for ending in (COMBINE, RELEASE, COMBINE):
                self._counters.clock.zero_()
                layer.play(self._options.max_tokens, None, ending, padded=True)
        self._counters.clock.zero_()
        self._synchronize()
        if self._options.replay_share > 0 and self._options.threads:
            in_turn(self._meeting, self._capture)  # threads share an allocator, which knows one capture at a time
        elif self._options.replay_share > 0:
            self._capture()

    def _capture(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if stream == torch.cuda.default_stream(self._device):
            stream = torch.cuda.Stream(self._device)  # an emulated rank has a stream of its own and must keep to it
        for index, layer in enumerate(self._layers):
            for batch in self._batches:
                for ending in ENDINGS:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                        layer.play(batch, None, ending, padded=True)
                    self._graphs[index, batch, ending] = graph
        self._synchronize()

    def run(self) -> dict[str, Any]:
        """Plays the plan, or as much of it as the time allows; returns what happened on this rank."""
        options, began = self._options, time.monotonic()
        # Emulated ranks must not fill their launch queues: a full one holds up the launches of all threads.
        pace = 4 if options.threads and self._device.type == "cuda" else options.report_every
        played = 0
        for index in range(self._plan.rounds):
            self._play(index)
            played += 1
            if played % pace == 0:
                self._synchronize()
            if played % options.report_every == 0 and self._report_and_stop(played, time.monotonic() - began):
                break
        self._synchronize()
        by_check = dict(zip(CHECKS, self._counters.wrong.tolist(), strict=True))
        first = int(self._counters.first_wrong)
        return {"rounds": played, "by_check": by_check, "first_wrong_round": first, **self._counts}

    def close(self) -> None:
        self._graphs.clear()
        for layer in self._layers:
            layer.a2a.close()
        self._workspace.close()

    def _play(self, index: int) -> None:
        size = int(self._plan.sizes[index, self._rank])
        layer, ending = int(self._plan.layers[index]), int(self._plan.endings[index])
        self._counts["tokens"] += size
        self._counts["not_combined"] += ending != COMBINE
        if self._plan.replayed[index, self._rank]:
            self._counts["replayed"] += 1
            self._graphs[layer, min(b for b in self._batches if b >= size), ending].replay()
            return
        self._counts["eager"] += 1
        most = max(1, int(self._plan.sizes[index].max()))
        max_rows = most if index % 3 == 0 else None
        self._layers[layer].play(size, max_rows, ending, padded=False, plant=self._options.plant)

    def _report_and_stop(self, played: int, seconds: float) -> bool:
        self._meeting.wait()  # check() of an emulated rank waits for the whole GPU
        for layer in self._layers:
            layer.a2a.check()
        self._meeting.wait()
        if self._rank == 0 and sys.stderr.isatty():
            wrong = int(self._counters.wrong.sum())
            print(f"\r{played} rounds, {wrong} wrong on rank 0, {seconds:.0f} s", end="", file=sys.stderr, flush=True)
        limit = self._options.seconds
        return limit is not None and self._meeting.ask_first(seconds > limit)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
