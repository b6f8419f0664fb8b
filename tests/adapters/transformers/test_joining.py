"""A new process takes the place of a rank that was killed, between two passes of the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import putget
from putget.adapters.transformers import spread, spreading
from putget.adapters.transformers.joining import take_in
from tests.adapters.transformers.test_passes import DEADLINE_S, EXPERTS, LAYERS, die
from tests.adapters.transformers.test_spreading import Model, batch
from tests.harness import Rank, fresh_ranks

RANKS, GONE, NEW = 3, 1, 3
PATIENCE_S = 60.0


def met(folder: Path, name: str, number: int) -> putget.Communicator:
    """The communicator of a group of processes, which meet by a file."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=number, world_size=RANKS)
    return putget.Communicator()


def made(comm: putget.Communicator, model: Any, balance: str) -> Any:
    spreading.require_transformers = lambda: "5.24.0"  # type: ignore[attr-defined]
    return spread(
        model,
        comm,
        num_slots=9,
        balance=balance,
        max_tokens_per_rank=8,
        check_layers=True,
        timeout_s=DEADLINE_S,
        setup_timeout_s=20.0,
    )


def agreed(folder: Path, attempt: int, number: int) -> Callable[[str | None], bool]:
    """As a server decides: all processes have said that they can, or one has said that it cannot."""

    def agree(why: str | None) -> bool:
        folder.joinpath(f"{attempt}.{number}.tmp").write_text(why or "")
        folder.joinpath(f"{attempt}.{number}.tmp").rename(folder / f"{attempt}.{number}.said")
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            said = [path.read_text() for path in folder.glob(f"{attempt}.*.said")]
            if any(said) or len(said) == RANKS:
                return not any(said)
            time.sleep(0.01)
        raise AssertionError(f"processes say nothing: {sorted(folder.iterdir())}")

    return agree


def compared(found: Any, model: Any, seed: int) -> None:
    """A pass with a batch of this rank's own."""
    args = batch(seed, 1 + seed % 5)
    found.begin()
    given = model(*args)
    found.end_pass()
    torch.testing.assert_close(given, Model(LAYERS, EXPERTS)(*args))


def stay(rank: Rank, folder: Path, balance: str, attempts: int) -> list[Any]:
    """A body: a rank that serves all along; rank GONE is killed."""
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # its imports take longer than a deadline
    model = Model(LAYERS, EXPERTS)
    found = made(met(folder, "first", rank.rank), model, balance)
    if rank.rank == GONE:
        die(model, 1, "experts")
    first, seed = found, 1000 * rank.rank
    for attempt in range(1, attempts + 1):
        before = found
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / f"{attempt}.loaded").exists():
            assert time.monotonic() < deadline, f"attempt {attempt}: nobody comes"
            compared(found, model, seed := seed + 1)
        meet = lambda attempt=attempt: met(folder, f"join{attempt}", rank.rank)  # noqa: E731
        found = take_in(found, attempt, meet, agreed(folder, attempt, rank.rank), 20.0)
        assert (found is before) == (attempt < attempts)
        (folder / f"{attempt}.over.{rank.rank}").touch()
    assert first.members == (0, 2)
    return finish(found, model, seed)


def finish(found: Any, model: Any, seed: int) -> list[Any]:
    with found.together():
        for number in range(5):
            args = batch(seed + number, 1 + number)
            torch.testing.assert_close(model(*args), Model(LAYERS, EXPERTS)(*args))
    held = [found.members, found.lockstep.number > 5, found.balancer.placement.physical_to_logical.tolist()]
    found.end()
    return held


def come(rank: Rank, folder: Path, balance: str, wrong: str) -> list[Any]:
    """A body: a new process, which at its first attempt has other weights, or is killed."""
    if wrong:
        model = Model(LAYERS, EXPERTS)
        if wrong == "weights":
            next(model.layers[1].parameters()).add_(1)
        (folder / "1.loaded").touch()
        comm = met(folder, "join1", GONE)
        if wrong == "killed":
            made(comm, model, balance)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(ValueError, match="weights differs between ranks"):
            made(comm, model, balance)
        assert not agreed(folder, 1, GONE)("it has other weights")
    return come_right(rank, folder, balance, attempt=2 if wrong else 1)


def come_right(rank: Rank, folder: Path, balance: str, attempt: int) -> list[Any]:
    """A body: a new process with the right weights."""
    model = Model(LAYERS, EXPERTS)
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    deadline = time.monotonic() + PATIENCE_S
    while attempt > 1 and len(list(folder.glob(f"{attempt - 1}.over.*"))) < RANKS - 1:
        assert time.monotonic() < deadline, "the others do not go on"
        time.sleep(0.01)
    (folder / f"{attempt}.loaded").touch()
    found = made(met(folder, f"join{attempt}", GONE), model, balance)
    found.try_out()
    assert agreed(folder, attempt, GONE)(None)
    return finish(found, model, 5000)


@pytest.mark.parametrize(
    ("balance", "wrong"),
    [("off", "weights"), pytest.param("static", "", marks=pytest.mark.soak)],
)
def test_a_new_process_takes_the_place_of_a_rank_that_was_killed(balance: str, wrong: str, tmp_path: Path) -> None:
    """The others' passes give what the dense model gives, before it comes, when it fails at first, and with it."""
    with fresh_ranks(RANKS + 1) as ranks:
        for rank in range(RANKS):
            ranks.submit(rank, stay, tmp_path, balance, 2 if wrong else 1)
        wait_for_loss(tmp_path, ranks)
        ranks.submit(NEW, come, tmp_path, balance, wrong)
        found = ranks.results((0, 2, NEW), timeout=90)
    assert found[0] == found[2] == found[NEW]
    assert found[0][:2] == [(0, 1, 2), True]
    start = [0, 1, -1, 2, 3, -1, 4, -1, -1] if balance == "off" else [0, 1, 2, 2, 3, 4, 4, 0, 1]
    assert found[0][2] == [start] * LAYERS


def wait_for_loss(folder: Path, ranks: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while ranks._processes[GONE].is_alive():
        assert time.monotonic() < deadline, "the rank lives"
        time.sleep(0.05)


@pytest.mark.soak
def test_a_new_process_that_is_killed_as_it_joins_changes_nothing(tmp_path: Path) -> None:
    """Then another one joins."""
    with fresh_ranks(RANKS + 2) as ranks:
        for rank in range(RANKS):
            ranks.submit(rank, stay, tmp_path, "off", 2)
        wait_for_loss(tmp_path, ranks)
        ranks.submit(NEW, come, tmp_path, "off", "killed")
        ranks.submit(NEW + 1, come_right, tmp_path, "off", 2)
        found = ranks.results((0, 2, NEW + 1), timeout=120)
    assert found[0] == found[2] == found[NEW + 1]
    assert found[0][0] == (0, 1, 2)
