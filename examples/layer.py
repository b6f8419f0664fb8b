"""One expert-parallel layer: torchrun --nproc-per-node 4 examples/layer.py (on GPUs where there are enough)."""

import torch
import torch.distributed as dist

import putget

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if torch.cuda.device_count() >= ranks else torch.device("cpu")
hidden, experts_each, top_k = 512, 4, 2
row = putget.Payload((hidden,), torch.bfloat16)
sizes = {"num_experts": experts_each * ranks, "top_k": top_k, "max_tokens_per_rank": 64}

torch.manual_seed(0)  # the same weights on every rank, so that the result can be checked below
router = torch.randn(hidden, experts_each * ranks, device=device) / hidden**0.5
experts = torch.randn(experts_each * ranks, hidden, hidden, device=device) / hidden**0.5
torch.manual_seed(1 + rank)
x = torch.randn(16 * rank, hidden, device=device).bfloat16()  # rank 0 has none

with putget.AllToAll(putget.Communicator(), **sizes, payloads=[row], output=row, device=device) as a2a:
    weights, ids = torch.softmax(x.float() @ router, dim=-1).topk(top_k)
    received = a2a.dispatch(ids, weights, x).flat
    out = a2a.combine_input.flat.zero_()
    for expert in range(rank * experts_each, (rank + 1) * experts_each):
        token, k = (received.topk_ids == expert).nonzero(as_tuple=True)
        rows = received.payloads[0][token].float() @ experts[expert]
        out[token] += (rows * received.topk_weights[token, k, None]).bfloat16()
    y = a2a.combine()

dense = torch.einsum("th,tkhi,tk->ti", x.float(), experts[ids], weights)
torch.testing.assert_close(y.float(), dense, rtol=0.05, atol=0.05)
print(f"rank {rank} of {ranks} on {device}: {len(x)} tokens, as a dense layer would give", flush=True)
dist.destroy_process_group()
