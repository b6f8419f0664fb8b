"""`putget balance`: plans, simulations and what is wrong with the flags."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from putget.balancer import LoadHistory, Placement
from putget_bench import cli
from putget_bench.balance_simulation import Cost, Group, Mover, Moving, count, simulate
from tests.balancer.recorded import routing

AT_ONCE = Mover(expert_bytes=1, most_bytes=1 << 40, cells=1000)


@pytest.fixture
def routing_file(tmp_path: Path) -> Path:
    """Two tasks of 3 layers, 400 tokens, top 2 of 16 experts; each task prefers other experts."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, 17)
    tasks = {}
    for name in ("code", "law"):
        likely = rng.permutation(weights / weights.sum())
        tasks[name] = np.stack([rng.choice(16, (400, 2), p=likely) for _ in range(3)]).astype(np.uint8)
    path = tmp_path / "routing.npz"
    np.savez(path, **tasks)
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main(["balance", *map(str, words)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main(["balance", *map(str, words)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".json", ".pt", ".yaml"])
def test_a_plan_is_written_and_shown(
    capsys: pytest.CaptureFixture[str], routing_file: Path, tmp_path: Path, suffix: str
) -> None:
    if suffix == ".yaml":
        pytest.importorskip("yaml", reason="needs PyYAML")
    path = tmp_path / f"plan{suffix}"
    group = ("--routing_file", routing_file, "--ep_size", 4, "--slots", 20)
    printed = run(capsys, "plan", *group, "--task", "law", "--output_file", path)
    assert "contiguous" in printed
    assert f"wrote {path}" in printed.replace("\n", "")
    shown = run(capsys, "show", path, "--ep_size", 4, "--num_experts", 16, "--routing_file", routing_file)
    assert "3 layers, 16 experts, 20 slots, 5 on each of 4 ranks" in shown
    moved = run(capsys, "plan", *group, "--task", "code", "--previous", path, "--max_moves", 2)
    assert "experts move, at most" in moved
    assert int(moved.split("at most ")[1].split()[0]) <= 2


def test_a_simulation_draws_a_picture(capsys: pytest.CaptureFixture[str], routing_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "out.png"
    group = ("--routing_file", routing_file, "--ep_size", 4, "--slots", 20)
    printed = run(capsys, "simulate", *group, "--iterations", 12, "--tokens", 64, "--plot", picture)
    assert [line.split()[0] for line in printed.splitlines() if line.strip().startswith(("code", "law"))] == [
        "code",
        "law",
    ]
    assert "step us = rows of the hottest rank" in printed
    assert matplotlib.image.imread(picture).shape[:2] == (900, 1500)


def test_a_report_says_how_uneven_routing_is(
    capsys: pytest.CaptureFixture[str], routing_file: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "out.png"
    group = ("--routing_file", routing_file, "--ep_size", 4, "--slots", 20)
    printed = run(capsys, "report", *group, "--batches", "32,200,500", "--plot", picture)
    rows = [line.split() for line in printed.splitlines() if line.strip().startswith(("code", "law"))]
    whole, small = rows[:2], rows[2:]
    tasks = dict(np.load(routing_file))
    for row, (name, other) in zip(whole, (("code", "law"), ("law", "code")), strict=True):
        load = count(tasks[name], 16)
        plans = {task: Group(16, 20, 1, 1, 4).plan(count(tasks[task], 16)) for task in tasks}
        own, others = (float(plans[task].imbalance(load, 4).mean()) for task in (name, other))
        assert row[:2] == [name, "400"]
        by_task = dict(zip(("code", "law"), map(float, row[4:]), strict=True))
        assert by_task == {name: pytest.approx(own, abs=6e-4), other: pytest.approx(others, abs=6e-4)}
        assert by_task[name] < float(row[3])
    assert [row[:2] for row in small] == [["code", "32"], ["code", "200"], ["law", "32"], ["law", "200"]]
    assert all(float(row[3]) <= float(row[2]) for row in small)
    assert matplotlib.image.imread(picture).shape[:2] == (960, 1800)


def test_after_a_change_online_is_near_the_new_tasks_own_plan() -> None:
    """Recorded routing, planned on law, then intent: within 0.02 in 50 iterations."""
    tasks = {name: routing(name) for name in ("law", "intent")}
    history = LoadHistory(decay=0.9)
    group = Group(64, 72, 1, 1, 8)
    options = {"iterations": 50, "tokens": 1024, "interval": 10, "history": history, "mover": AT_ONCE}
    law, intent = simulate(tasks, group, **options)
    assert group.plan(count(tasks["law"], 64)).imbalance(count(tasks["intent"], 64), 8).mean() > 1.4
    assert intent.fits[0] > intent.own + 0.3
    assert intent.fits[-1] <= intent.own + 0.02
    assert law.fits[-1] <= law.own + 0.02
    assert np.mean(intent.ratios["online"][20:]) < np.mean(intent.ratios["static"]) - 0.2


def test_online_moves_are_counted_and_bounded(routing_file: Path) -> None:
    tasks = dict(np.load(routing_file))
    options = {"iterations": 20, "tokens": 100, "interval": 5, "mover": AT_ONCE}
    for max_moves in (0, 2):
        phases = simulate(tasks, Group(16, 20, 1, 1, 4), history=LoadHistory(), max_moves=max_moves, **options)
        moves = [phase.moves for phase in phases]
        # Posted behind iteration 4, on the way in 5 (or 0 of the next task), told and taken in the one behind that.
        assert all(one == 0 for each in moves for i, one in enumerate(each) if i % 5 != 1)
        assert max(map(max, moves)) <= 3 * max_moves
        assert (sum(map(sum, moves)) > 0) == (max_moves > 0)


def test_a_batch_is_taken_when_its_bytes_have_come_and_all_have_heard() -> None:
    """Rank 0 puts two experts of 10 bytes and gets two, 8 bytes an iteration: three, and one to hear of it."""
    moving = Moving(Mover(expert_bytes=10, most_bytes=8, cells=2), ep_size=3)
    before = Placement.of([[0, 1, 2, 3, 4, 5]], 6)
    after = Placement.of([[2, 4, 0, 3, 1, 5]], 6)
    assert not moving
    moving.begin(before, after, np.zeros(1))
    assert moving
    found = [moving.iterate() for _ in range(5)]
    assert [moved for moved, _ in found] == [8, 8, 4, 0, 0]
    assert [None if batch is None else len(batch.transfers) for _, batch in found] == [None, None, None, 4, None]
    assert not moving


def test_slow_moves_leave_the_old_placement_in_force_longer(routing_file: Path) -> None:
    tasks = dict(np.load(routing_file))
    group = Group(16, 20, 1, 1, 4)
    total, last = [], []
    for mover in (AT_ONCE, Mover(expert_bytes=10, most_bytes=1)):
        options = {"iterations": 30, "tokens": 100, "interval": 5, "history": LoadHistory(), "mover": mover}
        phases = simulate(tasks, group, **options)
        total.append(sum(phase.moved_bytes[i] for phase in phases for i in range(30)))
        last.append(np.mean(phases[1].ratios["online"]))
        assert all(0 <= moved <= mover.most_bytes for phase in phases for moved in phase.moved_bytes)
    assert total[0] > 0
    assert last[0] < last[1] - 0.01


def test_the_step_time_is_the_stated_formula() -> None:
    cost = Cost(row_bytes=8000, link_gbps=400, row_ns=30)
    assert cost.step_us(100) == pytest.approx(100 * (20 + 30) / 1000)
    assert cost.step_us(100, 4000) == pytest.approx(100 * (20 + 30) / 1000 + 4000 / 400 / 1000)


def test_wrong_flags_are_named(capsys: pytest.CaptureFixture[str], routing_file: Path, tmp_path: Path) -> None:
    group = ["--routing_file", routing_file, "--ep_size", 4]
    assert "--slots 18 is not a multiple of --ep_size 4" in refused(capsys, "plan", *group, "--slots", 18)
    assert "has no array 'x'; it has code, law" in refused(capsys, "plan", *group, "--task", "x")
    assert "expert 15; --num_experts is 8" in refused(capsys, "plan", *group, "--num_experts", 8)
    assert "--max_moves is given without --previous" in refused(capsys, "plan", *group, "--max_moves", 1)
    assert "ends in '.txt'" in refused(capsys, "plan", *group, "--output_file", tmp_path / "x.txt")
    assert "--tokens is 0" in refused(capsys, "simulate", *group, "--tokens", 0)
    assert "--batches is '64,x'" in refused(capsys, "report", *group, "--batches", "64,x")
    assert "--link_gbps is 0.0" in refused(capsys, "simulate", *group, "--link_gbps", 0)
    assert "--most_bytes is 0" in refused(capsys, "simulate", *group, "--most_bytes", 0)
    assert "decay is 2" in refused(capsys, "simulate", *group, "--decay", 2)
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"physical_to_logical_map": [[0, 1]]}))
    show = ("show", wrong, "--ep_size", 2, "--num_experts", 2)
    assert "array 'code' has 3 layers, the placement 1" in refused(capsys, *show, "--routing_file", routing_file)
    assert "--ep_size is 5" in refused(capsys, "show", wrong, "--ep_size", 5, "--num_experts", 2)
    other = refused(capsys, "show", tmp_path / "x.npz", "--ep_size", 2, "--num_experts", 2)
    assert "allowed are .json, .pt, .yaml and .yml" in other
    flat = tmp_path / "flat.npz"
    np.savez(flat, code=np.zeros((4, 2), np.int32))
    assert "integers [layers, tokens, top_k]" in refused(capsys, "plan", "--routing_file", flat, "--ep_size", 2)
