"""The recorder of routing files: what comes is what `putget balance` reads, in the layer too."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from putget.balancer import RoutingRecorder
from putget.balancer import recorder as recorder_module
from putget_bench.routing import read_tasks
from tests.harness import Rank, run_ranks
from tests.moe.dense import Dense
from tests.moe.layers import make_layer


def batch(seed: int, tokens: int, device: str = "cpu") -> torch.Tensor:
    return torch.randint(0, 64, (tokens, 4), generator=torch.Generator().manual_seed(seed)).to(device)


def test_batches_are_kept_in_order(device: str) -> None:
    recorder = RoutingRecorder(2, 4, 100, device=device)
    sizes = (3, 0, 40, 7)
    for layer in range(2):
        for seed, tokens in enumerate(sizes):
            valid = None if seed != 2 else torch.tensor([30], dtype=torch.int32, device=device)
            recorder.record(layer, batch(10 * layer + seed, tokens, device).int(), valid)
    found = recorder.ids()
    assert found.dtype == np.int8
    for layer in range(2):
        want = torch.cat(
            [batch(10 * layer + seed, tokens)[: 30 if seed == 2 else None] for seed, tokens in enumerate(sizes)]
        )
        assert np.array_equal(found[layer], want.numpy())
    assert recorder.dropped == 0


def test_what_finds_no_room_is_dropped_and_counted() -> None:
    recorder = RoutingRecorder(1, 4, 10)
    for seed in range(4):
        recorder.record(0, batch(seed, 4))
    assert np.array_equal(recorder.ids()[0], torch.cat([batch(seed, 4) for seed in range(3)])[:10].numpy())
    assert recorder.dropped == 6
    recorder.clear()
    recorder.record(0, batch(9, 2))
    assert np.array_equal(recorder.ids()[0], batch(9, 2).numpy())
    assert recorder.dropped == 0


def test_files_gather_tasks(tmp_path: Path) -> None:
    path = tmp_path / "routing.npz"
    recorder = RoutingRecorder(1, 4, 10)
    for seed, task in enumerate(("law", "code")):
        recorder.clear()
        recorder.record(0, batch(seed, 5))
        recorder.save(path, task)
    tasks = read_tasks(path)
    assert list(tasks) == ["code", "law"]
    assert np.array_equal(tasks["code"][0], batch(1, 5).numpy())
    with pytest.raises(ValueError, match="has an array 'law'"):
        recorder.save(path, "law")
    assert [file.name for file in tmp_path.iterdir()] == ["routing.npz"]
    path.write_text("no archive")
    with pytest.raises(ValueError, match=r"routing.npz is no .npz archive"):
        recorder.save(path, "a")


def test_ranks_that_save_at_once_keep_each_others_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, recorder = tmp_path / "routing.npz", RoutingRecorder(1, 4, 10)
    recorder.record(0, batch(0, 5))
    recorder.save(path, "law")
    others = [threading.Thread(target=recorder.save, args=(path, task)) for task in ("code", "chat")]
    read = recorder_module._read

    def read_beside_others(place: Path) -> Any:
        found = read(place)
        monkeypatch.setattr(recorder_module, "_read", read)
        for other in others:
            other.start()
            other.join(0.5)  # long enough for one that does not wait
        return found

    monkeypatch.setattr(recorder_module, "_read", read_beside_others)
    recorder.save(path, "own")
    for other in others:
        other.join()
    assert list(read_tasks(path)) == ["chat", "code", "law", "own"]
    assert [file.name for file in tmp_path.iterdir()] == ["routing.npz"]


def test_ids_that_name_no_expert_are_recorded_as_none(device: str) -> None:
    recorder = RoutingRecorder(1, 2, 16, num_experts=64, device=device)
    ids = [[-1000, 5], [2**32 + 7, 6], [64, 63], [-(2**63), 2**63 - 1], [2**31, 0]]
    recorder.record(0, torch.tensor(ids, device=device))
    assert recorder.ids().tolist() == [[[-1, 5], [-1, 6], [-1, 63], [-1, -1], [-1, 0]]]
    anyone = RoutingRecorder(1, 1, 4, device=device)
    anyone.record(0, torch.tensor([[2**32 + 7], [300]], device=device))
    assert anyone.ids().tolist() == [[[-1], [300]]]


def test_batches_of_padding_alone_name_no_expert(tmp_path: Path) -> None:
    recorder = RoutingRecorder(1, 2, 16)
    recorder.record(0, torch.full((3, 2), -1))
    assert recorder.ids().dtype == np.int8
    recorder.save(str(tmp_path / "idle.npz"), "idle")
    assert (read_tasks(tmp_path / "idle.npz")["idle"] == -1).all()


@pytest.mark.parametrize(("most", "dtype"), [(0, np.int8), (127, np.int8), (128, np.int16), (40000, np.int32)])
def test_the_type_holds_the_largest_id(most: int, dtype: type) -> None:
    recorder = RoutingRecorder(1, 2, 4)
    recorder.record(0, torch.tensor([[most, -1]]))
    assert recorder.ids().dtype == dtype
    assert recorder.ids().tolist() == [[[most, -1]]]


def test_a_task_may_have_any_name(tmp_path: Path) -> None:
    """Names of numpy's own arguments, too."""
    recorder = RoutingRecorder(1, 2, 4)
    recorder.record(0, torch.tensor([[1, 2]]))
    for task in ("file", "allow_pickle", "law.npy"):
        recorder.save(tmp_path / "a.npz", task)
    with np.load(tmp_path / "a.npz") as archive:
        assert archive["file"].tolist() == [[[1, 2]]]
    with pytest.raises(ValueError, match="cannot be written"):
        recorder.save(tmp_path / "no" / "a.npz", "law")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"one.npy is no .npz archive"):
        recorder.save(tmp_path / "one.npy", "law")


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="max_tokens is 0"):
        RoutingRecorder(1, 4, 0)
    recorder = RoutingRecorder(2, 4, 10)
    with pytest.raises(ValueError, match="layer is 2, allowed are ints from 0 to 1"):
        recorder.record(2, batch(0, 1))
    with pytest.raises(ValueError, match=r"topk_ids has shape \[1, 3\], expected \[1, 4\]"):
        recorder.record(0, batch(0, 1)[:, :3])
    with pytest.raises(ValueError, match="layers have recorded 0 to 0 tokens"):
        recorder.ids()
    recorder.record(0, batch(0, 1))
    with pytest.raises(ValueError, match="layers have recorded 0 to 1 tokens"):
        recorder.ids()


