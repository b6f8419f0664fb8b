"""The checkpoint engine in verl's own registry and manager: versions arrive, and what fails leaves the old one."""

from __future__ import annotations

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
from tests.adapters.upstream import upstream
from tests.adapters.verl import checkpoint_cases
from tests.harness import fresh_ranks


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """All cases in one process, which has verl's file and stand-ins for the rest."""
    root = upstream("verl")
    with fresh_ranks(1) as ranks:
        results = ranks.call(checkpoint_cases.run, root)[0]
    return dict(results)


@pytest.mark.parametrize("case", [case.__name__ for case in checkpoint_cases.CASES])
def test_in_its_registry(case: str, found: dict[str, str]) -> None:
    assert found[case] == "ok", found[case]
