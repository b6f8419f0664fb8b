"""Cases of the connector inside vLLM's own classes; test_vllm_kv.py names them.

python -m tests.engines.kv_vllm_cases FOLDER: writes FOLDER/cases.json, what each case came to. FOLDER/8 is the model.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from putget_transfer.adapters import router
from putget_transfer.adapters import vllm as adapter
from tests.engines.kv_vllm_sides import Side, step_until, step_until_idle

PROMPTS = {"a": [7, 3, 250] * 11, "b": list(range(100)), "c": [*range(64), 9]}
NEW_TOKENS = 5


def alone(model: Path) -> dict[str, list[int]]:
    """The tokens of one server that does everything."""
    side = Side(model, None)
    for name, prompt in PROMPTS.items():
        side.add(name, prompt, NEW_TOKENS)
    step_until_idle(side)
    return side.tokens


def pair(model: Path, **options: Any) -> tuple[Side, Side]:
    return Side(model, "kv_producer", **options), Side(model, "kv_consumer", **options)


def sources_of(prefill: Side) -> list[str]:
    """The facts that a router learns from a prefill server before it has sent a request."""
    prefill.add("describe", [1], 1, putget_describe=True)
    step_until_idle(prefill)
    return list(prefill.told.pop("describe")["putget_sources"])


def decode_first(prefill: Side, decode: Side, names: str, sources: list[str], **also: Any) -> None:
    for name in names:
        params = {"do_remote_prefill": True, "transfer_id": f"t{name}", "putget_sources": sources, **also}
        decode.add(name, PROMPTS[name], NEW_TOKENS, **params)
    step_until([decode], lambda: len(decode.worker.worker.asking) == len(names))


def prefill_now(prefill: Side, names: str) -> None:
    for name in names:
        prefill.add(name, PROMPTS[name], 1, do_remote_decode=True, transfer_id=f"t{name}")


def check(model: Path, decode: Side, names: str = "abc") -> None:
    expected = alone(model)
    assert {name: decode.tokens[name] for name in names} == {name: expected[name] for name in names}


def either_order(model: Path, **options: Any) -> None:
    """Prompts of part of a page, several pages and a page's edge, in chunks; all tokens but the last are read."""
    prefill, decode = pair(model, **options)
    sources = sources_of(prefill)
    decode_first(prefill, decode, "ab", sources)
    prefill_now(prefill, "abc")
    step_until([prefill], lambda: "c" in prefill.told)
    decode.add("c", PROMPTS["c"], NEW_TOKENS, **prefill.told["c"])
    step_until_idle(prefill, decode)
    check(model, decode)
    assert decode.first_read == {name: len(prompt) - 1 for name, prompt in PROMPTS.items()}, decode.first_read
    assert sources == prefill.told["a"]["putget_sources"]
    prefill.close()
    decode.close()


def with_the_runner_of_cpus(model: Path) -> None:
    either_order(model, runner=1)


def with_sliding_windows(model: Path) -> None:
    either_order(model, window=40)


def numbers_of_ranks_may_differ(model: Path) -> None:
    """Heads of one rank go to two and back; a pipeline's stages send their own layers."""
    for prefill, decode in (({}, {"tensor": 2}), ({"tensor": 2}, {}), ({"stages": 2, "tensor": 2}, {"tensor": 4})):
        sides = Side(model, "kv_producer", **prefill), Side(model, "kv_consumer", **decode)
        decode_first(*sides, "ab", sources_of(sides[0]))
        prefill_now(sides[0], "abc")
        step_until([sides[0]], lambda sides=sides: "c" in sides[0].told)
        sides[1].add("c", PROMPTS["c"], NEW_TOKENS, **sides[0].told["c"])
        step_until_idle(*sides)
        check(model, sides[1])
        assert sides[1].first_read == {name: len(prompt) - 1 for name, prompt in PROMPTS.items()}
        for side in sides:
            side.close()


