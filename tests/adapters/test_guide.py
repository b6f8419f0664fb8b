"""The code of the engines' pages: every block is Python, its imports are there, and what needs no engine runs."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import putget
from tests.adapters.layer import Layer, same_bits
from tests.harness import Rank, fresh_ranks, run_ranks
from tests.project.checkout import ROOT

PAGES = sorted((ROOT / "docs" / "guides" / "engines").glob("*.md"))
GUIDE = "\n".join(page.read_text() for page in PAGES)
ENGINES = {"transformers"}  # that are not installed here
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_names_are_there(block: str) -> None:
    imports = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom | ast.Import)]
    for node in imports:
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
            continue
        assert node.module is not None
        if node.module.split(".")[0] in ENGINES:
            continue  # tests/engines has them
        for alias in node.names:
            module = importlib.import_module(node.module)
            assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")


def block_with(text: str) -> str:
    """The one block that has this text."""
    (found,) = (block for block in BLOCKS if text in block)
    return str(found)


LAYER = Layer(num_tokens=(3, 0), num_experts=8, top_k=2, recipe="fp8", seed=4)


def tensorrt_llm(rank: Rank) -> torch.Tensor:
    """A body: the block as it is, with what the experts do between its lines."""
    ids, weights = LAYER.routes(rank.rank)
    rows, scales = LAYER.rows(rank.rank)
    names: dict[str, Any] = {
        "mapping": rank.comm,
        "num_slots": LAYER.num_experts,
        "top_k": LAYER.top_k,
        "max_num_tokens_per_rank": LAYER.max_tokens_per_rank,
        "x": rows,
        "x_sf": scales,
        "token_selected_experts": ids,
        "token_final_scales": weights,
    }
    for line in block_with("FourPayloadAllToAll(mapping").replace("7168", str(LAYER.hidden_size)).splitlines():
        if "final_hidden_states" in line:
            received = (names["x"], names["x_sf"])
            names["final_hidden_states"] = LAYER.experts(received, names["experts"], names["scales"], rank.rank)
        exec(line, names)
    putget.adapters.shared.close_shared(rank.comm)
    return names["out"]  # type: ignore[no-any-return]


def install_in_tensorrt_llm(_: Rank) -> str:
    """A body, in a process of its own since it changes what is imported: the block, where the class is."""
    name = "tensorrt_llm._torch.modules.fused_moe.communication.nvlink_one_sided"
    module: Any = ModuleType(name)
    module.NVLinkOneSided = type("NVLinkOneSided", (), {"__init__": lambda self, mapping: None})
    sys.modules[name] = module
    exec(block_with("tensorrt_llm.install()"), {})
    return module.NVLinkOneSided.__module__  # type: ignore[no-any-return]


def test_block_that_installs_in_tensorrt_llm_runs() -> None:
    with fresh_ranks(1) as ranks:
        assert ranks.call(install_in_tensorrt_llm) == {0: "putget.adapters.tensorrt_llm"}


def test_block_of_tensorrt_llm_runs() -> None:
    for rank, out in enumerate(run_ranks(2, tensorrt_llm)):
        assert same_bits(out, LAYER.expected(rank))


def deep_ep(rank: Rank) -> int:
    """A body: the block, and one call of what it made."""
    names: dict[str, Any] = {"group": rank.comm, "num_nvl_bytes": 0, "num_rdma_bytes": 0}
    exec(block_with("deep_ep.Buffer(group"), names)
    per_rank, *_ = names["buffer"].get_dispatch_layout(torch.tensor([[0, 1], [3, -1]]), 4)
    names["buffer"].destroy()
    return int(per_rank.sum())


def test_block_of_deep_ep_runs() -> None:
    assert run_ranks(2, deep_ep) == [2, 2]


def compiled(rank: Rank) -> None:
    """A body: the block, with a compiler that needs no compiler of C++."""
    torch._dynamo.reset()
    row = putget.Payload((16,), torch.bfloat16)
    with putget.AllToAll(
        rank.comm, num_experts=4, top_k=2, max_tokens_per_rank=8, payloads=[row], output=row, device="cpu"
    ) as a2a:

        def experts(rows: Any) -> torch.Tensor:
            here = (rows.topk_ids >= 0) & (rows.topk_ids // 2 == rank.rank)
            return (rows.payloads[0] * torch.where(here, rows.topk_weights, 0.0).sum(1, keepdim=True)).bfloat16()

        names: dict[str, Any] = {"a2a": a2a, "experts": experts}
        exec(block_with("putget.ops.Traced").replace("fullgraph=True", 'fullgraph=True, backend="eager"'), names)
        for num_tokens in (3, 5, 0):
            x = torch.randn(num_tokens, 16).bfloat16()
            ids = torch.randint(0, 4, (num_tokens, 2))
            weights = torch.full((num_tokens, 2), 0.5)
            assert torch.equal(names["fast"](x, ids, weights), names["layer"](x, ids, weights))


def test_block_of_torch_compile_runs() -> None:
    run_ranks(2, compiled, timeout=120)


def for_flashinfer(_: Rank) -> tuple[str, list[str]]:
    """A body, in a process of its own since it changes what is imported: the blocks, where FlashInfer's registry is."""
    registered: dict[str, type] = {}
    moe_ep: Any = ModuleType("flashinfer.moe_ep")
    moe_ep.MoEEpCommunication = type("MoEEpCommunication", (), {})
    moe_ep.MoEEpDispatchResult = dict
    moe_ep.register_communication = lambda name: lambda kind: registered.setdefault(name, kind)
    sys.modules["flashinfer.moe_ep"] = moe_ep
    names: dict[str, Any] = {}
    exec(block_with("moe_a2a_get_workspace_size_per_rank"), names)
    exec(block_with("moe_ep.register()"), names)
    return names["MoeAlltoAll"].__module__, list(registered)


def test_blocks_for_flashinfer_run() -> None:
    with fresh_ranks(1) as ranks:
        assert ranks.call(for_flashinfer) == {0: ("putget.adapters.flashinfer.moe_alltoall", ["putget"])}


def test_versions_are_the_pinned_ones() -> None:
    pins = (ROOT / "tests" / "adapters" / "upstream.toml").read_text()
    for version in re.findall(r"== ?\"?([0-9.]+?)(?:\.post\d+)?\"", pins):
        assert f"| {version} |" in GUIDE, version
