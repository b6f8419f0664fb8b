"""`putget serve-bench`: what is refused, and how aiperf's records become a report. tests/engines/test_serve.py loads a
real server with aiperf itself."""

from __future__ import annotations

import dataclasses
import http.server
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import matplotlib.image
import pytest

from putget_bench import cli, serve_load, serve_metrics, serve_report

METRICS = """# TYPE putget_serve_passes_total counter
putget_serve_passes_total{{rank="0",tokens="some"}} {passes}
putget_serve_passes_total{{rank="0",tokens="none"}} 3
putget_serve_pass_wait_seconds_bucket{{rank="0",le="0.001"}} {short}
putget_serve_pass_wait_seconds_bucket{{rank="0",le="0.002"}} {passes}
putget_serve_pass_wait_seconds_bucket{{rank="0",le="+Inf"}} {passes}
putget_serve_pass_wait_seconds_sum{{rank="0"}} {seconds}
putget_serve_pass_wait_seconds_count{{rank="0"}} {passes}
process_cpu_seconds_total{{rank="0"}} {cpu}
"""
# In place of aiperf: writes records of the requests that it is asked for, or fewer, and leaves a child behind.
PROGRAM = """#!{python}
import json, subprocess, sys
from pathlib import Path
words = dict(zip(sys.argv, sys.argv[1:]))
out, count = Path(words["--artifact-dir"]), int(words["--request-count"])
out.mkdir()
Path({folder!r}, "asked").open("a").write(" ".join(sys.argv[2:]) + "\\n")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path({folder!r}, "child").write_text(str(child.pid))
records = [json.loads(line) for line in Path({folder!r}, "records").read_text().splitlines()]
lines = [json.dumps(records[number % len(records)]) for number in range(count - {missing})]
(out / "profile_export.jsonl").write_text("".join(line + "\\n" for line in lines))
(out / "profile_export_aiperf.json").write_text(json.dumps({{"aiperf_version": "0.13.0"}}))
print("a word of aiperf")
"""


def record(start_ms: int, first_ms: float, gaps_ms: list[float]) -> dict[str, object]:
    """A record of aiperf, with the fields that are read."""
    end_ms = start_ms + first_ms + sum(gaps_ms)
    metrics = {
        "input_sequence_length": 20,
        "output_sequence_length": 1 + len(gaps_ms),
        "time_to_first_token": first_ms,
        "inter_chunk_latency": gaps_ms,
        "inter_token_latency": sum(gaps_ms) / len(gaps_ms),
        "request_latency": first_ms + sum(gaps_ms),
    }
    return {
        "metadata": {"request_start_ns": start_ms * 1_000_000, "request_end_ns": int(end_ms * 1e6)},
        "metrics": {name: {"value": value} for name, value in metrics.items()},
    }


RECORDS = [
    record(0, 100.0, [10.0, 30.0]),
    record(500, 200.0, [40.0, 60.0]),
    {
        "metadata": {"request_start_ns": 600_000_000, "request_end_ns": 1_000_000_000},
        "metrics": {},
        "error": {"code": 400, "type": "Bad Request", "message": "too long"},
    },
]


class Handler(http.server.BaseHTTPRequestHandler):
    """A server with one model, whose rank runs 10 passes between two readings of its metrics."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        body = json.dumps({"data": [{"id": "folder/tiny"}]})
        if self.path == "/metrics":
            turn = self.server.asked.count("/metrics") > 32  # type: ignore[attr-defined]
            body = METRICS.format(passes=20 if turn else 10, short=15 if turn else 10, seconds=0.1 * turn, cpu=2 * turn)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def put_aiperf(folder: Path, monkeypatch: pytest.MonkeyPatch, missing: int = 0) -> None:
    """Puts the stand-in where aiperf is looked for."""
    program = folder / "aiperf"
    program.write_text(PROGRAM.format(python=sys.executable, folder=str(folder), missing=missing))
    program.chmod(0o755)
    (folder / "records").write_text("".join(json.dumps(one) + "\n" for one in RECORDS))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder))


def url_of(server: http.server.ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or only waits to be reaped."""
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    except OSError:  # gone, perhaps while its file was read
        return True


def require_ended(pid: int) -> None:
    """Waits until a process is gone; its new parent reaps it."""
    deadline = time.monotonic() + 60
    while not has_ended(pid):
        assert time.monotonic() < deadline, "aiperf's child is still there"
        time.sleep(0.02)


