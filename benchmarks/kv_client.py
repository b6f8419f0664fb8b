"""Splits a handover between servers of vLLM by stage, as the client sees it, on CPUs.

    make engines transfer-package
    PYTHONPATH=.:python:transfer/python build/engines/vllm/bin/python benchmarks/kv_client.py --output_file client.json

A prefill and a decode server of vLLM 0.33 with `PutgetConnector` run behind the guide's router, in each of its orders.
A client streams requests one by one. A handover is the time from the prefill server's first token to the second token
at the client. A stage that is over before the first token counts as nothing. Tokens are compared with one server's
first. The model is small and random, so steps are short; the bytes that move follow from the length of prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.engines import kv_vllm_stages as stages

from putget_transfer.adapters import router

SCHEMA = "putget.kv_client/1"
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""Variables of the servers; those that are set already stay."""
WARM_UP = 3
LAYERS, HEADS, HEAD_DIM = 2, 4, 128
TOKEN_BYTES = LAYERS * HEADS * HEAD_DIM * 2 * 4


def body(number: int, options: argparse.Namespace, order: str) -> dict[str, Any]:
    """Return a request with a prompt of its own."""
    tokens = [random.Random(number).randrange(1, 128) for _ in range(options.prompt_tokens)]
    tokens[:2] = [1 + number % 127, 1 + number // 127 % 127]
    return {
        "model": str(options.folder / "8"),
        "prompt": tokens,
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
        "request_id": f"{order}-{number}.",
    }


def flags(options: argparse.Namespace) -> tuple[object, ...]:
    """Return the servers' arguments. They stand behind those of the tests, so they count."""
    longest = options.prompt_tokens + 32
    return (
        "--max-model-len",
        longest,
        "--hf-overrides",
        json.dumps({"max_position_embeddings": longest}),
        "--max-num-batched-tokens",
        options.chunk_tokens,
        "--kv-cache-memory-bytes",
        8 * TOKEN_BYTES * longest + (1 << 24),
    )


def measure(servers: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Run the servers and send all requests; return what came to the client."""
    servers.start("prefill", "kv_producer", *flags(options))
    servers.start("decode", "kv_consumer", *flags(options))
    servers.wait()
    for order in options.order:
        servers.route(f"{order} first", ["prefill"], "decode", order)
    servers.wait()
    found: dict[str, Any] = {}
    numbers = range(WARM_UP + options.requests)
    alone = [stages.ask(servers.urls["decode"], body(number, options, "alone")) for number in numbers]
    for order in options.order:
        found[order] = [stages.ask(servers.urls[f"{order} first"], body(number, options, order)) for number in numbers]
        if [one.tokens for one in found[order]] != [one.tokens for one in alone]:
            raise SystemExit(f"{order} first: other tokens came than from one server")
    return found


def report(found: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return each order's stages: medians, and the request at 90%."""
    notes, rows = stages.notes_in(options.folder), []
    for order, asked in found.items():
        # On a busy machine pages can leave, and the answer be over, before the prefill server's own token is noted.
        timed = [one for one in asked[WARM_UP:] if stages.has_first_token(notes, one)]
        if not timed:
            raise SystemExit(f"{order} first: no request has a first token at the prefill server")
        times = [stages.stages_of(*stages.ends_of(notes, one)) for one in timed]
        for one in times:
            one["connector, beside the transfer"] = sum(one[stage] for stage in stages.OWN)
            one["handover"] = sum(one[stage] for stage in stages.STAGES)
        of_order = [note for note in notes if note["request"] is not None and f"{order}-" in note["request"]]
        rows.append(
            {
                "order": order,
                "requests_timed": len(timed),
                "p50_ms": {stage: statistics.median(one[stage] for one in times) for stage in times[0]},
                "p90_ms": {stage: sorted(one[stage] for one in times)[9 * len(times) // 10] for stage in times[0]},
                "prefiller_mean_ms": stages.prefiller_stages(of_order, WARM_UP),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    for row in rows:
        print(f"\n{row['order']} first, {row['requests_timed']} requests".ljust(33) + "    p50 ms    p90 ms")
        for stage, median in row["p50_ms"].items():
            print(f"{stage:32}{median:10.3f}{row['p90_ms'][stage]:10.3f}   {stages.STAGES.get(stage, '')}")
        inner = ", ".join(f"{stage} {value:.3f}" for stage, value in row["prefiller_mean_ms"].items())
        print(f"the prefill rank's own stages, mean ms: {inner}")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=30, help="requests of each order, behind a few that warm up")
    parser.add_argument("--prompt_tokens", type=int, default=1024)
    parser.add_argument("--chunk_tokens", type=int, default=512, help="tokens of a prefill server's step")
    parser.add_argument("--order", nargs="+", choices=router.ORDERS, default=list(router.ORDERS))
    parser.add_argument("--output_file", type=Path)
    options = parser.parse_args()
    if options.requests < 1 or options.prompt_tokens < 2 or options.chunk_tokens < 1:
        parser.error("requests and chunk_tokens of at least 1, and prompt_tokens of at least 2 are needed")
    os.environ.update({**ENVIRONMENT, **os.environ})

    from tests.engines.generate_vllm import preload
    from tests.engines.kv_vllm_serve import Servers
    from tests.engines.models import save_models

    fork = preload()
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        save_models(options.folder, ["8"], HEAD_DIM)
        import vllm.entrypoints.cli.main  # noqa: F401 - servers are forked with it

        stages.install(options.folder)
        with Servers(options.folder, fork).running() as servers:
            found = measure(servers, options)
        rows = report(found, options)
    show(rows)
    settings = {name: getattr(options, name) for name in ("requests", "prompt_tokens", "chunk_tokens")}
    where = {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()}
    moved = {"prompt_bytes": TOKEN_BYTES * options.prompt_tokens}
    if options.output_file:
        result = {"schema": SCHEMA, **where, **settings, **moved, "results": rows}
        options.output_file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
