"""The text that a scraper reads, and what the logger tells."""

from __future__ import annotations

import logging
import re
import subprocess
import threading

import pytest
import torch

import putget
from tests.harness import warm

SAMPLE = re.compile(r"^(?P<name>putget_\w+)\{(?P<labels>[^}]*)\} (?P<value>\d+)$")


def samples(text: str) -> dict[str, int]:
    """Values by name and labels; each line is a comment or a sample."""
    found = {}
    for line in text.splitlines():
        if line.startswith(("# HELP ", "# TYPE ")):
            continue
        parts = SAMPLE.match(line)
        assert parts, line
        found[f"{parts['name']}{{{parts['labels']}}}"] = int(parts["value"])
    return found


def play(comm: putget.Communicator, told: dict[int, list[str]]) -> None:
    row = putget.Payload((4,), torch.float32)
    sizes = {"num_experts": 2, "top_k": 2, "max_tokens_per_rank": 4, "timeout_s": 20.0}
    with putget.AllToAll(comm, **sizes, payloads=[row], output=row, device="cpu") as a2a:
        told[comm.rank] = [a2a.metrics_text()]
        for tokens in (1, 3):
            ids = torch.tensor([[0, 1]] * tokens if comm.rank == 0 else [[0, -1]] * tokens, dtype=torch.int32)
            received = a2a.dispatch(ids, torch.ones(tokens, 2), torch.ones(tokens, 4))
            a2a.combine_input.copy_(received.payloads[0])
            a2a.combine()
        told[comm.rank].append(a2a.metrics_text())


def test_rounds_rows_and_bytes() -> None:
    told: dict[int, list[str]] = {}
    comms = putget.Communicator.local(2)
    threads = [threading.Thread(target=play, args=(comm, told)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before, after = map(samples, told[0])
    assert before['putget_rounds_total{rank="0"}'] == 0
    assert after['putget_rounds_total{rank="0"}'] == 2
    assert [after[f'putget_sent_rows{{rank="0",peer="{peer}"}}'] for peer in range(2)] == [3, 3]
    assert [after[f'putget_received_rows{{rank="0",peer="{peer}"}}'] for peer in range(2)] == [3, 3]
    assert after['putget_sent_bytes{rank="0",peer="1"}'] == after['putget_returned_bytes{rank="0",peer="1"}'] == 48
    assert after['putget_timeouts_total{rank="0"}'] == 0
    other = samples(told[1][1])
    assert [other[f'putget_sent_rows{{rank="1",peer="{peer}"}}'] for peer in range(2)] == [3, 0]
    for name in {line.split("{")[0] for line in after}:
        assert told[0][1].count(f"# HELP {name} ") == told[0][1].count(f"# TYPE {name} ") == 1


def test_a_time_out_is_counted_once_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    first, second = putget.Communicator.local(2)
    row = putget.Payload((4,), torch.float32)
    made: dict[int, putget.AllToAll] = {}

    def make(comm: putget.Communicator) -> None:
        sizes = {"num_experts": 2, "top_k": 1, "max_tokens_per_rank": 4, "timeout_s": 0.2, "warmup_timeout_s": 20.0}
        made[comm.rank] = putget.AllToAll(comm, **sizes, payloads=[row], output=row, device="cpu")
        ids = torch.zeros(1, 1, dtype=torch.int32)
        made[comm.rank].dispatch(ids, torch.ones(1, 1), torch.ones(1, 4))
        made[comm.rank].combine()

    with caplog.at_level(logging.INFO, logger="putget"):
        threads = [threading.Thread(target=make, args=(comm,)) for comm in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        a2a = made[0]
        for _ in range(2):  # rank 1 stays away: the deadline passes once
            with pytest.raises(putget.PeerTimeout):
                a2a.dispatch(torch.zeros(0, 1, dtype=torch.int32), torch.ones(0, 1), torch.ones(0, 4))
        found = samples(a2a.metrics_text())
    assert found['putget_timeouts_total{rank="0"}'] == 1
    assert found['putget_faults_total{rank="0",kind="PeerTimeout"}'] == 1
    assert found['putget_waits_in_vain_total{rank="0",peer="1"}'] == 1
    told = [record.getMessage() for record in caplog.records]
    assert len([line for line in told if "rank 0 heard nothing from rank(s) 1" in line]) == 1
    assert any(line.startswith("AllToAll(rank 0 of 2 on cpu") for line in told)
    for each in made.values():
        each.close()


ROUND = """
import putget, torch
(comm,) = putget.Communicator.local(1)
row = putget.Payload((4,), torch.float32)
putget.AllToAll(comm, num_experts=1, top_k=1, max_tokens_per_rank=1, payloads=[row], output=row, device="cpu").close()
"""


@pytest.mark.parametrize(
    ("level", "words"), [("info", "AllToAll(rank 0 of 1 on cpu"), ("warning", ""), ("loud", "PUTGET_LOG is")]
)
def test_the_environment_says_what_is_written(level: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUTGET_LOG", level)
    done = subprocess.run([warm.python(), "-c", ROUND], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (level != "loud")
    assert words in done.stderr
    if level == "warning":
        assert "AllToAll" not in done.stderr
