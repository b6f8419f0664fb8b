"""Results that cannot be written, and files and flags that say nonsense, are told before the work."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from putget_bench import cli
from putget_bench.outputs import check_writable


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """The exit code, and what stands on stderr; argparse's own complaints too."""
    try:
        code = cli.main([str(word) for word in words])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    return code, capsys.readouterr().err


@pytest.fixture
def routing_file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "routing.npz"
    np.savez(path, law=rng.integers(0, 8, (2, 64, 2)).astype(np.uint8))
    return path


def test_a_path_is_tried_and_left_alone(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("old")
    check_writable("--output_file", str(old))
    assert old.read_text() == "old"
    check_writable("--output_file", str(tmp_path / "fresh.json"))
    (tmp_path / "link.json").symlink_to(tmp_path / "behind.json")
    check_writable("--output_file", str(tmp_path / "link.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "old.json"]
    os.mkfifo(tmp_path / "pipe")
    wrong = {
        tmp_path: "is a directory",
        tmp_path / "no" / "x": "its directory does not exist",
        old / "x": "Not a directory",
        tmp_path / ("x" * 300): "File name too long",
        tmp_path / "pipe": "No such device or address",
        "a\0b": "embedded null byte",
    }
    for path, reason in wrong.items():
        with pytest.raises(ValueError, match=f"--plot .*: {reason}"):
            check_writable("--plot", str(path))


def test_ranks_that_try_one_path_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank, which has tried it too, removes the file between two steps of this one."""
    path, close = tmp_path / "out.json", os.close

    def close_late(file: int) -> None:
        close(file)
        path.unlink()

    monkeypatch.setattr(os, "close", close_late)
    check_writable("--output_file", str(path))
    assert not path.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("balance", "plan", "--output_file"),
        ("balance", "report", "--plot"),
        ("balance", "simulate", "--plot"),
        ("simulate", "domains", "--output_file"),
        ("bench", "--device", "cpu", "--output_file"),
        ("bench", "--device", "cpu", "--plot"),
        ("ablate", "--device", "cpu", "--output_file"),
        ("roofline", "--device", "cpu", "--output_file"),
        ("demo", "--device", "cpu", "--plot"),
        ("serve-bench", "--output_file"),
        ("serve-bench", "--plot"),
    ],
)
def test_every_command_refuses_a_path_before_its_work(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """No routing file is there, so that work would fail otherwise."""
    group = ("--routing_file", tmp_path / "none.npz", "--ep_size", 4) if words[0] == "balance" else ()
    suffix = "json" if words[-1] == "--output_file" else "png"
    for path, reason in ((tmp_path / "no" / f"x.{suffix}", "its directory does not exist"), (tmp_path, "")):
        code, text = said(capsys, *words, path, *group)
        assert code == 2
        assert words[-1] in text
        assert reason in text
        assert "none.npz" not in text


def test_messages_use_the_names_of_flags(
    capsys: pytest.CaptureFixture[str], routing_file: Path, tmp_path: Path
) -> None:
    plan = ("balance", "plan", "--routing_file", routing_file, "--ep_size", 4)
    (tmp_path / "p.json").write_text(json.dumps({"physical_to_logical_map": [list(range(8))]}))
    for words, message in {
        ("--slots", 4): "--slots 4 is less than --num_experts 8",
        ("--slots", 10): "--slots 10 is not a multiple of --ep_size 4",
        ("--slots", 1 << 20): "--slots is 1048576",
        ("--slots", 0): "--slots is 0",
        ("--num_groups", 3): "--num_experts 8 is not a multiple of --num_groups 3",
        ("--num_nodes", 3): "--ep_size 4 is not a multiple of --num_nodes 3",
        ("--num_nodes", 0): "--num_nodes is 0",
        ("--max_moves", 1): "--max_moves is given without --previous",
        ("--max_moves", -1): "--max_moves is -1",
        ("--min_gain", "nan"): "--min_gain is nan",
        ("--previous", tmp_path / "p.json"): "--previous has 1 layers, 8 experts and 8 slots",
        ("--first_layer", -1): "--first_layer is -1",
    }.items():
        code, text = said(capsys, *plan, *words)
        assert code == 2
        assert message in text
        assert "num_replicas" not in text
    simulate = ("balance", "simulate", "--routing_file", routing_file, "--ep_size", 4)
    for words, message in {("--window", 0): "--window is 0", ("--decay", 2): "--decay is 2"}.items():
        assert message in said(capsys, *simulate, *words)[1]


# --- random ones ------------------------------------------------------------------------------------------------------

SLOTS = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
NEARLY = st.lists(st.lists(st.integers(-2, 4) | st.none(), max_size=5) | st.none() | st.integers(), max_size=3)
ASSIGNMENTS = st.dictionaries(st.integers(-1, 3) | st.text(max_size=2) | st.none(), SLOTS | NEARLY, max_size=3)
RELAXED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@given(document=SLOTS | st.fixed_dictionaries({"physical_to_logical_map": SLOTS | NEARLY}))
@settings(max_examples=40, **RELAXED)
def test_any_json_is_a_placement_or_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path, document: Any) -> None:
    path = tmp_path / "any.json"
    path.write_text(json.dumps(document))
    code, text = said(capsys, "balance", "show", path, "--ep_size", 1, "--num_experts", 2)
    assert code == 0 or (code == 2 and "any.json" in text)


@given(
    slots=SLOTS, assignments=SLOTS | ASSIGNMENTS, updates=SLOTS, text=st.none() | st.text(max_size=20).map(lambda t: t)
)
@settings(max_examples=30, **RELAXED)
def test_any_yaml_is_a_placement_or_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, slots: Any, assignments: Any, updates: Any, text: str | None
) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    path = tmp_path / "any.yaml"
    document = {"num_slots": slots, "initial_global_assignments": assignments, "layer_updates_per_iter": updates}
    path.write_text(yaml.safe_dump(document) if text is None else text, encoding="utf-8", errors="replace")
    code, error = said(capsys, "balance", "show", path, "--ep_size", 1, "--num_experts", 2)
    assert code == 0 or (code == 2 and "any.yaml" in error)


VALUES = st.sampled_from(["0", "1", "-1", "2", "3", "7", "1.5", "nan", "inf", "-inf", "x", "", "1e400", str(10**30)])
FLAGS = {
    ("balance", "plan"): "ep_size slots num_experts num_groups num_nodes max_moves min_gain task previous output_file "
    "first_layer",
    (
        "balance",
        "simulate",
    ): "slots num_groups num_nodes iterations tokens interval window decay max_moves "
    "expert_bytes most_bytes cells row_bytes link_gbps row_ns tasks plot",
    ("balance", "report"): "slots num_experts num_groups num_nodes tasks batches plot",
    ("simulate", "domains"): "ep_size domain_size tokens num_experts top_k chunk_rows seed output_file",
}


@pytest.mark.parametrize("command", FLAGS)
@given(data=st.data())
@settings(max_examples=12, **RELAXED)
def test_any_values_of_flags_work_or_are_refused(
    command: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    routing_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: st.DataObject,
) -> None:
    monkeypatch.chdir(routing_file.parent)
    flags = data.draw(st.dictionaries(st.sampled_from(FLAGS[command].split()), VALUES, max_size=3))
    flags = {"iterations": "2", **flags} if command[1] == "simulate" else flags
    words: list[object] = [f"--{name}={value}" for name, value in flags.items()]
    if command[0] == "balance":
        words += ["--routing_file", routing_file]
        words += [] if "ep_size" in flags else ["--ep_size", 4]
    elif "ep_size" not in flags:
        words += ["--ep_size", 4]
    code, text = said(capsys, *command, *words)
    assert code == 0 or (code == 2 and text.strip())
    assert "Traceback" not in text
