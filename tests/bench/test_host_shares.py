"""The clocks of benchmarks/host_shares.py; the program itself needs the engines."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("host_shares", ROOT / "benchmarks" / "host_shares.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


shares = load()


def spin(milliseconds: int) -> None:
    end = time.perf_counter_ns() + milliseconds * 1_000_000
    while time.perf_counter_ns() < end:
        pass


def test_time_inside_of_a_call_is_that_of_the_innermost_kind(tmp_path: Path) -> None:
    """A call of putget, in it a native one and the engine's experts; all rounds are in the file at last."""
    clock = shares.Clock(tmp_path)
    native, experts = clock.of(shares.NATIVE, lambda: spin(2)), clock.of(shares.ENGINE, lambda: spin(3))

    def adapter(rows: list[int]) -> None:
        spin(1)
        native()
        experts()

    call = clock.of(shares.PUTGET, adapter, 0)
    for _ in range(64):
        call([0, 0])
        spin(1)
    (file,) = tmp_path.iterdir()
    rounds = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rounds) == 64
    assert {one[1] for one in rounds} == {2}
    engine, putget, native_ns = ((rounds[-1][2 + kind] - rounds[0][2 + kind]) / 63e6 for kind in range(3))
    assert engine >= 4
    assert putget >= 1
    assert native_ns >= 2
    assert engine + putget + native_ns <= (rounds[-1][0] - rounds[0][0]) / 63e6 + 0.1, "no time counts twice"


def test_steps_are_those_of_one_number_of_tokens_without_the_first_generations() -> None:
    count = shares.WARM_UPS * shares.NEW_TOKENS + 5
    batches = [1] * count + [8] + [1] * 3
    rounds = [[0, batch, 10 * step, 3 * step, step] for step, batch in enumerate(batches) for _ in range(shares.LAYERS)]
    steps = shares.steps_of(rounds, 1)
    assert steps == [[10, 3, 1]] * (count - 1 + 2 - shares.WARM_UPS * shares.NEW_TOKENS)
    assert shares.steps_of(rounds, 8) == []