def a_prefix_that_is_there_is_not_moved(model: Path) -> None:
    prefill, decode = pair(model, lease_s=3600)
    decode_first(prefill, decode, "c", sources_of(prefill))
    prefill_now(prefill, "c")
    step_until_idle(prefill, decode)
    prefill_now(prefill, "b")
    step_until([prefill], lambda: "b" in prefill.told)
    sent = bytes_sent(prefill)
    decode.add("b", PROMPTS["b"], NEW_TOKENS, **prefill.told["b"])
    step_until_idle(prefill, decode)
    check(model, decode, "bc")
    # Two of four pages of two layers: 4 heads of 32 tokens with 16 numbers.
    assert bytes_sent(prefill) - sent == 2 * 2 * 4 * 32 * 16 * 4
    # All of it is there: the prefill server's pages come back, and nothing waits.
    prefill.add("d", PROMPTS["c"][:64], 1, do_remote_decode=True)
    step_until([prefill], lambda: "d" in prefill.told)
    decode.add("d", PROMPTS["c"][:64], 1, **prefill.told["d"])
    step_until_idle(prefill, decode)
    prefill.close()
    decode.close()


def bytes_sent(prefill: Side) -> int:
    text = prefill.worker.worker.prefiller.metrics_text()
    return sum(int(line.split()[-1]) for line in text.splitlines() if "bytes" in line and not line.startswith("#"))


def a_preempted_prefill_goes_on(model: Path) -> None:
    prefill, decode = pair(model)
    decode_first(prefill, decode, "b", sources_of(prefill))
    prefill_now(prefill, "b")
    prefill.step()
    assert prefill.scheduler.running[0].num_computed_tokens == 64
    prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    # Its blocks go to others, which fill them first.
    prefill_now(prefill, "a")
    decode.add("a", PROMPTS["a"], NEW_TOKENS, do_remote_prefill=True, transfer_id="ta", putget_sources=sources(prefill))
    step_until_idle(prefill, decode)
    check(model, decode, "ab")
    prefill.close()
    decode.close()


def a_preempted_decode_is_computed_again(model: Path) -> None:
    """Its prompt has arrived; its blocks are taken away while it decodes."""
    prefill, decode = pair(model)
    decode_first(prefill, decode, "b", sources_of(prefill))
    prefill_now(prefill, "b")
    step_until([prefill, decode], lambda: len(decode.tokens["b"]) == 2)
    decode.scheduler.reset_prefix_cache(reset_running_requests=True)
    step_until_idle(prefill, decode)
    check(model, decode, "b")
    assert decode.ends == {"b": "length"}, decode.ends
    prefill.close()
    decode.close()


class OneByOne:
    """A prefiller that refuses steps of several requests, as if one of them were over."""

    def __init__(self, prefiller: Any) -> None:
        self.prefiller, self.calls = prefiller, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.prefiller, name)

    def begin_step(self, step: int, work: list[Any], stream: Any) -> None:
        self.calls += "r" if len(work) > 1 else "b"
        if len(work) > 1:
            raise ValueError("one of them is over")
        self.prefiller.begin_step(step, work, stream)

    def layer_done(self, layer: int, stream: Any) -> None:
        self.calls += str(layer)
        self.prefiller.layer_done(layer, stream)


def a_refused_step_leaves_when_it_is_computed(model: Path) -> None:
    """A later step would say that an earlier one is computed, so none begins before the last layer."""
    prefill, decode = pair(model)
    decode_first(prefill, decode, "abc", sources_of(prefill))
    watched = prefill.worker.worker.steps.prefiller = OneByOne(prefill.worker.worker.prefiller)
    prefill_now(prefill, "abc")
    step_until_idle(prefill, decode)
    check(model, decode)
    assert decode.first_read == {name: len(prompt) - 1 for name, prompt in PROMPTS.items()}, decode.first_read
    refused = watched.calls.split("r")[1:]
    assert refused, watched.calls
    # Two layers, the end of the step, and then each request's own step.
    assert all(calls.startswith("011b1b1") for calls in refused), watched.calls
    prefill.close()
    decode.close()


