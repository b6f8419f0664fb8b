"""Checks that an equal call skips: whatever has changed is still refused after a thousand equal calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import putget
from putget.looks import kinds_of, looks_of, strided_looks_of

TOKENS, HIDDEN, TOP_K = 3, 16, 2


@pytest.fixture(scope="module")
def a2a() -> Iterator[putget.AllToAll]:
    (comm,) = putget.Communicator.local(1)
    row = putget.Payload((HIDDEN,), torch.bfloat16)
    with putget.AllToAll(
        comm, num_experts=4, top_k=TOP_K, max_tokens_per_rank=4, payloads=[row], output=row, device="cpu", num_stats=2
    ) as made:
        yield made
    comm.close()


def tensors() -> dict[str, Any]:
    return {
        "topk_ids": torch.tensor([[0, 1], [2, -1], [3, 0]], dtype=torch.int32),
        "topk_weights": torch.rand(TOKENS, TOP_K),
        "rows": torch.randn(TOKENS, HIDDEN).bfloat16(),
        "num_valid_tokens": torch.tensor(3, dtype=torch.int32),
        "expert_load": torch.zeros(4, dtype=torch.int32),
        "stats": torch.zeros(2, dtype=torch.int32),
    }


def play(a2a: putget.AllToAll, given: dict[str, Any], max_rows: Any = None, x: Any = None, out: Any = None) -> Any:
    beside = {name: given[name] for name in ("num_valid_tokens", "expert_load", "stats")}
    received = a2a.dispatch(given["topk_ids"], given["topk_weights"], given["rows"], max_rows=max_rows, **beside)
    a2a.combine_input.copy_(received.payloads[0])
    return a2a.combine(x, out=out)


def in_place(change: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same object, whose tensor is another one behind."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        change(tensor)
        return tensor

    return changed


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "no tensor": lambda t: t.tolist(),
    "dtype": lambda t: t.double(),
    "device": lambda t: t.to("meta"),
    "a dimension more": lambda t: t[None],
    "strides": lambda t: torch.stack([t, t], -1)[..., 0],
    "resized in place": in_place(lambda t: t.resize_(t.numel() + 1)),
    "data of another tensor": in_place(lambda t: t.set_(t.new_zeros(5, 7))),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", sorted(tensors()))
def test_a_changed_tensor_is_refused(name: str, change: str, a2a: putget.AllToAll) -> None:
    given = tensors()
    for _ in range(100):
        play(a2a, given)
    kept = given[name].clone()
    if change == "strides" and kept.dim() == 0:
        pytest.skip("a tensor of one element is contiguous")
    if (name, change) == ("num_valid_tokens", "a dimension more"):
        pytest.skip("one element in any shape")
    if (name, change) == ("topk_ids", "dtype"):
        given[name] = given[name].short()
    else:
        given[name] = CHANGES[change](given[name])
    with pytest.raises(ValueError, match=r"payloads\[0\]" if name == "rows" else name):
        play(a2a, given)
    given[name] = kept
    play(a2a, given)


def test_after_a_thousand_equal_calls(a2a: putget.AllToAll) -> None:
    given = tensors()
    first = play(a2a, given)
    for _ in range(1000):
        assert torch.equal(play(a2a, given), first)
    with pytest.raises(ValueError, match="max_rows is 9"):
        play(a2a, given, max_rows=9)
    with pytest.raises(ValueError, match="payloads: 0 came"):
        a2a.dispatch(given["topk_ids"], given["topk_weights"])
    with pytest.raises(ValueError, match=r"topk_ids has 5 tokens"):
        a2a.dispatch(given["topk_ids"].new_zeros(5, TOP_K), given["topk_weights"], given["rows"])
    inside = a2a.combine_input[0, :TOKENS]
    with pytest.raises(ValueError, match=r"payloads\[0\] lies in the workspace"):
        a2a.dispatch(given["topk_ids"], given["topk_weights"], inside)
    assert torch.equal(play(a2a, given), first)


def test_fewer_tokens_and_more_are_no_equal_call(a2a: putget.AllToAll) -> None:
    given = tensors()
    for count in (3, 1, 0, 2, 3):
        part = {**given, **{name: given[name][:count] for name in ("topk_ids", "topk_weights", "rows")}}
        part["topk_ids"] = part["topk_ids"].long() if count == 2 else part["topk_ids"]
        combined = play(a2a, part)
        chosen = (part["topk_ids"] >= 0).any(1, keepdim=True)
        assert combined.shape == (count, HIDDEN)
        assert torch.equal(combined, torch.where(chosen, part["rows"], 0))


@pytest.mark.parametrize("wrong", ["short", "float32", "strided rows", "meta", "no tensor"])
def test_changed_rows_for_combine_are_refused(wrong: str, a2a: putget.AllToAll) -> None:
    given, capacity = tensors(), 4
    rows = torch.randn(1, capacity, HIDDEN).bfloat16()
    for _ in range(100):
        play(a2a, given, x=rows)
    changed: dict[str, Any] = {
        "short": rows[:, :-1].contiguous(),
        "float32": rows.float(),
        "strided rows": torch.stack([rows, rows], -1)[..., 0],
        "meta": rows.to("meta"),
        "no tensor": rows.tolist(),
    }
    a2a.dispatch(*(given[name] for name in ("topk_ids", "topk_weights", "rows")))
    with pytest.raises(ValueError, match=r"^x "):
        a2a.combine(changed[wrong])
    a2a.combine(torch.stack([rows, rows], 2)[:, :, 0])  # other strides of the first dimensions are taken


def test_looks() -> None:
    one, other = torch.zeros(3, 4), torch.zeros(3, 4)
    assert looks_of([one]) == looks_of([other]) != looks_of([one.t()])
    assert looks_of([one, 3]) is None
    assert kinds_of(["ids"]) is None
    assert strided_looks_of(None) is None
    assert kinds_of([one]) == kinds_of([one[:2]]) != kinds_of([one[:, :2]])
    assert looks_of([torch.nn.Parameter(one)]) != looks_of([one])
    assert strided_looks_of(one[:, :2]) != strided_looks_of(one[:, :2].contiguous())
