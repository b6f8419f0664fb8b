"""``spread`` without transformers: a stand-in for a model, whose layers are as transformers has them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import putget
from putget.adapters.transformers import exchange, spread, spreading
from tests.harness import Rank, run_ranks

HIDDEN, TOP_K = 4, 2


class Experts(nn.Module):
    """Expert e multiplies by its weight: e + 1."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.gate_up_proj = nn.Parameter(torch.arange(1.0, count + 1).view(-1, 1, 1).repeat(1, 2, HIDDEN))
        self.down_proj = nn.Parameter(torch.zeros(count, HIDDEN, 1))

    def forward(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        factors = torch.cat([self.gate_up_proj[:, 0, 0], torch.zeros(1)])  # the last one stands for "none of these"
        return rows * (factors[ids] * weights).sum(1, keepdim=True)


class Model(nn.Module):
    """Layers of experts behind one router."""

    def __init__(self, layers: int = 2, experts: int = 5, top_k: int = TOP_K) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(experts) for _ in range(layers))
        sizes = SimpleNamespace(num_experts_per_tok=top_k, hidden_size=HIDDEN)
        self.config = SimpleNamespace(get_text_config=lambda: sizes)
        self.dtype = torch.float32
        self.requires_grad_(False)

    def forward(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows, ids, weights)
        return rows


def batch(seed: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(5, generator=generator)[:TOP_K] for _ in range(tokens)])
    return torch.randn(tokens, HIDDEN, generator=generator), ids, torch.rand(tokens, TOP_K, generator=generator)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spreading, "require_transformers", lambda: "5.24.0")


def made(rank: Rank, model: Any, **options: Any) -> Any:
    """A body's spread model; transformers is not here."""
    spreading.require_transformers = lambda: "5.24.0"
    return spread(model, rank.comm, **{"max_tokens_per_rank": 8, "timeout_s": 20.0, "setup_timeout_s": 20.0, **options})


def run_own_passes(rank: Rank) -> list[int]:
    """A body: rank r runs r passes, of other batches than the others, and takes part in all."""
    dense, model = Model(), Model()
    found = made(rank, model, check_layers=True)
    with found.together():
        for number in range(rank.rank):
            args = batch(10 * rank.rank + number, number + 1)
            torch.testing.assert_close(model(*args), dense(*args))
    counts = [found.lockstep.number, found.lockstep.idle_passes, model.layers[0].num_experts]
    assert model.layers[0].gate_up_proj.shape[0] == counts[2]
    found.end()
    return counts


def test_ranks_with_passes_of_their_own_get_what_one_process_gets() -> None:
    """Five experts on three ranks: two, two, one."""
    assert run_ranks(3, run_own_passes) == [[2, 2, 2], [2, 1, 2], [2, 0, 1]]


def run_too_many(rank: Rank) -> None:
    """A body: more tokens than there is room for, said before anything has happened."""
    model = Model()
    found = made(rank, model)
    with found.together():
        with pytest.raises(ValueError, match="a rank sends 9 tokens, the workspace is for 8: call spread"):
            model.layers[0](*batch(1, 9))
        with pytest.raises(ValueError, match="no gradients"):
            model.layers[0](batch(1, 1)[0].requires_grad_(), *batch(1, 1)[1:])
    found.end()


def test_more_tokens_than_there_is_room_for_are_refused() -> None:
    run_ranks(2, run_too_many)


