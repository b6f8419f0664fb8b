"""A whole layer: torchrun --nproc-per-node 4 examples/moe_layer.py (on GPUs where there are enough)."""

import torch
import torch.distributed as dist

import putget
from putget.moe import ExpertParallelMoE, GroupLimitedRouting

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if torch.cuda.device_count() >= ranks else torch.device("cpu")
hidden, between, experts = 256, 128, 4 * ranks

torch.manual_seed(0)  # a dense layer's weights, by the names of DeepSeek-V3's checkpoints: the same on every rank
state = {"gate.weight": torch.randn(experts, hidden), "gate.e_score_correction_bias": torch.randn(experts) / 10}
for name in ("shared_experts", *(f"experts.{expert}" for expert in range(experts))):
    for factor, shape in (("gate", (between, hidden)), ("up", (between, hidden)), ("down", (hidden, between))):
        state[f"{name}.{factor}_proj.weight"] = torch.randn(shape) / shape[1] ** 0.5

sizes = {"hidden_size": hidden, "intermediate_size": between, "shared_intermediate_size": between}
rules = {"top_k": 4, "routing": GroupLimitedRouting(num_groups=ranks, topk_groups=2), "router_bias": True}
with ExpertParallelMoE.from_dense(
    putget.Communicator(), state, num_experts=experts, max_tokens_per_rank=64, **sizes, **rules, device=device
) as layer:
    torch.manual_seed(1)
    x = torch.randn(64, hidden, device=device).bfloat16()
    everywhere = layer(x[16 * rank : 16 * rank + 16])  # each rank has tokens of its own...
    alone = layer(x if rank == 0 else x[:0])  # ...or rank 0 has all of them, and the others none
    if rank == 0:
        torch.testing.assert_close(alone[:16], everywhere, rtol=0.02, atol=0.02)
        print(f"{len(layer.local_experts)} of {experts} experts on each of {ranks} ranks, {device}", flush=True)
    layer.check()
dist.destroy_process_group()
