"""The simulation of an update: bytes are those of the planner, and times those of the NICs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
from putget_transfer.weights.__main__ import main
from putget_transfer.weights._simulate import Model, simulate

SMALL = replace(Model(), layers=2, experts=64)
NICS = {"gbit": 400.0, "host_gbyte_s": 50.0}


def test_it_has_the_published_size_and_floors() -> None:
    kimi = Model()
    assert kimi.parameters == pytest.approx(1.026e12, rel=0.005)
    assert kimi.parameters * 8 / 400e9 == pytest.approx(20.6, rel=0.01)
    assert kimi.parameters * 2 * 8 / 400e9 == pytest.approx(41, rel=0.01)
    # Each of 128 ranks gets the share that its replica's size leaves it.
    floors = [kimi.parameters / (128 // replicas) * 8 / 400e9 for replicas in (1, 2, 4, 8)]
    assert floors == pytest.approx([0.16, 0.32, 0.64, 1.29], rel=0.01)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_receiving_nics_bound_it_and_are_equally_busy(replicas: int) -> None:
    row, schedule = simulate(SMALL, trainer_ranks=16, replicas=replicas, replica_size=16 // replicas, **NICS)
    scales = schedule.num_bytes / replicas / SMALL.parameters - 1
    assert 4 / 128**2 <= scales < 1.01 * 4 / 128**2
    received = [schedule.received(rank) for rank in range(16)]
    assert max(received) < 1.04 * min(received)
    floor = SMALL.parameters * replicas / 16 * 8 / 400e9
    assert floor < row.receive_s < 1.03 * floor
    sent = [schedule.sent(rank) for rank in range(16)]
    assert max(sent) < 1.05 * min(sent)
    assert row.point_to_point_s == max(row.send_s, row.receive_s, row.host_s)
    assert row.one_rank_bf16_s == 2 * row.one_rank_fp8_s > row.point_to_point_s
    # Experts go direct; only what is divided by rows is brought together.
    assert row.gathered_bytes < schedule.num_bytes - 64 * 3 * 7168 * 2048 * replicas + 1


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--layers", "2", "--experts", "16", "--trainers", "4"]
    words += ["--targets", "4", "--replicas", "1", "2"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "point to point" in told
    assert "published for Kimi-K2: 1.3 s" in told
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["replicas"] for row in rows] == [1, 2]
    assert rows[1]["receive_s"] == pytest.approx(2 * rows[0]["receive_s"], rel=0.03)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--trainers", "0", "trainers: 0 came; at least 1"),
        ("--replicas", "3", "replicas: 3 came; replicas divide targets, 128"),
        ("--replicas", "0", "replicas: 0 came; replicas divide targets, 128"),
        ("--gbit", "0", "gbit: 0.0 came; more than 0"),
        ("--host_gbyte_s", "nan", "host_gbyte_s: nan came; more than 0"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    option: str, value: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", option, value])
    assert told in capsys.readouterr().err