def fail_in_passes(rank: Rank) -> int:
    """A body: passes of rank 1 that fail, in their first layer and between two; ranks' passes stay in step."""
    dense, model = Model(layers=3), Model(layers=3)
    found = made(rank, model, check_layers=True)
    with found.together():
        if rank.rank == 1:
            with pytest.raises(ValueError, match="a rank sends 9 tokens"):
                model(*batch(1, 9))
            rows, ids, weights = batch(1, 2)
            hook = model.layers[2].register_forward_pre_hook(lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                model(rows, ids, weights)
            hook.remove()
            torch.testing.assert_close(model(*batch(1, 3)), dense(*batch(1, 3)))
    passes = found.lockstep.number
    found.end()
    return int(passes)


def test_a_pass_that_fails_on_a_rank_is_not_waited_for() -> None:
    assert run_ranks(2, fail_in_passes) == [3, 3]


def interrupt_a_pass(rank: Rank, by: type[BaseException]) -> list[Any]:
    """A body: a signal's handler raises on rank 1 between two rounds of pass 1; rank 0 asks for pass 2 behind that."""

    def handle(*_: Any) -> None:
        raise by("a signal")

    dense, model = Model(layers=3), Model(layers=3)
    found = made(rank, model, timeout_s=60.0, setup_timeout_s=60.0)
    before = signal.signal(signal.SIGUSR1, handle)
    heard = ""
    try:
        with found.together():
            if rank.rank == 1:
                model.layers[2].register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGUSR1))
            torch.testing.assert_close(model(*batch(rank.rank, 2)), dense(*batch(rank.rank, 2)))
            with pytest.raises(putget.PeerLeft):
                wait_on(found)
            model(*batch(2, 2))
    except (by, putget.PeerLeft) as error:
        heard = type(error).__name__
    finally:
        signal.signal(signal.SIGUSR1, before)
    passes = found.lockstep.number
    found.end()
    return [heard, passes]


@pytest.mark.parametrize("by", [KeyboardInterrupt, SystemExit])
def test_a_pass_that_a_signal_ends_is_not_waited_for(by: type[BaseException]) -> None:
    """The other rank has its result, and hears between two passes that the interrupted one has left."""
    assert run_ranks(2, interrupt_a_pass, by, timeout=120) == [["PeerLeft", 1], [by.__name__, 1]]


def test_a_round_that_a_signal_ends_is_not_run_again() -> None:
    """The rank waits for nobody: others that are in the round have no answer for it."""

    def handle(*_: Any) -> None:
        raise KeyboardInterrupt

    (comm,) = putget.Communicator.local(1)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with comm:
            model = Model(layers=2)
            found = spread(model, comm, max_tokens_per_rank=8)
            model.layers[1].forward.experts_forward = lambda *_: signal.raise_signal(signal.SIGUSR1)
            with found.together(), pytest.raises(KeyboardInterrupt):
                model(*batch(1, 2))
            assert found.lockstep.number == 0
            found.end()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_forked_child_that_ends_in_a_forward_leaves_the_pass_alone(caplog: pytest.LogCaptureFixture) -> None:
    (comm,) = putget.Communicator.local(1)
    children: list[int] = []

    def fork(*_: Any) -> None:
        children.append(os.fork())
        if children == [0]:
            raise SystemExit

    with comm:
        model, dense = Model(layers=2), Model(layers=2)
        found = spread(model, comm, max_tokens_per_rank=8)
        model.layers[1].register_forward_pre_hook(fork)
        try:
            with found.together():
                got = model(*batch(1, 2))
        finally:
            if children == [0]:
                os._exit(len(caplog.records))
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
        torch.testing.assert_close(got, dense(*batch(1, 2)))
        found.end()


def wait_on(found: Any) -> None:
    while True:
        found.wait(None, 60.0)


def leave(rank: Rank, error: type[BaseException]) -> str:
    """A body: rank 1 leaves by an error, rank 2 has a pass behind that, rank 0 none; then all go on together."""
    dense, model = Model(), Model()
    found = made(rank, model, check_layers=True, setup_timeout_s=60.0)
    heard = ""
    try:
        with found.together():
            if rank.rank == 1:
                raise error("a caller's own")
            if rank.rank == 2:
                with pytest.raises(putget.PeerLeft):
                    wait_on(found)
                model(*batch(2, 2))
    except (KeyError, asyncio.CancelledError, putget.PeerLeft) as found_error:
        heard = type(found_error).__name__ if rank.rank == 1 else str(found_error)
    rank.comm.exchange("again", None, 60.0)
    with found.together():
        assert torch.allclose(model(*batch(rank.rank, 3)), dense(*batch(rank.rank, 3)))
    found.end()
    return heard


@pytest.mark.parametrize("error", [KeyError, asyncio.CancelledError])
def test_a_rank_that_leaves_by_an_error_is_not_waited_for(error: type[BaseException]) -> None:
    """The idle rank returns, the one with a pass raises, and a later ``together`` works."""
    told = "rank 1 has left Spread.together: it raised an error inside; call it again on all ranks"
    assert run_ranks(3, leave, error) == ["", error.__name__, told]


