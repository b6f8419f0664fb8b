"""Layers whose experts follow the load: torchrun --nproc-per-node 4 examples/online_balancer.py (on the CPU)."""

import torch
import torch.distributed as dist

import putget
from putget.balancer import Balancer, LoadHistory, Placement, PlanOptions
from putget.moe import ExpertParallelMoE, SlotOptions

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
num_experts, num_slots, num_layers = 8 * ranks, 9 * ranks, 2
sizes = {"hidden_size": 128, "intermediate_size": 64, "num_experts": num_experts, "top_k": 2, "device": "cpu"}
placement = Placement.of([[slot % num_experts for slot in range(num_slots)]] * num_layers, num_experts)

torch.manual_seed(0)  # the same weights on every rank
states = []
for _ in range(num_layers):
    state = {"gate.weight": torch.randn(num_experts, 128)}
    for expert in range(num_experts):
        for name, shape in (("gate_proj", (64, 128)), ("up_proj", (64, 128)), ("down_proj", (128, 64))):
            state[f"experts.{expert}.{name}.weight"] = torch.randn(shape) * shape[1] ** -0.5
    states.append(state)
direction = states[0]["gate.weight"][: num_experts // ranks].mean(0)  # tokens like it go to the first rank's experts

comm = putget.Communicator()
options = {"count_experts": True, "max_tokens_per_rank": 64, "num_stats": 130}
layers = [
    ExpertParallelMoE.from_dense(
        comm, state, slots=SlotOptions(placement=placement, placement_layer=number), **sizes, **options
    )
    for number, state in enumerate(states)
]
plan = PlanOptions(interval=4, history=LoadHistory(decay=0.5))
with Balancer(comm, layers, placement, plan=plan, device="cpu") as balancer:
    torch.manual_seed(1 + rank)
    for _ in range(60):
        x = (torch.randn(64, 128) + direction).bfloat16()
        for layer in layers:
            x = x + layer(x)
            balancer.move()
        balancer.step()
    load = torch.stack([layer.expert_load for layer in layers])
    placed = balancer.placement
    moves = balancer.num_moves

dist.all_reduce(load)
before, after = (float(one.imbalance(load.numpy(), ranks).mean()) for one in (placement, placed))
assert after < before
print(f"rank {rank} of {ranks}: {moves} experts moved; max/mean {before:.2f} at first, {after:.2f} now", flush=True)
for layer in layers:
    layer.close()
comm.close()
dist.destroy_process_group()
