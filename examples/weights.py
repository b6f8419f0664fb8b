"""Weights from FSDP2 trainers into a rollout, after each training step, without a framework. It takes two cores.

python examples/weights.py [STEPS]: two trainer processes train a tiny Qwen3-MoE (transformers) in float32. Their shards
go straight into the ranks of a rollout, all in this process: the same model in BF16, and its attention fused and sliced
for two tensor-parallel ranks. After each step the model's logits equal those of a plain load of the trainers' weights,
bit for bit.
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

TRAINERS, TP, SEED = 2, 2, 1
TOKENS = torch.tensor([[3, 17, 41, 5, 96, 2, 77, 8]])
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
}


def make_model(dtype: torch.dtype) -> Any:
    """Return a tiny Qwen3-MoE."""
    torch.manual_seed(SEED)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**CONFIG)).to(dtype).eval()


def make_engine() -> pt.Engine:
    """Return an engine that reaches the other processes of this host."""
    return pt.Engine.builder().group(pt.DeviceGroup.host()).build()


class TrainerProcess:
    """A trainer rank: what its process does."""

    def __init__(self, rank: int, file: str) -> None:
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.set_num_threads(1)
        distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=TRAINERS)
        self.rank, self.group = rank, distributed.group.WORLD
        self.model = make_model(torch.float32).train()
        mesh = init_device_mesh("cpu", (TRAINERS,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def describe(self) -> list[weights.Param]:
        """Return what the rollouts' slots are recorded and planned from."""
        return weights.describe(self.model)

    def start(self, params: Any, slots: Any) -> None:
        """Plan; every rank makes the same schedule."""
        schedule = weights.plan(params, slots)
        self.trainer = weights.Trainer(make_engine(), schedule, self.rank, self.model, self.group)

    def step(self) -> float:
        """Train one step."""
        loss = self.model(TOKENS, labels=TOKENS).loss
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return float(loss)

    def full(self) -> dict[str, torch.Tensor]:
        """Return whole tensors, to compare with."""
        return {name: param.full_tensor().detach() for name, param in self.model.named_parameters()}

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


class Attention(torch.nn.Module):
    """The attention of a tensor-parallel rank: its heads, queries, keys and values in one parameter a layer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        heads = CONFIG["num_attention_heads"] + 2 * CONFIG["num_key_value_heads"]
        shape = (heads * CONFIG["head_dim"] // TP, CONFIG["hidden_size"])
        layers = range(CONFIG["num_hidden_layers"])
        self.qkv = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for _ in layers)

    def load_weights(self, checkpoint: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load what this rank has of a checkpoint, as engines do."""
        sizes = [
            CONFIG[name] * CONFIG["head_dim"] // TP for name in ("num_attention_heads", *2 * ("num_key_value_heads",))
        ]
        for name, tensor in checkpoint:
            parts = name.split(".")
            if parts[-2] in ("q_proj", "k_proj", "v_proj"):
                at = ("q_proj", "k_proj", "v_proj").index(parts[-2])
                own = self.qkv[int(parts[2])].data.narrow(0, sum(sizes[:at]), sizes[at])
                own.copy_(tensor.narrow(0, self.rank * sizes[at], sizes[at]))


def all_call(trainers: list[Remote], name: str, *arguments: Any) -> list[Any]:
    """Call all trainers at the same time."""
    for trainer in trainers:
        trainer.begin(name, *arguments)
    return [trainer.end() for trainer in trainers]


def start(trainers: list[Remote], models: list[Any]) -> tuple[Any, list[weights.Rollout]]:
    """Record slots, plan, and return the schedule and the rollout ranks. Each model is a rank of one replica."""
    params = all_call(trainers, "describe")
    entries = weights.checkpoint(weights.merge(params))
    slots = [weights.record(model, entries) for model in models]
    all_call(trainers, "start", params, slots)
    schedule = weights.plan(params, slots)
    ranks = [weights.Rollout(make_engine(), own, schedule, rank) for rank, own in enumerate(slots)]
    return schedule, ranks


def main() -> None:
    """Train, update and compare."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    folder = tempfile.mkdtemp()
    trainers = [Remote(rank, f"{folder}/gloo") for rank in range(TRAINERS)]
    whole, sliced, plain = (
        make_model(torch.bfloat16),
        [Attention(rank) for rank in range(TP)],
        make_model(torch.bfloat16),
    )
    schedule, ranks = start(trainers, [whole, *sliced])
    print(schedule.show(), end="")
    controller = weights.Controller(trainers, {"rollout": ranks})
    for version in range(1, steps + 1):
        loss = all_call(trainers, "step")[0]
        controller.update(version, deadline_s=60)
        checkpoint = all_call(trainers, "full")[0]
        plain.load_state_dict(checkpoint, strict=False)
        with torch.no_grad():
            assert torch.equal(whole(TOKENS).logits, plain(TOKENS).logits)
        for attention in sliced:
            loaded = Attention(attention.rank)
            loaded.load_weights(checkpoint.items())
            assert all(map(torch.equal, attention.qkv, loaded.qkv))
        print(f"version {version}: loss {loss:.3f}, logits equal")
    for trainer in trainers:
        trainer.pipe.send(None)


if __name__ == "__main__":
    main()
