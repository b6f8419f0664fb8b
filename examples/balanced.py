"""One layer whose hot experts have replicas: torchrun --nproc-per-node 4 examples/balanced.py (on the CPU)."""

import torch
import torch.distributed as dist

import putget
from putget.balancer import ReplicaChoice, rebalance

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
hidden, num_experts, slots_each, top_k = 256, 4 * ranks, 5, 2
row = putget.Payload((hidden,), torch.bfloat16)

torch.manual_seed(0)  # the same on every rank: weights, and the load that the plan is made from
experts = torch.randn(num_experts, hidden, hidden) / hidden**0.5
load = 1000 / torch.arange(1, num_experts + 1) ** 0.8
placement = rebalance(load.numpy(), slots_each * ranks, 1, 1, ranks)
choose = ReplicaChoice(placement, ep_size=ranks, ep_rank=rank)
torch.manual_seed(1 + rank)
x = torch.randn(64, hidden).bfloat16()
ids = torch.multinomial(load.expand(64, -1), top_k)
weights = torch.full((64, top_k), 1 / top_k)

sizes = {"num_experts": slots_each * ranks, "top_k": top_k, "max_tokens_per_rank": 64}
with putget.AllToAll(putget.Communicator(), **sizes, payloads=[row], output=row, device="cpu") as a2a:
    received = a2a.dispatch(choose(ids), weights, x).flat  # slots, not experts
    out = a2a.combine_input.flat.zero_()
    for slot in range(rank * slots_each, (rank + 1) * slots_each):
        token, k = (received.topk_ids == slot).nonzero(as_tuple=True)
        rows = received.payloads[0][token].float() @ experts[placement.physical_to_logical[0, slot]]
        out[token] += (rows * received.topk_weights[token, k, None]).bfloat16()
    y = a2a.combine()

dense = torch.einsum("th,tkhi,tk->ti", x.float(), experts[ids], weights)
torch.testing.assert_close(y.float(), dense, rtol=0.05, atol=0.05)
ratio = placement.imbalance(load.numpy(), ranks)[0]
print(f"rank {rank} of {ranks}: as a dense layer would give; planned max/mean {ratio:.2f}", flush=True)
dist.destroy_process_group()
