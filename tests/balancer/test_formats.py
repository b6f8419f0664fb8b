"""Placements and counts in the forms of the engines, both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from putget.balancer import Placement, formats, rebalance


@pytest.fixture
def placement() -> Placement:
    load = np.random.default_rng(0).integers(1, 100, (3, 12))
    return rebalance(load, 16, 4, 2, 8)


def test_deepseek_tables(placement: Placement) -> None:
    p2l, l2p, count = formats.to_deepseek(placement)
    assert (p2l.shape, l2p.dtype, count.shape) == ((3, 16), torch.int64, (3, 12))
    assert l2p.shape == (3, 12, 16 - 12 + 1)
    for layer, expert in np.ndindex(3, 12):
        slots = l2p[layer, expert][: int(count[layer, expert])]
        assert (p2l[layer, slots] == expert).all()
        assert (l2p[layer, expert][int(count[layer, expert]) :] == -1).all()
    assert formats.from_tables(p2l, l2p, count) == placement


def test_vllm_tensors(placement: Placement) -> None:
    p2l, l2p, count = formats.to_vllm(placement, max_slots=1024)
    assert l2p.shape == (3, 12, 1024)
    assert formats.from_tables(p2l, l2p, count) == placement
    with pytest.raises(ValueError, match=r"max_slots is 1, but an expert has [2-9] replicas"):
        formats.to_vllm(placement, max_slots=1)


def test_tables_that_contradict_each_other_are_refused(placement: Placement) -> None:
    p2l, l2p, count = formats.to_deepseek(placement)
    wrong_slots, wrong_count = l2p.clone(), count.clone()
    wrong_slots[1, 3, 0] = (wrong_slots[1, 3, 0] + 1) % 16
    wrong_count[2, 0] = 9
    with pytest.raises(ValueError, match="logical_to_physical: layer 1, expert 3"):
        formats.from_tables(p2l, wrong_slots, count)
    with pytest.raises(ValueError, match="replica_count: layer 2, expert 0 has 9"):
        formats.from_tables(p2l, l2p, wrong_count)
    with pytest.raises(ValueError, match=r"replica_count is \[3, 11\]"):
        formats.from_tables(p2l, l2p, count[:, 1:])


def test_tables_in_another_order_are_the_same_placement(placement: Placement) -> None:
    """DeepSeek numbers replicas by their age, not by their slot."""
    p2l, l2p, count = formats.to_deepseek(placement)
    for layer, expert in np.ndindex(3, 12):
        n = int(count[layer, expert])
        l2p[layer, expert, :n] = l2p[layer, expert, :n].flip(0)
    assert formats.from_tables(p2l, l2p, count) == placement


@pytest.mark.parametrize("suffix", [".json", ".pt"])
def test_sglang_files(placement: Placement, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"init{suffix}"
    formats.write_sglang(path, placement)
    assert formats.read_sglang(path, 12) == placement
    raw: Any = json.loads(path.read_text()) if suffix == ".json" else torch.load(path, weights_only=True)
    assert list(raw) == ["physical_to_logical_map"]
    assert torch.as_tensor(raw["physical_to_logical_map"]).shape == (3, 16)


@pytest.mark.parametrize("suffix", [".json", ".pt"])
def test_sglang_counts(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"count{suffix}"
    count = np.random.default_rng(1).integers(0, 1000, (3, 12))
    formats.write_sglang_count(path, count)
    assert np.array_equal(formats.read_sglang_count(path), count)
    with pytest.raises(ValueError, match="has no 'physical_to_logical_map'; it has logical_count"):
        formats.read_sglang(path, 12)


def test_sglang_counts_of_several_steps_are_summed(tmp_path: Path) -> None:
    count = torch.arange(24).reshape(2, 3, 4)
    torch.save({"logical_count": count, "rank": 0}, tmp_path / "dump.pt")
    assert np.array_equal(formats.read_sglang_count(tmp_path / "dump.pt"), count.sum(dim=0))


def test_tensorrt_llm_yaml(placement: Placement, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    path = tmp_path / "balancer.yaml"
    formats.write_tensorrt_llm(path, placement, first_layer=3, layer_updates_per_iter=2)
    raw = yaml.safe_load(path.read_text())
    assert raw["num_slots"] == 16
    assert raw["layer_updates_per_iter"] == 2
    assert sorted(raw["initial_global_assignments"]) == [3, 4, 5]
    assert raw["initial_global_assignments"][4] == placement.physical_to_logical[1].tolist()
    read = formats.read_tensorrt_llm(path, 12)
    assert read.placement == placement
    assert (read.layers, read.layer_updates_per_iter) == ((3, 4, 5), 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "holds a list"),
        ("num_slots: 4", "has no 'initial_global_assignments'"),
        ("initial_global_assignments: {0: [0, 1]}", "has no 'num_slots'"),
        ("num_slots: 3\ninitial_global_assignments: {0: [0, 1]}", "layer 0 has 2 slots, num_slots is 3"),
        ("num_slots: 2\ninitial_global_assignments: {0: [0, 0]}", "layer 0 has no slot for expert 1"),
        ("num_slots: 2\ninitial_global_assignments: {0: [0, x]}", r"layer 0, slot 1 is .x.; entries must be integers"),
        ("num_slots: 2\ninitial_global_assignments: {}", "assigns no layer"),
        ("num_slots: [", "is not YAML"),
        ("num_slots: 2\ninitial_global_assignments: {0: null}", "layer 0 is null"),
        ("num_slots: 2\ninitial_global_assignments: {3: [0, 1], 4: 7}", "layer 4 is 7"),
        ("num_slots: 2\ninitial_global_assignments: {0: [0, 1], x: [0, 1]}", "a layer is 'x', expected an integer"),
        ("num_slots: 2\ninitial_global_assignments: {-1: [0, 1]}", "a layer is -1"),
        ("num_slots: [2]\ninitial_global_assignments: {0: [0, 1]}", "num_slots is a list"),
        ("num_slots: 2\nlayer_updates_per_iter: x\ninitial_global_assignments: {0: [0, 1]}", "layer_updates_per_iter"),
        ("a: 2024-99-99", "is not YAML"),
        ("[" * 900, "nested too deeply"),
    ],
)
def test_a_bad_yaml_is_named(tmp_path: Path, text: str, message: str) -> None:
    pytest.importorskip("yaml", reason="needs PyYAML")
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"bad.yaml.*{message}"):
        formats.read_tensorrt_llm(path, 2)


def test_bad_sglang_files_are_named(tmp_path: Path) -> None:
    for name, content in (("a.json", "{"), ("b.json", "[1]"), ("c.pt", "x"), ("d.npz", "x"), ("e.json", '{"x": 1}')):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=name):
            formats.read_sglang(tmp_path / name, 4)
    with pytest.raises(ValueError, match=r"missing\.json"):
        formats.read_sglang(tmp_path / "missing.json", 4)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[[0, 1], null]", "layer 1 is null, expected a list of integers"),
        ("[[0, 1], [1, null]]", "layer 1, slot 1 is null"),
        ("[[0, 1], [1]]", "layer 1 has 1 entries, the first layer has 2"),
        ("[[0, 1], [1, true]]", "layer 1, slot 1 is True"),
        ("[[0, 1], [1, [0]]]", "layer 1, slot 1 is a list"),
        ("[[0, 1], [1, 0.5]]", r"layer 1, slot 1 is 0\.5"),
        ("[[0, 1], [1, 2]]", "layer 1, slot 1 has 2"),
        ("[[0, 1], 7]", "layer 1 is 7, expected a list"),
        ("[[0, 1], [1, 1" + "0" * 400 + "]]", "layer 1, slot 1 is an int of 1329 bits"),
        ("{}", "is a dict, expected a list for each layer"),
        ("null", "is null"),
        ("[]", "is a list, expected a list for each layer"),
        ("[[]]", r"is .* \[1, 0\]"),
        ("1" * 5000, "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_the_place_of_a_fault_in_json_is_named(tmp_path: Path, table: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"physical_to_logical_map": ' + table + "}")
    with pytest.raises(ValueError, match=f"bad.json.*{message}"):
        formats.read_sglang(str(path), 2)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02}q\x00.", b"x" * 1000])
def test_a_damaged_pt_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.pt"
    path.write_bytes(content)
    for read in (formats.read_sglang_count, lambda path: formats.read_sglang(path, 4)):
        with pytest.raises(ValueError, match=r"bad\.pt"):
            read(path)


def test_counts_that_are_none_are_named(tmp_path: Path) -> None:
    for count, message in (
        ([[1, -2]], "load of layer 0, expert 1 is -2"),
        ([[1.0, float("nan")]], "expert 1 is nan"),
        ([[1], [1, 2]], "row 1 has 2 entries, row 0 has 1"),
        ([[1e30]], "too large"),
    ):
        path = tmp_path / "count.json"
        path.write_text(json.dumps({"logical_count": count}))
        with pytest.raises(ValueError, match=rf"count\.json.*{message}"):
            formats.read_sglang_count(path)


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path, placement: Placement) -> None:
    pytest.importorskip("yaml", reason="needs PyYAML")
    for name, write in (
        ("x.json", formats.write_sglang),
        ("x.pt", formats.write_sglang),
        ("x.yaml", formats.write_tensorrt_llm),
    ):
        with pytest.raises(ValueError, match=f"{name} cannot be written"):
            write(str(tmp_path / "no" / name), placement)


def test_empty_slots_go_into_no_file(tmp_path: Path) -> None:
    """Engines know none: they would load the last expert there."""
    load = np.ones((1, 8))
    with_dead = rebalance(load, 16, 1, 1, 4, dead_ranks=[1])
    for write in (formats.write_sglang, formats.write_tensorrt_llm):
        with pytest.raises(ValueError, match="layer 0, slot 4 is empty"):
            write(tmp_path / "x.json", with_dead)
    assert not list(tmp_path.iterdir())
