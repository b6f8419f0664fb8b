"""The CPU backend in the unit test of an engine: pytest examples/test_engine_on_cpu.py.

No GPU and no torch.distributed: the ranks are threads of this process, and they run the protocol that GPUs run. The
engine's layer takes its communicator and its device from outside; that is all it needs to be tested like this.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import putget
from putget import reference

RANKS, HIDDEN, EXPERTS, TOP_K = 4, 32, 8, 2


class EngineLayer:
    """The subject of the test: the mixture-of-experts layer of an engine. Expert e multiplies its rows by e + 1."""

    def __init__(self, comm: putget.Communicator, device: str) -> None:
        row = putget.Payload((HIDDEN,), torch.float32)
        sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "max_tokens_per_rank": 16, "timeout_s": 10.0}
        self.rank = comm.rank
        self.a2a = putget.AllToAll(comm, payloads=[row], output=row, device=device, **sizes)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[num_tokens, HIDDEN] to the same."""
        received = self.a2a.dispatch(ids, weights, x).flat
        mine = received.topk_ids // (EXPERTS // RANKS) == self.rank
        factor = torch.where(mine, received.topk_weights * (received.topk_ids + 1), 0.0).sum(1, keepdim=True)
        torch.mul(received.payloads[0], factor, out=self.a2a.combine_input.flat)
        return self.a2a.combine()


def batch(rank: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, ids and weights of a rank."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    weights, ids = torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOP_K)
    return x, ids.int(), weights


def run(comm: putget.Communicator, num_tokens: int) -> Tensor:
    """One rank."""
    layer = EngineLayer(comm, "cpu")
    with layer.a2a:
        return layer.forward(*batch(comm.rank, num_tokens))


@pytest.mark.parametrize("num_tokens", [(4, 4, 4, 4), (1, 0, 16, 3), (0, 0, 0, 0)])
def test_layer_equals_a_dense_one(num_tokens: tuple[int, ...]) -> None:
    """Every rank has a batch of its own, also an empty one."""
    with ThreadPoolExecutor(RANKS) as threads:
        results = list(threads.map(run, putget.Communicator.local(RANKS), num_tokens))
    for rank, result in enumerate(results):
        x, ids, weights = batch(rank, num_tokens[rank])
        dense = reference.dense_moe(x, ids, weights, lambda expert, rows: rows * (expert + 1))
        torch.testing.assert_close(result, dense)


def test_a_rank_that_stays_away_is_named() -> None:
    """An engine can test what it does when a rank is lost."""
    comms = putget.Communicator.local(2)
    row = putget.Payload((HIDDEN,), torch.float32)
    sizes = {"num_experts": 2, "top_k": 1, "max_tokens_per_rank": 4, "timeout_s": 0.2, "warmup_timeout_s": 2.0}

    def construct(comm: putget.Communicator) -> putget.AllToAll:
        return putget.AllToAll(comm, payloads=[row], output=row, device="cpu", **sizes)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(construct, comms)
    nobody = torch.empty(0, 1, dtype=torch.int32), torch.empty(0, 1), torch.empty(0, HIDDEN)
    with pytest.raises(putget.PeerTimeout) as caught:
        first.dispatch(*nobody)
    assert caught.value.missing == (1,)
    first.close()
    second.close()
