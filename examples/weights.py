"""Weights from FSDP2 trainers into a rollout, after each training step, without a framework. It takes two cores.

python examples/weights.py [STEPS]: two trainer processes train a tiny Qwen3-MoE and then a tiny DeepSeek-V3
(transformers) in float32. Their shards go straight into a rollout in BF16: two ranks, in this process, which have half
of each attention (TP2) and half of the experts (EP2), in fused parameters. After each step a model that is put together
from the memory of both ranks has the logits of a plain load of the trainers' weights, bit for bit.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import torch
import transformers

import putget_transfer as pt
from putget_transfer import weights

TRAINERS, RANKS, SEED = 2, 2, 1
TOKENS = torch.tensor([[3, 17, 41, 5, 96, 2, 77, 8]])
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
}
QWEN = {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 8}
HEADS = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
DEEPSEEK = {"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
CONFIGS = {
    "Qwen3-MoE": transformers.Qwen3MoeConfig(**SIZES, **QWEN),
    "DeepSeek-V3": transformers.DeepseekV3Config(**SIZES, **DEEPSEEK, **HEADS),
}
# Layers whose outputs lie one behind the other in one parameter of the rollout.
FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "qkv_a_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
# The dimension in which rollout ranks share a layer; they have all of the others. "experts" has gate and up fused:
# [experts, 2 * intermediate, hidden].
SHARED = dict.fromkeys(("experts", "q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"), 0)
SHARED |= dict.fromkeys(("o_proj", "down_proj"), 1)


def make_model(kind: str, dtype: torch.dtype) -> Any:
    """Return a tiny model."""
    torch.manual_seed(SEED)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]).to(dtype).eval()


def make_engine() -> pt.Engine:
    """Return an engine that reaches the other processes of this host."""
    return pt.Engine.builder().group(pt.DeviceGroup.host()).build()


class TrainerProcess:
    """A trainer rank: what its process does."""

    def __init__(self, rank: int, file: str) -> None:
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh

        torch.set_num_threads(1)
        distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=TRAINERS)
        self.rank, self.group, self.engine = rank, distributed.group.WORLD, make_engine()
        self.mesh = init_device_mesh("cpu", (TRAINERS,))

    def make(self, kind: str) -> list[weights.Param]:
        """Make a sharded model, and return what rollout ranks record and plan from."""
        from torch.distributed.fsdp import fully_shard

        self.model = make_model(kind, torch.float32).train()
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        return weights.describe(self.model)

    def start(self, params: Any, slots: Any) -> None:
        """Plan; every rank makes the same schedule."""
        schedule = weights.plan(params, slots)
        self.trainer = weights.Trainer(self.engine, schedule, self.rank, self.model, self.group)

    def step(self) -> float:
        """Train one step."""
        loss = self.model(TOKENS, labels=TOKENS).loss
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return float(loss.detach())

    def full(self) -> dict[str, torch.Tensor]:
        """Return whole tensors, to compare with. Buffers are whole on each rank."""
        tensors = self.model.state_dict().items()
        return {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in tensors}

    def address(self) -> bytes:
        """Return how rollout ranks know this rank."""
        return self.trainer.address()

    def publish(self, *arguments: Any, **named: Any) -> weights.Report:
        """Write a version."""
        return self.trainer.publish(*arguments, **named)


def serve(rank: int, file: str, pipe: Any) -> None:
    """Carry out calls that come through a pipe."""
    trainer = TrainerProcess(rank, file)
    while (call := pipe.recv()) is not None:
        name, arguments, named = call
        try:
            pipe.send((True, getattr(trainer, name)(*arguments, **named)))
        except Exception as error:
            pipe.send((False, error))


class Remote:
    """A trainer rank, as the controller sees it."""

    def __init__(self, rank: int, file: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(rank, file, other), daemon=True)
        self.process.start()
        other.close()

    def begin(self, name: str, *arguments: Any, **named: Any) -> None:
        """Begin a call."""
        self.pipe.send((name, arguments, named))

    def end(self) -> Any:
        """Return a call's result."""
        done, result = self.pipe.recv()
        if not done:
            raise result
        return result

    def address(self) -> bytes:
        """Call it there."""
        self.begin("address")
        return bytes(self.end())

    def publish(self, *arguments: Any, **named: Any) -> weights.Report:
        """Call it there."""
        self.begin("publish", *arguments, **named)
        return self.end()  # type: ignore[no-any-return]