def in_layer(rank: Rank, dense: Dense) -> tuple[bool, bool]:
    """A body: a layer with replicas records the router's ids, and computes what it does without."""
    with make_layer(rank, dense, num_slots=12, replica_choice="balanced", count_experts=True) as layer:
        x = dense.tokens(rank.rank, 6)
        want = layer(x)
        recorder = RoutingRecorder(3, dense.top_k, 50)
        layer.record = recorder.of_layer(2)
        same = torch.equal(layer(x), want)
        ids, _ = layer.router(x)
        recorder.record(0, ids)
        recorder.record(1, ids)
        assert int(layer.expert_load.sum()) == 2 * ids.numel()
        return same, np.array_equal(recorder.ids()[2], ids.numpy())


def test_a_layer_records() -> None:
    assert run_ranks(2, in_layer, Dense()) == [(True, True)] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_graph_records() -> None:
    recorder = RoutingRecorder(1, 4, 100, device="cuda")
    ids = batch(0, 8, "cuda")
    valid = torch.tensor([8], dtype=torch.int32, device="cuda")
    recorder.record(0, ids, valid)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorder.record(0, ids, valid)
    recorder.clear()
    want = []
    for seed, number in enumerate((8, 3, 0, 5)):
        ids.copy_(batch(seed, 8))
        valid.fill_(number)
        graph.replay()
        want.append(batch(seed, 8)[:number])
    assert np.array_equal(recorder.ids()[0], torch.cat(want).numpy())
