"""Tests whose result is a function of a text: they need not run again while the text is the one they passed with.

A test with the marker ``proved`` names the files that decide it, for instance the models of the synchronisation, or the
protocol text and the job that runs it. ``make proofs`` runs all of them and records in tests/proofs.json, for each test
function, a digest of these files and of the test's own. Other runs skip a test whose digest stands there, and run it
where it does not: whoever changes the protocol pays for its proofs, and nobody else.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "proofs.json"
# The text that jobs under sanitizers run, and the jobs (tests/protocol/stress_job.py).
PROTOCOL_TEXT = (
    "native/protocol",
    "native/domains",
    "native/balancer",
    "native/cpu",
    "native/cuda/exec.cuh",
    "native/cuda/choice_exec.cuh",
    "native/include",
    "native/error.h",
    "native/landing.h",
    "native/require.h",
    "native/team.h",
    "native/without_signals.h",
    "tests/native",
    "tests/protocol/stress_job.py",
    "tests/protocol/tags.py",
)
_PROPERTY = "proved"


def proved_by(*paths: str) -> pytest.MarkDecorator:
    """The marker of a test that these files or folders decide, relative to the checkout."""
    return pytest.mark.proved(*paths)


@functools.cache
def digest_of(paths: tuple[str, ...], root: Path = ROOT) -> str:
    """A digest of the names and bytes of all files there.

    Raises:
        ValueError: A path is not there.
    """
    whole = hashlib.sha256()
    for file in sorted(set(_files(paths, root))):
        whole.update(f"{file.relative_to(root)}\0".encode())
        whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def _files(paths: Iterable[str], root: Path) -> Iterable[Path]:
    for path in paths:
        place = root / path
        if not place.exists():
            raise ValueError(f"proved_by: {path} is not there")
        inside = place.rglob("*") if place.is_dir() else [place]
        yield from (file for file in inside if file.is_file() and "__pycache__" not in file.parts)


def heed(items: list[pytest.Item], prove: bool, record: Path = RECORD, root: Path = ROOT) -> None:
    """Marks tests that are proved already to be skipped; with ``prove`` all run, and their reports name the proof."""
    known = json.loads(record.read_text()) if record.exists() else {}
    marked = [item for item in items if item.get_closest_marker("proved")]
    sizes = Counter(map(_name, marked))
    for item in marked:
        name = _name(item)
        digest = digest_of((*item.get_closest_marker("proved").args, name.partition("::")[0]), root)  # type: ignore[union-attr]
        if prove:
            item.user_properties.append((_PROPERTY, [name, digest, sizes[name]]))
        elif known.get(name, {}).get("digest") == digest:
            reason = f"proved for this text on {known[name]['on']}: make proofs runs it again"
            item.add_marker(pytest.mark.skip(reason=reason))


def _name(item: pytest.Item) -> str:
    """The test's function, of which parameters make several tests."""
    return item.nodeid.partition("[")[0]


class Recorder:
    """A plug-in that writes down which functions have passed, all their tests, at the end of a run.

    Args:
        record: The file; functions that this run did not see keep their place.
    """

    def __init__(self, record: Path = RECORD) -> None:
        self._record = record
        self._passed: Counter[tuple[str, str, int]] = Counter()
        self._failed: set[tuple[str, str]] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for key, value in report.user_properties:
            if key == _PROPERTY:
                name, digest, size = cast("tuple[str, str, int]", value)
                self._passed[name, digest, size] += report.when == "call" and report.passed
                if report.failed:
                    self._failed.add((name, digest))

    def pytest_sessionfinish(self) -> None:
        known: dict[str, Any] = json.loads(self._record.read_text()) if self._record.exists() else {}
        today = datetime.now(timezone.utc).date().isoformat()
        for key, count in self._passed.items():
            name, digest, size = key
            if count == size and (name, digest) not in self._failed:
                known[name] = {"digest": digest, "tests": size, "on": today}
        for name, digest in self._failed:  # it passed with this text before, and does not always
            if known.get(name, {}).get("digest") == digest:
                del known[name]
        self._record.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")
