"""The weight-transfer plug-in in vLLM's own factories: versions arrive, and what fails leaves the old one."""

from __future__ import annotations

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
from tests.adapters.upstream import upstream
from tests.adapters.vllm import weights_cases
from tests.harness import fresh_ranks


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """All cases in one process, which has vLLM's files and stand-ins for the rest."""
    root = upstream("vllm")
    with fresh_ranks(1) as ranks:
        results = ranks.call(weights_cases.run, root)[0]
    return dict(results)


@pytest.mark.parametrize("case", [case.__name__ for case in weights_cases.CASES])
def test_in_its_factories(case: str, found: dict[str, str]) -> None:
    assert found[case] == "ok", found[case]