def test_a_report_has_what_clients_and_ranks_saw(
    server: http.server.ThreadingHTTPServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put_aiperf(tmp_path, monkeypatch)
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    flags = f"serve-bench --url {url_of(server)} --concurrency 2,4 --requests 3 --seed 7 --commit abc"
    assert cli.main([*flags.split(), "--output_file", str(out), "--plot", str(plot)]) == 1  # a request has failed
    document = json.loads(out.read_text())
    jsonschema.Draft202012Validator(serve_report.schema()).validate(document)
    assert [result["load"]["concurrency"] for result in document["results"]] == [2, 4]
    assert (document["config"]["model"], document["load_generator"]["version"]) == ("tiny", "0.13.0")
    first = document["results"][0]
    assert first["errors"] == {"HTTP 400 Bad Request": 1}
    assert (first["requests"], first["output_tokens"], first["seconds"], first["tokens_per_s"]) == (3, 6, 1.0, 6.0)
    assert first["first_token_ms"] == {"p50": 150.0, "p99": 199.0, "max": 200.0, "count": 2}
    assert first["between_tokens_ms"] == {"p50": 35.0, "p99": 49.7, "max": 50.0, "count": 2}
    assert (first["between_chunks_ms"]["max"], first["between_chunks_ms"]["count"]) == (60.0, 4)
    assert first["server"]["ranks"] == [
        {"rank": 0, "passes": 10, "idle_passes": 0, "cpu_s": 2.0, "wait_ms": {"mean": 10.0, "p50": 1.0, "p99": 1.98}}
    ]
    assert first["server"]["cpu_ms_per_token"] == pytest.approx(2000 / 6, rel=1e-5)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2
    assert "--concurrency 2" in asked[0]
    assert "--streaming" in asked[0]
    assert "--random-seed 7" in asked[0]
    assert "2 at once: 1 x HTTP 400 Bad Request" in capsys.readouterr().out
    assert matplotlib.image.imread(plot).shape[:2] == (1125, 1650)
    require_ended(int((tmp_path / "child").read_text()))


def test_records_that_are_missing_are_an_error_with_aiperfs_words(
    server: http.server.ThreadingHTTPServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put_aiperf(tmp_path, monkeypatch, missing=2)
    out = tmp_path / "out.json"
    assert cli.main(["serve-bench", "--url", url_of(server), "--rates", "5", "--output_file", str(out)]) == 1
    said = capsys.readouterr().err
    assert "aiperf ended with code 0 and told of 98 of 100 requests" in said
    assert "a word of aiperf" in said
    assert not out.exists()
    assert "--request-rate 5 --request-rate-mode poisson" in (tmp_path / "asked").read_text()
    require_ended(int((tmp_path / "child").read_text()))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rates 1,x", "--rates is '1,x', expected numbers above 0 with commas between them"),
        ("--rates 0", "--rates is '0'"),
        ("--rates inf", "--rates is 'inf'"),
        ("--concurrency 1.5", "--concurrency is '1.5', expected whole numbers above 0"),
        ("--concurrency 0", "--concurrency is '0'"),
        ("--requests 0", "--requests is 0"),
        ("--output_stddev -1", "--output_stddev is -1"),
        ("--timeout_s nan", "--timeout_s is nan"),
        ("--plot out.txt", "--plot must end in .png or .svg or .pdf"),
        ("--output_file no/out.json", "--output_file no/out.json: its directory does not exist"),
        ("--model other", "--model is 'other', the server has 'folder/tiny'"),
    ],
)
def test_wrong_flags_are_refused_before_a_request(
    words: str,
    said: str,
    server: http.server.ThreadingHTTPServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put_aiperf(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["serve-bench", "--url", url_of(server), *words.split()]) == 2
    assert said in capsys.readouterr().err
    assert server.asked == (["/v1/models"] if "--model" in words else [])  # type: ignore[attr-defined]
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://a/v1"])
def test_an_address_that_is_none_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve-bench", "--url", url]) == 2
    assert f"--url is {url!r}, expected http://HOST:PORT" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_aiperf(tmp_path, monkeypatch)
    with socket.socket() as held:  # nobody else gets the port, and nobody listens there
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        assert cli.main(["serve-bench", "--url", url]) == 1
    assert f"no server with OpenAI's interface answers at {url}/v1/models" in capsys.readouterr().err
    assert not (tmp_path / "asked").exists()


def test_a_missing_aiperf_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_aiperf(tmp_path, monkeypatch)
    (tmp_path / "aiperf").unlink()
    assert cli.main(["serve-bench"]) == 1
    assert "serve-bench needs the program aiperf" in capsys.readouterr().err


def test_the_deadline_of_a_load_grows_with_it() -> None:
    by_rate = serve_load.Load("", "", "", 2.0, None, 100, 1, 0, 1, 0, True, 60.0, 0)
    assert by_rate.limit_s == 180 + 60 + 100
    assert dataclasses.replace(by_rate, rate=None, concurrency=30).limit_s == 180 + 4 * 60


def test_quantiles_of_histograms_are_linear_within_a_bucket() -> None:
    buckets = [(1.0, 2.0), (2.0, 4.0), (4.0, 10.0), (float("inf"), 10.0)]
    assert [serve_metrics.quantile(buckets, share) for share in (0.1, 0.2, 0.4, 0.7, 1.0)] == [0.5, 1.0, 2.0, 3.0, 4.0]
    assert serve_metrics.quantile([(1.0, 0.0), (float("inf"), 5.0)], 0.5) == 1.0


def test_a_server_without_ranks_tells_its_processor_time() -> None:
    """vLLM's and SGLang's metrics name no ranks of putget's."""
    texts = [f'vllm:x{{le="0.5",a="b"}} 3\nprocess_cpu_seconds_total {seconds}\n' for seconds in (1.0, 4.0)]
    readings = [{rank: samples} for samples, rank in map(serve_metrics.samples_of, texts)]
    assert serve_metrics.between(*readings, 100) == {"cpu_s": 3.0, "cpu_ms_per_token": 30.0, "ranks": []}
    assert serve_metrics.between({}, {}, 100) is None
