"""When a request comes to each stage of its handover: seen inside of vLLM's servers, and at the client.

`install` puts the hooks in place before servers are forked. Times are those of the machine's monotonic clock, which
all processes share.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

ANSWER_S = 300.0
STAGES = {
    "question": "the router, the decode server's queue, and its question",
    "arm": "the prefill ranks' answer",
    "transfer": "the rest of the pages",
    "poll": "the decode server's scheduler hears of it",
    "schedule": "the request's first step begins",
    "first step": "the first token, computed again",
    "second step": "the second token",
    "client": "the way of the second token to the client",
}
"""From the prefill server's first token to the client's second: each begins where the one before ends."""
OWN = ("arm", "poll")
"""The connector's stages beside the transfer."""


class Notes:
    """Lines of a process in a file of its own, also after a fork."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pid = folder, 0
        self.file: TextIO

    def write(self, role: str, what: str, request: str, **more: Any) -> None:
        now = time.monotonic()
        if self.pid != os.getpid():
            self.pid = os.getpid()
            self.file = (self.folder / f"{self.pid}.stages").open("a", buffering=1)
        self.file.write(json.dumps({"at": now, "role": role, "what": what, "request": request, **more}) + "\n")


def sums(metrics: str) -> dict[str, float]:
    """The seconds of all requests so far, by stage."""
    return {stage: float(value) for stage, value in re.findall(r'_sum{stage="(\w+)"} (\S+)', metrics)}


def install(folder: Path) -> None:
    """Have servers that are forked from here on write notes into a folder."""
    notes = Notes(folder)
    _scheduler(notes)
    _worker(notes)


def _scheduler(notes: Notes) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    own_schedule, own_update = Scheduler.schedule, Scheduler.update_from_output

    def role(self: Any) -> str:
        return "prefill" if self.vllm_config.kv_transfer_config.is_kv_producer else "decode"

    def schedule(self: Any, *args: Any, **options: Any) -> Any:
        output = own_schedule(self, *args, **options)
        for request in output.num_scheduled_tokens:
            notes.write(role(self), "scheduled", request)
        return output

    def update(self: Any, *args: Any, **options: Any) -> Any:
        found = own_update(self, *args, **options)
        for outputs in found.values():
            for output in outputs.outputs:
                for _ in output.new_token_ids:
                    notes.write(role(self), "token", output.request_id)
        return found

    Scheduler.schedule, Scheduler.update_from_output = schedule, update


def _worker(notes: Notes) -> None:
    from putget_transfer.adapters.vllm.worker import Worker

    own_ask, own_receives, own_prefills = Worker.ask, Worker.poll_receives, Worker.poll_prefills

    def ask(self: Any, question: Any) -> None:
        start, before = time.monotonic(), set(self.asking)
        own_ask(self, question)
        for number in self.asking.keys() - before:
            receive = self.asking[number][1]
            receive.add_done_callback(lambda _: notes.write("decode", "arrived", question.request_id))
            notes.write("decode", "asked", question.request_id, begun=start)

    def poll_receives(self: Any) -> None:
        before = dict(self.asking)
        own_receives(self)
        for number in before.keys() - self.asking.keys():
            notes.write("decode", "polled", before[number][0], sums=sums(self.decoder.metrics_text()))

    def poll_prefills(self: Any) -> None:
        before = set(self.done.finished_sending)
        own_prefills(self)
        for request in self.done.finished_sending - before:
            notes.write("prefill", "sent", request, sums=sums(self.prefiller.metrics_text()))

    Worker.ask, Worker.poll_receives, Worker.poll_prefills = ask, poll_receives, poll_prefills


@dataclass
class Asked:
    """A request at the client: its name, its tokens, and when each of them came."""

    name: str
    tokens: list[int]
    times: list[float]


def ask(url: str, body: dict[str, Any]) -> Asked:
    """Stream a request whose body has a `request_id`, through a router or a server."""
    import httpx

    asked = Asked(body["request_id"], [], [])
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=ANSWER_S) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{asked.name}: {answer.status_code} {answer.read()!r}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise SystemExit(f"{asked.name}: {event}")
            tokens = event["choices"][0]["token_ids"]
            asked.tokens += tokens
            asked.times += [time.monotonic()] * len(tokens)
    return asked


def notes_in(folder: Path) -> list[dict[str, Any]]:
    """All notes, in the order of time."""
    lines = [line for file in folder.glob("*.stages") for line in file.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda note: float(note["at"]))


def has_first_token(notes: list[dict[str, Any]], asked: Asked) -> bool:
    """Whether the prefill server had a token of its own before it was told that the request is over."""
    own = (note for note in notes if note["request"] is not None and asked.name in note["request"])
    return any((note["role"], note["what"]) == ("prefill", "token") for note in own)


def ends_of(notes: list[dict[str, Any]], asked: Asked) -> tuple[float, dict[str, float]]:
    """When a request's handover begins, and when each of its stages ends."""
    at: dict[tuple[str, str], list[float]] = defaultdict(list)
    for note in notes:
        if note["request"] is not None and asked.name in note["request"]:
            at[note["role"], note["what"]].append(note["at"])
    polls = [note for note in notes if note["what"] == "polled"]
    place = next(index for index, note in enumerate(polls) if asked.name in (note["request"] or ""))
    before = polls[place - 1]["sums"]["accepted"] if place else 0.0
    # Requests come one by one, so the sum grows by this one's time.
    accepted = polls[place]["sums"]["accepted"] - before
    (asked_at,) = at["decode", "asked"]
    (begun,) = (note["begun"] for note in notes if note["what"] == "asked" and asked.name in note["request"])
    first, second = at["decode", "token"][:2]
    return at["prefill", "token"][0], {
        "question": asked_at,
        "arm": max(asked_at, begun + accepted),
        "transfer": at["decode", "arrived"][0],
        "poll": at["decode", "polled"][0],
        "schedule": at["decode", "scheduled"][0],
        "first step": first,
        "second step": second,
        "client": asked.times[1],
    }


def stages_of(start: float, ends: dict[str, float]) -> dict[str, float]:
    """The milliseconds of each stage. What was over at the prefill server's first token has none."""
    found = {}
    for stage in STAGES:
        found[stage] = 1e3 * max(0.0, ends[stage] - start)
        start = max(start, ends[stage])
    return found


def prefiller_stages(notes: list[dict[str, Any]], skip: int) -> dict[str, float]:
    """The mean milliseconds of a prefiller's own stages, without the first requests."""
    sent = [note["sums"] for note in notes if note["what"] == "sent"]
    if len(sent) <= skip:
        return {}
    before = sent[skip - 1] if skip else dict.fromkeys(sent[0], 0.0)
    return {stage: 1e3 * (sent[-1][stage] - before[stage]) / (len(sent) - skip) for stage in sent[-1]}
