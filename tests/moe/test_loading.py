"""Weights of a dense layer: from BF16 and FP8 checkpoints into BF16 and FP8 experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import putget
from putget.moe import ExpertParallelMoE, grouped_fp8
from putget.moe.experts import Bf16Experts, Fp8Experts
from putget.moe.loading import DenseState, load_networks, load_router
from putget.moe.router import Router
from tests.moe.dense import Dense

DENSE = Dense(hidden=256, intermediate=128, num_experts=3)
NAMES = ["experts.2", "experts.0"]


def quantised(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same as an FP8 checkpoint."""
    found = {}
    for name, tensor in state.items():
        if name.startswith("gate."):
            found[name] = tensor
        else:
            found[name], found[f"{name}_scale_inv"] = grouped_fp8.quantise_blocks(tensor)
    return found


def make(kind: type[Bf16Experts] | type[Fp8Experts]) -> Bf16Experts | Fp8Experts:
    return kind(2, DENSE.hidden, DENSE.intermediate, "silu", torch.device("cpu"))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def test_bf16_to_bf16() -> None:
    state, experts = DENSE.state(), make(Bf16Experts)
    load_networks(experts, NAMES, DenseState({f"m.{name}": tensor for name, tensor in state.items()}, "m."))
    assert torch.equal(experts.gate_up[0, :128], state["experts.2.gate_proj.weight"])
    assert torch.equal(experts.gate_up[0, 128:], state["experts.2.up_proj.weight"])
    assert torch.equal(experts.down[1], state["experts.0.down_proj.weight"])


def test_fp8_is_taken_as_it_is() -> None:
    state, experts = quantised(DENSE.state()), make(Fp8Experts)
    assert isinstance(experts, Fp8Experts)
    load_networks(experts, NAMES, DenseState(state))
    assert torch.equal(as_bytes(experts.gate_up[0, 128:]), as_bytes(state["experts.2.up_proj.weight"]))
    assert torch.equal(experts.gate_up_scales[0, :1], state["experts.2.gate_proj.weight_scale_inv"])
    assert torch.equal(experts.gate_up_scales[0, 1:], state["experts.2.up_proj.weight_scale_inv"])
    assert torch.equal(as_bytes(experts.down[1]), as_bytes(state["experts.0.down_proj.weight"]))
    assert torch.equal(experts.down_scales[1], state["experts.0.down_proj.weight_scale_inv"])


def test_bf16_to_fp8_is_quantised() -> None:
    experts, direct = make(Fp8Experts), make(Fp8Experts)
    load_networks(experts, NAMES, DenseState(DENSE.state()))
    load_networks(direct, NAMES, DenseState(quantised(DENSE.state())))
    for ours, theirs in zip(experts.parameters(), direct.parameters(), strict=True):
        assert torch.equal(as_bytes(ours), as_bytes(theirs))


def test_fp8_to_bf16_is_dequantised() -> None:
    state, experts = quantised(DENSE.state()), make(Bf16Experts)
    load_networks(experts, NAMES, DenseState(state))
    name = "experts.2.gate_proj.weight"
    want = grouped_fp8.dequantise_blocks(state[name], state[f"{name}_scale_inv"])
    assert torch.equal(experts.gate_up[0, :128], want.bfloat16())


def test_what_is_missing_is_named_before_anything_changes() -> None:
    experts = make(Bf16Experts)
    state = DENSE.state()
    del state["experts.0.down_proj.weight"]
    with pytest.raises(ValueError, match=r"state has no experts\.0\.down_proj\.weight"):
        load_networks(experts, NAMES, DenseState(state))
    assert not experts.gate_up.any()
    state = DENSE.state()
    state["experts.2.up_proj.weight"] = state["experts.2.up_proj.weight"][1:]
    with pytest.raises(ValueError, match=r"experts\.2\.up_proj\.weight has shape \[127, 256\], expected \[128, 256\]"):
        load_networks(experts, NAMES, DenseState(state))
    state = DENSE.state()
    state["experts.2.up_proj.weight"] = state["experts.2.up_proj.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"experts\.2: weights are .* expected one kind"):
        load_networks(experts, NAMES, DenseState(state))
    state = quantised(DENSE.state())
    del state["experts.2.up_proj.weight_scale_inv"]
    with pytest.raises(ValueError, match=r"state has no experts\.2\.up_proj\.weight_scale_inv"):
        load_networks(make(Fp8Experts), NAMES, DenseState(state))


@pytest.mark.parametrize("missing", ["gate.weight", "experts.1.up_proj.weight", "shared_experts.down_proj.weight"])
def test_a_layer_with_a_missing_tensor_stays_as_it_is(missing: str) -> None:
    one, other = (Dense(64, 32, num_experts=2, shared=32, seed=seed).state() for seed in (1, 2))
    sizes = {"hidden_size": 64, "intermediate_size": 32, "shared_intermediate_size": 32, "max_tokens_per_rank": 4}
    (comm,) = putget.Communicator.local(1)
    with comm, ExpertParallelMoE.from_dense(comm, one, **sizes, num_experts=2, top_k=1, device="cpu") as layer:
        before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        del other[missing]
        with pytest.raises(ValueError, match=f"state has no {missing}"):
            layer.load_dense(other)
        assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_router() -> None:
    dense = Dense(groups=(2, 1))
    router = Router(dense.hidden, dense.num_experts, 2, bias=True)
    with pytest.raises(ValueError, match=r"state has no gate\.e_score_correction_bias"):
        load_router(router, DenseState(Dense().state()))
    load_router(router, DenseState(dense.state()))
    assert torch.equal(router.weight, dense.state()["gate.weight"].float())
    assert router.correction_bias is not None
    assert torch.equal(router.correction_bias, dense.state()["gate.e_score_correction_bias"])
