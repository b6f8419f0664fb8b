"""A small mixture-of-experts model: as trainers have it, and as an engine has it, fused and sliced for its rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch

HIDDEN, HEADS, HEAD, KV_HEADS, INTER, EXPERTS, VOCAB, LAYERS = 64, 4, 16, 2, 96, 4, 40, 2


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the checkpoint's names and shapes."""
    found: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN), "head.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        found[at + "q.weight"] = (HEADS * HEAD, HIDDEN)
        found[at + "k.weight"] = (KV_HEADS * HEAD, HIDDEN)
        found[at + "v.weight"] = (KV_HEADS * HEAD, HIDDEN)
        found[at + "o.weight"] = (HIDDEN, HEADS * HEAD)
        found[at + "norm.weight"] = (HIDDEN,)
        found[at + "router.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            found[f"{at}experts.{expert}.gate.weight"] = (INTER, HIDDEN)
            found[f"{at}experts.{expert}.up.weight"] = (INTER, HIDDEN)
            found[f"{at}experts.{expert}.down.weight"] = (HIDDEN, INTER)
    return found


def values(version: int) -> dict[str, torch.Tensor]:
    """Return a version of the checkpoint."""
    made = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=made) for name, shape in shapes().items()}


class Source(torch.nn.Module):
    """The trainers' model: parameters by the checkpoint's names."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in shapes().items():
            module: torch.nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            setattr(module, last, torch.nn.Parameter(torch.zeros(shape)))

    def set(self, version: int) -> None:
        """Take the values of a version: whole tensors, or the part of DTensors that this rank holds."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        wanted = values(version)
        for name, param in self.named_parameters():
            with torch.no_grad():
                if isinstance(param, DTensor):
                    part = distribute_tensor(wanted[name], param.device_mesh, param.placements, src_data_rank=None)
                    param.to_local().copy_(part.to_local())
                else:
                    param.copy_(wanted[name])


class Engine(torch.nn.Module):
    """The rollout's model on one tensor-parallel rank: QKV, gate and up, and experts are fused, in BF16."""

    def __init__(self, tp: int, rank: int) -> None:
        super().__init__()
        self.tp, self.rank = tp, rank
        make = lambda *shape: torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))  # noqa: E731
        self.embed, self.head = make(VOCAB // tp, HIDDEN), make(VOCAB // tp, HIDDEN)
        self.qkv = torch.nn.ParameterList(make((HEADS + 2 * KV_HEADS) * HEAD // tp, HIDDEN) for _ in range(LAYERS))
        self.o = torch.nn.ParameterList(make(HIDDEN, HEADS * HEAD // tp) for _ in range(LAYERS))
        self.norm = torch.nn.ParameterList(make(HIDDEN) for _ in range(LAYERS))
        self.router = torch.nn.ParameterList(make(EXPERTS, HIDDEN) for _ in range(LAYERS))
        self.w13 = torch.nn.ParameterList(make(EXPERTS, 2 * INTER // tp, HIDDEN) for _ in range(LAYERS))
        self.w2 = torch.nn.ParameterList(make(EXPERTS, HIDDEN, INTER // tp) for _ in range(LAYERS))

    def _sliced(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        size = tensor.shape[dim] // self.tp
        return tensor.narrow(dim, self.rank * size, size)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a checkpoint."""
        for name, tensor in weights:
            parts = name.split(".")
            if parts[0] in ("embed", "head"):
                getattr(self, parts[0]).data.copy_(self._sliced(tensor, 0))
                continue
            layer, kind = int(parts[1]), parts[2]
            if kind in "qkv":
                sizes = [HEADS * HEAD // self.tp, KV_HEADS * HEAD // self.tp, KV_HEADS * HEAD // self.tp]
                at = "qkv".index(kind)
                self.qkv[layer].data.narrow(0, sum(sizes[:at]), sizes[at]).copy_(self._sliced(tensor, 0))
            elif kind == "o":
                self.o[layer].data.copy_(self._sliced(tensor, 1))
            elif kind in ("norm", "router"):
                getattr(self, kind)[layer].data.copy_(tensor)
            elif parts[4] == "down":
                self.w2[layer].data[int(parts[3])].copy_(self._sliced(tensor, 1))
            else:
                half = INTER // self.tp
                first = 0 if parts[4] == "gate" else half
                self.w13[layer].data[int(parts[3])][first : first + half] = self._sliced(tensor, 0)


def loaded(version: int, tp: int, rank: int) -> dict[str, torch.Tensor]:
    """Return what a plain load of a version makes."""
    engine = Engine(tp, rank)
    engine.load_weights(values(version).items())
    return {name: tensor.detach() for name, tensor in engine.named_parameters()}


def version_of(engine: Engine, versions: Iterable[int]) -> list[int]:
    """Return the versions that an engine's weights are equal to, byte for byte."""
    own = dict(engine.named_parameters())
    equal = []
    for version in versions:
        wanted = loaded(version, engine.tp, engine.rank) if version else None
        same = all(torch.equal(own[name], wanted[name] if wanted else torch.zeros_like(own[name])) for name in own)
        equal += [version] if same else []
    return equal
