"""A layer that plans its replicas anew: torchrun --nproc-per-node 4 examples/placed_layer.py (on the CPU)."""

import torch
import torch.distributed as dist

import putget
from putget.balancer import LoadHistory, rebalance
from putget.moe import ExpertParallelMoE, SlotOptions

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
hidden, intermediate, num_experts, num_slots = 128, 64, 4 * ranks, 5 * ranks

torch.manual_seed(0)  # the same weights on every rank
state = {"gate.weight": torch.randn(num_experts, hidden) * torch.linspace(0.5, 1.5, num_experts)[:, None]}
for expert in range(num_experts):
    for name, shape in (("gate_proj", (intermediate, hidden)), ("up_proj", (intermediate, hidden))):
        state[f"experts.{expert}.{name}.weight"] = torch.randn(shape) * hidden**-0.5
    state[f"experts.{expert}.down_proj.weight"] = torch.randn(hidden, intermediate) * intermediate**-0.5

sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_experts": num_experts, "top_k": 2}
options = {"slots": SlotOptions(num_slots=num_slots), "count_experts": True, "max_tokens_per_rank": 64, "device": "cpu"}
history = LoadHistory(decay=0.5)
with ExpertParallelMoE.from_dense(putget.Communicator(), state, **sizes, **options) as layer:
    torch.manual_seed(1 + rank)
    x = torch.randn(64, hidden).bfloat16()
    before = layer(x)
    load = layer.expert_load.clone()
    dist.all_reduce(load)  # every rank plans from the same loads, so every rank has the same plan
    history.add(load[None].numpy())
    plan = rebalance(history.load, num_slots, 1, 1, ranks)
    layer.set_placement(plan, state)
    after = layer(x)

torch.testing.assert_close(after.float(), before.float(), rtol=0.05, atol=0.05)
ratio = plan.imbalance(history.load, ranks)[0]
print(f"rank {rank} of {ranks}: the same output with the planned replicas; max/mean {ratio:.2f}", flush=True)
dist.destroy_process_group()