def layers_of_a_captured_graph_are_reported(model: Path) -> None:
    """Metadata is there while a prefill server captures a graph, so that vLLM calls the connector for its layers."""
    assert not adapter.PutgetConnector.requires_piecewise_for_cudagraph({})
    prefill, decode = pair(model)
    calls: list[tuple[int, object]] = []
    steps = prefill.worker.worker.steps
    steps.prefiller = SimpleNamespace(layer_done=lambda *call: calls.append(call))
    for captures in (False, True):
        steps.captures = lambda captures=captures: captures
        assert prefill.worker.has_connector_metadata() == captures
        assert not decode.worker.has_connector_metadata()
        for name in steps.index:
            prefill.worker.save_kv_layer(name, None, None)
    assert calls == [(0, None), (1, None)], calls
    prefill.close()
    decode.close()


def sources(prefill: Side) -> list[str]:
    return list(prefill.scheduler.connector.scheduler.sources)


def aborts_give_blocks_back(model: Path) -> None:
    prefill, decode = pair(model, lease_s=1.0)
    decode_first(prefill, decode, "ab", sources_of(prefill))
    # Before the prefill begins, and in its middle.
    decode.abort("a")
    prefill_now(prefill, "ab")
    prefill.step()
    decode.abort("b")
    step_until_idle(prefill, decode)
    prefill.close()
    decode.close()


def an_abort_before_the_question_is_told(model: Path) -> None:
    prefill, decode = pair(model, lease_s=3600)
    prefill_now(prefill, "c")
    step_until([prefill], lambda: "c" in prefill.told)
    decode.add("c", PROMPTS["c"], NEW_TOKENS, **prefill.told["c"])
    decode.abort("c")
    step_until_idle(prefill, decode)
    prefill.close()
    decode.close()


def a_failed_prefill_is_told(model: Path, policy: str, end: str) -> None:
    prefill, decode = pair(model, policy=policy)
    decode_first(prefill, decode, "abc", sources_of(prefill))
    # In its middle, and before it begins.
    prefill_now(prefill, "bc")
    prefill.step()
    prefill.abort("b")
    prefill.abort("c")
    prefill_now(prefill, "a")
    step_until_idle(prefill, decode)
    assert decode.ends == {"a": "length", "b": end, "c": end}, decode.ends
    check(model, decode, "abc" if policy == "recompute" else "a")
    prefill.close()
    decode.close()


def a_failure_fails_the_request(model: Path) -> None:
    a_failed_prefill_is_told(model, "fail", "error")


def a_failure_is_computed_again(model: Path) -> None:
    a_failed_prefill_is_told(model, "recompute", "length")


def an_expired_lease_is_refused(model: Path) -> None:
    prefill, decode = pair(model, policy="recompute", lease_s=0.2)
    prefill_now(prefill, "b")
    step_until_idle(prefill)
    decode.add("b", PROMPTS["b"], NEW_TOKENS, **prefill.told["b"])
    step_until_idle(decode)
    check(model, decode, "b")
    assert decode.first_read["b"] == 0
    prefill.close()
    decode.close()


def a_lease_is_renewed_while_a_request_queues(model: Path) -> None:
    prefill, decode = pair(model, policy="fail", lease_s=0.5)
    prefill_now(prefill, "b")
    step_until([prefill], lambda: "b" in prefill.told)
    decode.scheduler.max_num_running_reqs = 0
    decode.scheduler.max_num_active_reqs = 0
    decode.add("b", PROMPTS["b"], NEW_TOKENS, **prefill.told["b"])
    end = time.monotonic() + 1.5
    step_until([prefill, decode], lambda: time.monotonic() > end)
    decode.scheduler.max_num_running_reqs = 8
    decode.scheduler.max_num_active_reqs = 8
    step_until_idle(prefill, decode)
    check(model, decode, "b")
    prefill.close()
    decode.close()


def another_model_is_refused(model: Path) -> None:
    prefill = Side(model, "kv_producer", window=40)
    decode = Side(model, "kv_consumer", policy="recompute")
    prefill.step()
    decode.add("b", PROMPTS["b"], NEW_TOKENS, do_remote_prefill=True, transfer_id="t", putget_sources=sources(prefill))
    decode.add("c", PROMPTS["c"], NEW_TOKENS, do_remote_prefill=True)
    decode.add("a", PROMPTS["a"], NEW_TOKENS, do_remote_prefill=True, transfer_id="u", putget_sources=["no source"])
    step_until_idle(decode)
    check(model, decode)
    prefill.close()
    decode.close()


