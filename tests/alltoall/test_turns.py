"""Calls that the host refuses because another call has its turn."""

from __future__ import annotations

import pytest
import torch

from putget.memory.turns import Turns

CPU = torch.device("cpu")


def test_a_round_belongs_to_its_owner() -> None:
    turns = Turns(CPU)
    assert turns.refuse_without_round("a", "combine") == "combine: no dispatch came before it"
    turns.open("a")
    assert turns.refuse_without_round("a", "combine") is None
    assert turns.refuse_without_round("b", "combine") is not None
    turns.open("b")
    assert turns.refuse_without_round("a", "combine") is not None
    turns.end()
    assert turns.refuse_without_round("b", "combine") is not None


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_between_halves_only_the_finish_has_its_turn(operation: str) -> None:
    start, finish = f"{operation}_start", f"{operation}_finish"
    turns = Turns(CPU)
    turns.open("a")
    assert turns.refuse_unfinished("release") is None
    assert turns.refuse_unstarted("a", finish) == f"{finish}: no {start} came before it"
    turns.start("a", start)
    assert turns.refuse_unfinished("release") == f"release: {start} came before it, and {finish} has not come yet"
    assert turns.refuse_unstarted("a", finish) is None
    assert turns.refuse_unstarted("b", finish) is not None
    other = "combine_finish" if operation == "dispatch" else "dispatch_finish"
    assert turns.refuse_unstarted("a", other) is not None
    turns.end()
    assert turns.refuse_unfinished("release") is None
    assert turns.refuse_unstarted("a", finish) is not None


def test_after_a_capture_the_device_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(torch.device("cuda", 0))
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    turns.start("a", "dispatch_start")
    assert turns.refuse_unfinished("dispatch") is not None
    turns.open("a")
    capturing = True
    turns.end()
    capturing = False
    assert turns.refuse_without_round("a", "combine") is None
    turns.start("a", "combine_start")
    assert turns.refuse_unfinished("release") is None
    assert turns.refuse_unstarted("b", "dispatch_finish") is None