def fail_in_experts(rank: Rank) -> None:
    """A body: experts of rank 1 fail behind a dispatch, so that its pass cannot be ended; its own error comes."""
    model = Model(layers=2)
    found = made(rank, model, timeout_s=8.0)
    with contextlib.suppress(putget.PutgetError), found.together():
        if rank.rank == 1:
            model.layers[1].forward.experts_forward = lambda *_: 1 // 0
            with pytest.raises(ZeroDivisionError):
                model(*batch(1, 2))
        else:
            model(*batch(0, 2))
    found.end()


@pytest.mark.timed
def test_an_error_of_experts_is_the_one_that_comes() -> None:
    run_ranks(2, fail_in_experts, timeout=60)


def in_other_layers(rank: Rank) -> str:
    """A body: rank 1 leaves layer 0 out."""
    model = Model()
    found = made(rank, model, check_layers=True)
    with pytest.raises(putget.ProtocolMisuse) as caught:
        model.layers[rank.rank](*batch(1, 1))
    found.lockstep.close()
    return str(caught.value)


def test_ranks_in_different_layers_are_told_both() -> None:
    zero, one = run_ranks(2, in_other_layers)
    assert zero == "rank 0 is in layer 0, rank 1 in layer 1"
    assert one == "rank 1 is in layer 1, rank 0 in layer 0"


def spread_unequal(rank: Rank, what: str) -> str:
    """A body: rank 1 has another model, or says another number."""
    model = Model(experts=5 + (what == "experts") * rank.rank, layers=2 + (what == "layers") * rank.rank)
    if what == "weights" and rank.rank == 1:
        model.layers[1].down_proj += 1
    with pytest.raises(ValueError, match="differs between ranks") as caught:
        made(rank, model, max_tokens_per_rank=8 + (what == "tokens") * rank.rank)
    assert model.layers[0].gate_up_proj.shape[0] == model.layers[0].num_experts >= 5
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "named"),
    [("experts", "expert layers"), ("layers", "expert layers"), ("weights", "weights"), ("tokens", "max_tokens_per")],
)
def test_models_that_differ_are_refused_on_all_ranks(what: str, named: str) -> None:
    for text in run_ranks(2, spread_unequal, what):
        assert named in text


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (nn.Linear(2, 2), {}, "Linear has no experts"),
        (Model(), {"max_tokens_per_rank": 0}, "max_tokens_per_rank is 0"),
        (Model(experts=0), {}, "layers.0 has 0 experts, expected at least one for each of 1 ranks"),
        (Model(top_k=None), {}, "SimpleNamespace has no num_experts_per_tok"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_spread_is_refused(model: Any, options: dict[str, Any], text: str) -> None:
    (comm,) = putget.Communicator.local(1)
    with comm, pytest.raises(ValueError, match=text):
        spread(model, comm, **options)


def test_a_model_is_spread_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "require_transformers", lambda: "5.24.0")
    (comm,) = putget.Communicator.local(1)
    model = Model()
    with comm:
        found = spread(model, comm)
        with pytest.raises(ValueError, match=r"layers.0 is spread already"):
            spread(model, comm)
        found.end()


def modes(rank: Rank) -> None:
    """A body: the first round in inference mode, the next outside of it; and weights that ask for gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spreading, "require_transformers", lambda: "5.24.0")
        model = Model()
        spread_model = spread(model, rank.comm, max_tokens_per_rank=8, timeout_s=20.0)
        with spread_model.together():
            with torch.inference_mode():
                want = model(*batch(rank.rank, 3))
            with torch.no_grad():
                got = model(*batch(rank.rank, 3))
            assert torch.equal(got, want)
            model.layers[0].gate_up_proj.requires_grad_(True)
            with pytest.raises(ValueError, match="experts' weights require gradients"):
                model.layers[0](*batch(rank.rank, 3))
            model.layers[0].gate_up_proj.requires_grad_(False)
            assert torch.equal(model(*batch(rank.rank, 3)), want)
        spread_model.end()


def test_inference_mode_and_back_and_no_gradients() -> None:
    run_ranks(2, modes)