def a_stream_goes_to_the_next_prefill_server(model: Path) -> None:
    """The router's clients see no error as long as a server is left, and the last one's where none is."""
    import asyncio

    import httpx
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    lost = b'data: {"error": {"message": "its prompt does not arrive", "code": 500}}\n\n'

    def prefills(kind: str) -> Any:
        async def complete(request: Any) -> Any:
            return JSONResponse({"kv_transfer_params": {"putget_sources": [kind]}}, 500 if kind == "failing" else 200)

        return complete

    async def decodes(request: Any) -> Any:
        (source,) = (await request.json())["kv_transfer_params"]["putget_sources"]
        return StreamingResponse(iter([lost] if source == "lost" else [b"data: {}\n\n", b"data: [DONE]\n\n"]))

    def reach(server: router.Server, complete: Any) -> None:
        app = Starlette(routes=[Route(router.PATHS[0], complete, methods=["POST"])])
        server.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")

    async def through(kinds: tuple[str, ...]) -> bytes:
        found = router.Router(kinds, ["decode"], "decode")
        for server, kind in zip(found.prefill, kinds, strict=True):
            reach(server, prefills(kind))
        reach(found.decode[0], decodes)
        answer, prefill = await found.complete(router.PATHS[0], {"prompt": [1], "stream": True})
        return b"".join([chunk async for chunk in router.content_of(answer, prefill)])

    # A failing server says so itself; of a lost one the decode server finds it out.
    for kinds in (("well",), ("failing", "well"), ("lost", "well"), ("lost", "failing", "well")):
        assert asyncio.run(through(kinds)).endswith(b"[DONE]\n\n"), kinds
    for kinds in (("failing",), ("lost",), ("failing", "lost")):
        try:
            asyncio.run(through(kinds))
        except router.Failed as error:
            status = error.status
        else:
            raise AssertionError(f"{kinds}: it was answered")
        assert status == 500


def mistakes_are_named(model: Path) -> None:
    for wrong, words in (
        ({"segments": 1}, "'segments' came; networks, address"),
        ({"lease_s": -1}, "lease_s -1 came"),
        ({"networks": "tcp,ether"}, "networks ['ether'] came; tcp, host"),
    ):
        found = "nothing"
        try:
            Side(model, "kv_producer", **wrong)
        except ValueError as error:
            found = str(error)
        assert words in found, found


def the_entry_point_tells_its_name(model: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    adapter.register()
    adapter.register()
    assert KVConnectorFactory.get_connector_class_by_name("PutgetConnector") is adapter.PutgetConnector


CASES: tuple[Callable[[Path], None], ...] = (
    either_order,
    with_the_runner_of_cpus,
    with_sliding_windows,
    numbers_of_ranks_may_differ,
    a_prefix_that_is_there_is_not_moved,
    a_preempted_prefill_goes_on,
    a_preempted_decode_is_computed_again,
    a_refused_step_leaves_when_it_is_computed,
    layers_of_a_captured_graph_are_reported,
    a_stream_goes_to_the_next_prefill_server,
    aborts_give_blocks_back,
    an_abort_before_the_question_is_told,
    a_failure_fails_the_request,
    a_failure_is_computed_again,
    an_expired_lease_is_refused,
    a_lease_is_renewed_while_a_request_queues,
    another_model_is_refused,
    mistakes_are_named,
    the_entry_point_tells_its_name,
)


def run(model: Path, names: list[str]) -> dict[str, str]:
    """The outcome of each case: "ok", or how it failed."""
    found = {}
    for case in CASES:
        if names and case.__name__ not in names:
            continue
        start = time.monotonic()
        try:
            case(model)
            found[case.__name__] = "ok"
        except Exception:
            found[case.__name__] = traceback.format_exc()
        print(f"{case.__name__}: {found[case.__name__]} {time.monotonic() - start:.1f} s", flush=True)
    return found


def main(folder: Path, names: list[str]) -> None:
    (folder / "cases.json").write_text(json.dumps(run(folder / "8", names)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
