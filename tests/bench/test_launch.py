"""Ranks that start, die, raise, and find something wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from putget_bench import launch
from putget_bench.parser import build_parser
from putget_bench.settings import Settings, resolve
from tests.bench import rank_work

ROOT = Path(__file__).parents[2]


def run(work: launch.Work, settings: Any, ep_size: int = 2) -> tuple[int, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    return launch.run(work, settings, ep_size, "cpu", events.append), events


def bench_settings(*flags: str) -> Settings:
    common = ["bench", "--device", "cpu", "--ep_size", "2", "--hidden_size", "128", "--iters", "4", *flags]
    return resolve(build_parser().parse_args(common), None)


def test_ranks_meet_and_only_rank_0_reports() -> None:
    code, events = run(rank_work.agree, {"a": 1}, ep_size=3)
    assert code == 7
    assert events == [{"kind": "everyone", "ranks": [(rank, 3, "cpu") for rank in range(3)], "settings": {"a": 1}}]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV"])
def test_a_rank_that_dies_is_named_and_ends_the_run(how: str) -> None:
    started = time.monotonic()
    with pytest.raises(launch.RankFailedError, match=rf"rank 1 died \({how}\); the other ranks were ended"):
        run(rank_work.die, {"rank": 1, "how": how}, ep_size=3)
    assert time.monotonic() - started < 30  # nobody waited for a deadline


def test_a_rank_that_raises_is_named_with_its_error() -> None:
    with pytest.raises(launch.RankFailedError, match=r"rank 0 failed: RuntimeError: out of luck"):
        run(rank_work.die, {"rank": 0, "how": "raise"})


@pytest.mark.parametrize("work", [rank_work.corrupt, rank_work.corrupt_demo])
def test_a_wrong_result_ends_the_run_before_it_is_timed(work: launch.Work) -> None:
    code, events = run(work, bench_settings("-b", "1", "-e", "4"))
    assert code == 1
    assert [event["size"]["batch_size"] for event in events if event["kind"] == "size"] == [1]
    (mismatch,) = (event["text"] for event in events if event["kind"] == "mismatch")
    assert "2 tokens a rank: rank 1:" in mismatch
    assert "combine differs from the reference in 1 of 2 tokens, first [1]" in mismatch


def test_ctrl_c_ends_all_ranks() -> None:
    command = [
        sys.executable,
        "-m",
        "putget",
        "bench",
        "--device",
        "cpu",
        "--ep_size",
        "2",
        "-e",
        "1",
        "--iters",
        "100000000",
    ]
    # A shell starts background jobs with SIGINT ignored, and that is inherited: the tests may be such a job.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as parent:
        assert parent.stdout is not None
        for line in parent.stdout:
            if line.startswith("1 tokens a rank: timing"):
                break
        os.killpg(parent.pid, signal.SIGINT)
        rest = parent.stdout.read()  # ends when the last process that writes there has ended
    assert parent.returncode == 130
    assert rest.strip() == "putget bench: interrupted"
