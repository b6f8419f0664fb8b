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
from typing import Any

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
    a_prefix_that_is_there_is_not_moved,
    a_preempted_prefill_goes_on,
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
