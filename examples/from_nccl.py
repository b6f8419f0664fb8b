"""Moving a layer from all-gather and reduce-scatter to putget: torchrun --nproc-per-node 4 examples/from_nccl.py.

Both layers hold the same experts and give the same result. What changes is `forward`: rows go only to the ranks that
own their experts, nothing is padded to the largest batch, and a rank may have no tokens at all.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import putget

# The newer names of torch.distributed, or the older ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

HIDDEN, EXPERTS_EACH, TOP_K, CAPACITY = 256, 2, 2, 32


class Experts(nn.Module):
    """This rank's experts, and the router of all."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = rank * EXPERTS_EACH
        self.num_experts = ranks * EXPERTS_EACH
        self.router = torch.randn(HIDDEN, self.num_experts, generator=generator).to(device)
        every = torch.randn(self.num_experts, HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
        self.weights = every[self.first : self.first + EXPERTS_EACH].to(device)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids of each token's experts."""
        return torch.softmax(x.float() @ self.router, dim=-1).topk(TOP_K)

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        """The weighted sum over this rank's experts, for every row that has one of them."""
        out.zero_()
        for local in range(EXPERTS_EACH):
            token, k = (ids == self.first + local).nonzero(as_tuple=True)
            out[token] += ((x[token].float() @ self.weights[local]) * weights[token, k, None]).to(out.dtype)


class GatherLayer(Experts):
    """Before: every rank gets every token, padded to the capacity, and most rows are thrown away."""

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, HIDDEN] to the same."""
        ranks = dist.get_world_size()
        weights, ids = self.route(x)
        padding = CAPACITY - len(x)
        x, weights = (nn.functional.pad(t, (0, 0, 0, padding)) for t in (x, weights))
        ids = nn.functional.pad(ids, (0, 0, 0, padding), value=-1)
        gathered = []
        for mine in (x, ids, weights):
            everybody = mine.new_empty(ranks * CAPACITY, mine.shape[1])
            all_gather(everybody, mine)
            gathered.append(everybody)
        partial = torch.empty_like(gathered[0])
        self.run(*gathered, partial)
        own = torch.empty_like(x)
        reduce_scatter(own, partial)
        return own[: CAPACITY - padding]


class PutgetLayer(Experts):
    """After: dispatch instead of gather, combine instead of scatter."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        super().__init__(rank, ranks, device)
        row = putget.Payload((HIDDEN,), torch.bfloat16)
        self.a2a = putget.AllToAll(
            putget.Communicator(dist.group.WORLD),
            num_experts=self.num_experts,
            top_k=TOP_K,
            max_tokens_per_rank=CAPACITY,
            payloads=[row],
            output=row,
            device=device,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, HIDDEN] to the same."""
        weights, ids = self.route(x)
        received = self.a2a.dispatch(ids, weights, x).flat
        self.run(received.payloads[0], received.topk_ids, received.topk_weights, self.a2a.combine_input.flat)
        return self.a2a.combine()


def main() -> None:
    """Runs both layers on the same tokens."""
    on_gpus = torch.cuda.device_count() > 1
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    before, after = GatherLayer(rank, ranks, device), PutgetLayer(rank, ranks, device)
    for num_tokens in (1 + rank, CAPACITY - rank, 5 * rank):
        x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16().to(device)
        torch.testing.assert_close(after(x), before(x), rtol=0.05, atol=0.05)
    print(f"rank {rank} of {ranks} on {device}: both layers agree", flush=True)
    after.a2a.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
