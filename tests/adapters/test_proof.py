"""The self-check of an engine that is newer than the known ones."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from putget import BackendUnavailable, Payload
from putget.adapters import engines, placement, proof, sglang, vllm
from putget.adapters.rounds import Rounds
from putget.adapters.shared import communicator_of, engine_workspace_bytes, shared_workspace
from tests.harness import Rank, fresh_ranks

NUM_EXPERTS, HIDDEN = 10, 16


def check(rank: Rank) -> list[str]:
    """A body: what an engine in a known version, a right and a wrong one are told."""
    comm = communicator_of()
    row = Payload((HIDDEN,), torch.bfloat16)
    num_bytes = engine_workspace_bytes(
        ep_size=comm.size, max_tokens_per_rank=8, dispatch_bytes=row.row_bytes, output=row
    )
    table = placement.linear(NUM_EXPERTS, comm.size)
    rounds = Rounds(
        shared_workspace(comm, num_bytes, torch.device("cpu")),
        num_experts=NUM_EXPERTS,
        top_k=3,
        max_tokens_per_rank=8,
        output=None,
        expert_to_rank=table,
    )
    mine = [expert for expert, owner in enumerate(table) if owner == comm.rank]
    proof.prove("SGLang", rounds, row.shape, row.dtype, [])  # a known version: nothing is looked at
    engines._unproven["SGLang"] = "0.5.99"
    proof.prove("SGLang", rounds, row.shape, row.dtype, mine)
    blocks = [expert for expert in range(NUM_EXPERTS) if expert // 4 == comm.rank]  # 4, 4, 2 for 4, 3, 3
    try:
        proof.prove("SGLang", rounds, row.shape, row.dtype, blocks)
    except BackendUnavailable as error:
        return [str(error)]
    return []


def test_one_round_finds_an_engine_that_places_experts_otherwise() -> None:
    with fresh_ranks(3) as ranks:
        told = [message for messages in ranks.call(check).values() for message in messages]
    assert told
    assert all("SGLang 0.5.99 is newer than what putget knows, and its self-check failed" in text for text in told)


@pytest.mark.parametrize(
    ("version", "unproven"), [("0.5.23", None), ("0.5.23.post1", None), ("0.5.24", "0.5.24"), ("0.7.1", "0.7.1")]
)
def test_versions_that_need_the_self_check(version: str, unproven: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_unproven", {})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    sglang.require_sglang()
    assert engines.unproven_version("SGLang") == unproven
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.35.0")
    vllm.require_vllm()
    assert engines.unproven_version("vLLM") == "0.35.0"
