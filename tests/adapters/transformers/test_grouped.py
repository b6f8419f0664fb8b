"""transformers' experts as grouped products: which ones are, and that a round of them is the dense layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from putget.adapters.transformers import spread, spreading
from putget.adapters.transformers.exchange import ExpertExchange
from putget.adapters.transformers.grouped import gate_of
from tests.harness import Rank, run_ranks

HIDDEN, BETWEEN, EXPERTS, TOP_K = 16, 8, 5, 2


def _default_apply_gate(experts: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    applied: Tensor = experts.act_fn(gate) * up
    return applied


class Experts(nn.Module):
    """As transformers makes them."""

    has_gate = is_concatenated = True
    has_bias = has_post_expert_norm = is_transposed = False
    _apply_gate = _default_apply_gate

    def __init__(self, act_fn: nn.Module | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.num_experts = EXPERTS
        self.act_fn = nn.SiLU() if act_fn is None else act_fn
        for name, shape in (("gate_up_proj", (2 * BETWEEN, HIDDEN)), ("down_proj", (HIDDEN, BETWEEN))):
            weight = torch.randn(EXPERTS, *shape, generator=generator).bfloat16() / 4
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    def forward(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        raise AssertionError("putget's products take its place")


class Model(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        sizes = SimpleNamespace(num_experts_per_tok=TOP_K, hidden_size=HIDDEN)
        self.config = SimpleNamespace(get_text_config=lambda: sizes)
        self.dtype = torch.bfloat16


class OtherGate(Experts):
    """With a gate of its own."""

    def _apply_gate(self, x: Tensor) -> Tensor:
        return x


def changed(**attributes: Any) -> Experts:
    experts = Experts()
    for name, value in attributes.items():
        setattr(experts, name, value)
    return experts


def test_known_experts() -> None:
    assert gate_of(Experts(), EXPERTS) == "silu"
    kind = type("GELUActivation", (nn.Module,), {})
    assert gate_of(Experts(kind()), EXPERTS) == "gelu"


@pytest.mark.parametrize(
    "experts",
    [
        None,
        changed(has_bias=True),
        changed(has_gate=False),
        changed(is_transposed=True),
        changed(is_concatenated=False),
        changed(has_post_expert_norm=True),
        changed(gate_up_proj=nn.Parameter(torch.zeros(EXPERTS, 2 * BETWEEN, HIDDEN))),  # float32
        changed(gate_up_proj=nn.Parameter(torch.zeros(EXPERTS, BETWEEN, HIDDEN, dtype=torch.bfloat16))),
        changed(down_proj=nn.Parameter(torch.zeros(EXPERTS + 1, HIDDEN, BETWEEN, dtype=torch.bfloat16))),
        OtherGate(),
        Experts(nn.ReLU()),
    ],
    ids=lambda experts: type(experts).__name__,
)
def test_others_are_left_to_transformers(experts: Any) -> None:
    assert gate_of(experts, EXPERTS) is None


def test_rows_of_other_types_are_left_to_transformers() -> None:
    exchange = ExpertExchange()
    exchange.num_local_experts = EXPERTS
    assert exchange._gate_of(Experts(), torch.zeros(1, HIDDEN, device="meta", dtype=torch.bfloat16)) == "silu"
    assert exchange._gate_of(Experts(), torch.zeros(1, HIDDEN, device="meta")) is None
    assert exchange._gate_of(Experts(), torch.zeros(1, HIDDEN, dtype=torch.bfloat16)) is None  # on a CPU


def batch(seed: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    rows = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    return rows, ids, torch.rand(tokens, TOP_K, generator=generator).bfloat16()


def play(rank: Rank) -> list[Tensor]:
    """A body: rounds of different batches, as on a GPU."""
    patch = pytest.MonkeyPatch()
    patch.setattr(spreading, "require_transformers", lambda: "5.24.0")
    patch.setattr(ExpertExchange, "_gate_of", lambda self, networks, _: gate_of(networks, self.num_local_experts))
    try:
        model = Model()
        spread_model = spread(model, rank.comm, max_tokens_per_rank=8, timeout_s=20.0)
        outputs = []
        with spread_model.together():
            for round_ in range(3):
                spread_model.begin()
                outputs.append(model.experts(*batch(7 * round_ + rank.rank, (3, 0, 8)[(round_ + rank.rank) % 3])))
                spread_model.end_pass()
        spread_model.end()
        return outputs
    finally:
        patch.undo()


def test_equals_the_dense_layer() -> None:
    experts = Experts()
    gate_up, down = experts.gate_up_proj.float(), experts.down_proj.float()
    for rank, outputs in enumerate(run_ranks(2, play)):
        for round_, got in enumerate(outputs):
            rows, ids, weights = batch(7 * round_ + rank, (3, 0, 8)[(round_ + rank) % 3])
            want = torch.zeros(len(rows), HIDDEN)
            for token in range(len(rows)):
                for expert, weight in zip(ids[token], weights[token].float(), strict=True):
                    gate, up = (gate_up[expert] @ rows[token].float()).chunk(2)
                    want[token] += weight * (down[expert] @ (silu(gate) * up))
            assert got.dtype == torch.bfloat16
            assert torch.allclose(got.float(), want, rtol=2.0**-5, atol=2.0**-6), (rank, round_)


def refused(rank: Rank) -> None:
    """A body: a round whose products fail is released, and the next one runs."""
    patch = pytest.MonkeyPatch()
    patch.setattr(spreading, "require_transformers", lambda: "5.24.0")
    patch.setattr(ExpertExchange, "_gate_of", lambda self, networks, _: gate_of(networks, self.num_local_experts))
    try:
        model = Model()
        spread_model = spread(model, rank.comm, max_tokens_per_rank=8, timeout_s=20.0)
        good = model.experts.down_proj
        with spread_model.together():
            spread_model.begin()
            with patch.context() as broken:
                broken.setattr("putget.adapters.transformers.exchange.bf16_networks", _fail)
                with pytest.raises(RuntimeError, match="no memory"):
                    model.experts(*batch(1, 3))
            assert model.experts.down_proj is good
            assert model.experts(*batch(1, 3)).shape == (3, HIDDEN)
            spread_model.end_pass()
        spread_model.end()
    finally:
        patch.undo()


def _fail(*_: Any) -> Tensor:
    raise RuntimeError("no memory")


def test_a_round_whose_products_fail_is_released() -> None:
    run_ranks(2, refused)
