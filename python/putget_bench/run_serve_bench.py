"""`putget serve-bench`: what clients of a server with OpenAI's interface see, by load."""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from putget import BackendUnavailable
from putget_bench import report, serve_load, serve_metrics, serve_report
from putget_bench.flags import check_numbers
from putget_bench.outputs import PICTURES, check_writable
from putget_bench.progress import RunProgress, make_console

_PATIENCE_S = 10.0


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Sends each load, one after the other.

    Returns:
        0, or 1 if a request failed.

    Raises:
        ValueError: A flag is wrong; no request was sent.
        BackendUnavailable: aiperf is not installed, or no server answers.
        PutgetError: aiperf failed.
    """
    check_writable("--output_file", args.output_file)
    check_writable("--plot", args.plot, PICTURES, needs="matplotlib")
    url, loads = _url(args.url), _loads(args)
    aiperf = serve_load.find_aiperf()
    model = _model(url, args.model)
    tokenizer = model if args.tokenizer is None else args.tokenizer
    console = make_console()
    document = serve_report.new_document(_config(args, model), command, args.commit)
    with RunProgress(console, "putget serve-bench", len(loads)) as progress:
        for rate, concurrency in loads:
            asked = {"rate": rate, "concurrency": concurrency}
            progress.stage(f"{args.requests} requests, {serve_report.load_name(asked)}")
            before = serve_metrics.read(url)
            records, version = serve_load.run(aiperf, _load(args, url, model, tokenizer, rate, concurrency))
            found = serve_report.summary(records)
            server = serve_metrics.between(before, serve_metrics.read(url), found["output_tokens"])
            document["load_generator"]["version"] = version
            document["results"].append({"load": asked, **found, "server": server})
            progress.advance()
    serve_report.show(document, console)
    if args.output_file is not None:
        report.write(document, Path(args.output_file))
        console.print(f"report: {args.output_file}", soft_wrap=True)
    if args.plot is not None:
        from putget_bench import serve_plot

        serve_plot.draw(document, Path(args.plot))
        console.print(f"plot: {args.plot}", soft_wrap=True)
    return int(any(result["errors"] for result in document["results"]))


def _loads(args: argparse.Namespace) -> list[tuple[float | None, int | None]]:
    """Rates, or requests at once."""
    check_numbers(args, "requests", "prompt_tokens", "output_tokens")
    check_numbers(args, "prompt_stddev", "output_stddev", "seed", low=0)
    check_numbers(args, "timeout_s", low=0, above=True)
    if args.concurrency is not None:
        return [(None, int(value)) for value in _numbers("--concurrency", args.concurrency, whole=True)]
    return [(value, None) for value in _numbers("--rates", args.rates, whole=False)]


def _numbers(flag: str, text: str, whole: bool) -> list[float]:
    kind = "whole numbers" if whole else "numbers"
    try:
        found = [float(int(word)) if whole else float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < value < 1e6 for value in found):
        raise ValueError(f"{flag} is {text!r}, expected {kind} above 0 with commas between them")
    return found


def _url(text: str) -> str:
    """The server's address without a path.

    Raises:
        ValueError: It is none.
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(f"--url is {text!r}, expected http://HOST:PORT")
    return text.rstrip("/")


def _model(url: str, asked: str | None) -> str:
    """The name of the model that is asked for, or of the first one that the server has.

    Raises:
        ValueError: The server has no model of that name.
        BackendUnavailable: No server answers.
    """
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=_PATIENCE_S) as answer:
            names = [str(one["id"]) for one in json.load(answer)["data"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "reason", None) or error
        raise BackendUnavailable(f"no server with OpenAI's interface answers at {url}/v1/models: {reason}") from error
    if not names:
        raise BackendUnavailable(f"the server at {url} has no model")
    if asked is not None and asked not in names:
        raise ValueError(f"--model is {asked!r}, the server has {', '.join(map(repr, names))}")
    return names[0] if asked is None else asked


def _config(args: argparse.Namespace, model: str) -> dict[str, Any]:
    names = ("requests", "prompt_tokens", "prompt_stddev", "output_tokens", "output_stddev", "timeout_s", "seed")
    return {"model": Path(model).name, **{name: getattr(args, name) for name in names}, "streams": not args.no_stream}


def _load(
    args: argparse.Namespace, url: str, model: str, tokenizer: str, rate: float | None, concurrency: int | None
) -> serve_load.Load:
    return serve_load.Load(
        url=url,
        model=model,
        tokenizer=tokenizer,
        rate=rate,
        concurrency=concurrency,
        requests=args.requests,
        prompt_tokens=args.prompt_tokens,
        prompt_stddev=args.prompt_stddev,
        output_tokens=args.output_tokens,
        output_stddev=args.output_stddev,
        streams=not args.no_stream,
        timeout_s=args.timeout_s,
        seed=args.seed,
    )