class Rank:
    """A rollout rank: its slices of layers and its experts, in fused parameters."""

    def __init__(self, rank: int, checkpoint: dict[str, torch.Tensor]) -> None:
        self.rank = rank
        shapes: dict[str, list[int]] = {}
        self.places: dict[str, tuple[str, int]] = {}
        for name, tensor in checkpoint.items():
            own, layer = self.slice(name, tensor), next(filter(FUSED.get, name.split(".")), "")
            fused = name.replace(layer, FUSED[layer]) if layer else name
            shape = shapes.setdefault(fused, [0, *own.shape[1:]])
            self.places[name] = fused, shape[0]
            shape[0] += own.shape[0]
        self.tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}

    def slice(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of a tensor."""
        dims = [SHARED[layer] for layer in name.split(".") if layer in SHARED]
        return tensor.chunk(RANKS, dims[0])[self.rank] if dims else tensor

    def place(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's part of a tensor, and the part of a fused parameter where it lies."""
        own, (fused, first) = self.slice(name, tensor), self.places[name]
        return own, self.tensors[fused].narrow(0, first, own.shape[0])

    def load_weights(self, checkpoint: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load this rank's part of a checkpoint, as engines do."""
        for name, tensor in checkpoint:
            own, there = self.place(name, tensor)
            there.copy_(own)

    def unload_weights(self, checkpoint: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write this rank's weights over its part of a checkpoint."""
        for name, tensor in checkpoint:
            own, there = self.place(name, tensor)
            own.copy_(there)


def all_call(trainers: list[Remote], name: str, *arguments: Any) -> list[Any]:
    """Call all trainers at the same time."""
    for trainer in trainers:
        trainer.begin(name, *arguments)
    return [trainer.end() for trainer in trainers]


def start(kind: str, trainers: list[Remote], models: list[Rank]) -> tuple[Any, list[weights.Rollout]]:
    """Record slots, plan, and return the schedule and the rollout ranks, which are one replica."""
    params = all_call(trainers, "make", kind)
    entries = weights.checkpoint(weights.merge(params))
    slots = [weights.record(model.tensors, entries, load=model.load_weights) for model in models]
    all_call(trainers, "start", params, slots)
    schedule = weights.plan(params, slots)
    return schedule, [weights.Rollout(make_engine(), own, schedule, rank) for rank, own in enumerate(slots)]


def follow(kind: str, trainers: list[Remote], steps: int) -> None:
    """Train, update and compare."""
    served, plain = make_model(kind, torch.bfloat16), make_model(kind, torch.bfloat16)
    models = [Rank(rank, plain.state_dict()) for rank in range(RANKS)]
    schedule, ranks = start(kind, trainers, models)
    print(schedule.show(), end="")
    controller = weights.Controller(trainers, {"rollout": ranks})
    for version in range(1, steps + 1):
        loss = all_call(trainers, "step")[0]
        controller.update(version, deadline_s=60)
        plain.load_state_dict(all_call(trainers, "full")[0])
        for order in (models, models[::-1]):  # both ranks have norms and routers; those of the last one stay
            for model in order:
                model.unload_weights(served.state_dict().items())
            with torch.no_grad():
                assert torch.equal(served(TOKENS).logits, plain(TOKENS).logits)
        print(f"{kind}, version {version}: loss {loss:.3f}, logits equal")
    for rank in ranks:
        rank.engine.close()


def main() -> None:
    """Do so with each model."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    folder = tempfile.mkdtemp()
    trainers = [Remote(rank, f"{folder}/gloo") for rank in range(TRAINERS)]
    for kind in CONFIGS:
        follow(kind, trainers, steps)
    for trainer in trainers:
        trainer.pipe.send(None)


if __name__ == "__main__":
    main()
