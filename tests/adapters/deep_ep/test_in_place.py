"""putget under the name ``deep_ep``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from putget import BackendUnavailable
from putget.adapters import deep_ep


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "deep_ep"}
    for name in kept:
        del sys.modules[name]
    yield
    for name in ("deep_ep", "deep_ep.utils"):
        sys.modules.pop(name, None)
    sys.modules.update(kept)


def test_code_that_imports_deep_ep_gets_putget() -> None:
    module = deep_ep.install()
    assert importlib.import_module("deep_ep") is module
    assert importlib.util.find_spec("deep_ep") is not None  # how vLLM asks whether DeepEP is there
    assert module.Buffer is deep_ep.Buffer
    assert (module.ElasticBuffer, module.EPHandle) == (deep_ep.ElasticBuffer, deep_ep.EPHandle)
    assert importlib.import_module("deep_ep.utils").EventOverlap is module.EventOverlap
    assert module.Config(24, 6, 256).num_sms == 24
    assert module.topk_idx_t is torch.int64
    assert deep_ep.install() is module


def test_a_deep_ep_that_is_there_already_is_refused() -> None:
    sys.modules["deep_ep"] = ModuleType("deep_ep")
    with pytest.raises(BackendUnavailable, match="deep_ep has been imported already, from nowhere: call install"):
        deep_ep.install()
