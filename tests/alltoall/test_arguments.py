"""Wrong arguments: a ValueError that names the argument, and no effect on any rank.

Every wrong call is made by rank 0 alone, in the middle of a round in which the other ranks do nothing wrong; it must
then come out right on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import putget
from putget.tuning import Launch, Tuning
from tests.harness import Rank, run_ranks
from tests.harness.cases import Case, Round
from tests.harness.compare import Outcome, check_round, play_round

CASE = Case(
    2,
    (Round(1, (3, 5), ending="flat"),),
    num_experts=5,
    top_k=3,
    payloads=(((6,), torch.float32), ((2, 2), torch.bfloat16)),
    output=((6,), torch.bfloat16),
)

# Objects that a caller may confuse with a tensor.
NOT_TENSORS = [None, 3, [[1, 2, 3]], "ids", (1,)]


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor on a device that no rank of the test uses."""
    return tensor.to("meta")


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Equal values, not contiguous."""
    wide = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
    wide[..., ::2] = tensor
    return wide[..., ::2]


# How a matrix of the right kind becomes a wrong one.
TENSOR_MUTATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "one dimension less": lambda t: t[0],
    "one dimension more": lambda t: t[None],
    "one column less": lambda t: t[:, :-1].contiguous(),
    "one column more": lambda t: torch.cat([t, t[:, :1]], dim=1),
    "one row less": lambda t: t[:-1],
    "one row more": lambda t: torch.cat([t, t[:1]]),
    "more rows than the capacity": lambda t: t[:1].expand(99, *t.shape[1:]).contiguous(),
    "flattened": lambda t: t.flatten(),
    "strided": strided,
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "float64": lambda t: t.double(),
    "int16": lambda t: t.short(),
    "uint8": lambda t: t.to(torch.uint8),
    "bool": lambda t: t.bool(),
    "other device": elsewhere,
    "sparse": lambda t: t.to_sparse(),
    "numpy": lambda t: t.float().cpu().numpy(),
    "list": lambda t: t.tolist(),
}


def right_call(rank: Rank) -> dict[str, Any]:
    sent = CASE.sent(0, rank.rank)
    arguments: dict[str, Any] = {"topk_ids": sent.topk_ids, "topk_weights": sent.topk_weights}
    arguments.update({f"payload {i}": rows for i, rows in enumerate(sent.payloads)})
    arguments = {name: value.to(rank.device) for name, value in arguments.items()}
    return {**arguments, "max_rows": None, "num_valid_tokens": None, "busiest_tokens": None}


def dispatch(a2a: putget.AllToAll, arguments: dict[str, Any]) -> None:
    options = dict(arguments)
    ids, weights = options.pop("topk_ids"), options.pop("topk_weights")
    payloads = [options.pop(name) for name in sorted(options) if name.startswith("payload")]
    a2a.dispatch(ids, weights, *payloads, **options)


def dispatch_mutations(rank: Rank) -> dict[str, tuple[str, Any]]:
    """Description to (argument, wrong value), for dispatch."""
    right = right_call(rank)
    wrong: dict[str, tuple[str, Any]] = {}
    for name in ("topk_ids", "topk_weights", "payload 0", "payload 1"):
        for how, mutate in TENSOR_MUTATIONS.items():
            # A row count that only topk_ids has wrong is a mistake in all the others.
            if not (name == "topk_ids" and how in ("one row less", "one row more")):
                wrong[f"{name}: {how}"] = name, mutate(right[name])
        for value in NOT_TENSORS:
            wrong[f"{name}: {value!r}"] = name, value
    for value in (0, -1, 9, 2**40, 2.0, "3", True, torch.tensor(3)):
        wrong[f"max_rows: {value!r}"] = "max_rows", value
        if value != 0:  # nobody has tokens
            wrong[f"busiest_tokens: {value!r}"] = "busiest_tokens", value
    one = torch.tensor([2], dtype=torch.int32, device=rank.device)
    for number, value in enumerate((2, one.long(), one.float(), one.repeat(2), one[:0], elsewhere(one), [2], "2")):
        wrong[f"num_valid_tokens: wrong value {number}"] = "num_valid_tokens", value  # the same name on every device
    return wrong


def combine_mutations(rank: Rank) -> dict[str, tuple[str, Any]]:
    """Description to (argument, wrong value), for combine."""
    flat = torch.zeros(16, 6, dtype=torch.bfloat16, device=rank.device)
    rows = torch.zeros(2, 8, 6, dtype=torch.bfloat16, device=rank.device)
    out = torch.zeros(3, 6, dtype=torch.bfloat16, device=rank.device)
    wrong: dict[str, tuple[str, Any]] = {}
    for how, value in {
        "one row less": flat[:-1],
        "one row more": torch.cat([flat, flat[:1]]),
        "one column less": flat[:, :-1].contiguous(),
        "float32": flat.float(),
        "flat but strided": strided(flat),
        "other device": elsewhere(flat),
        "one source less": rows[:1],
        "one slot less": rows[:, :-1],
        "slots and sources swapped": rows.transpose(0, 1),
        "rows strided inside": strided(rows),
        "four dimensions": rows[None],
        "one dimension": flat.flatten(),
        "list": flat.tolist(),
    }.items():
        wrong[f"x: {how}"] = "x", value
    for name in ("out", "addend"):
        for how, value in {
            "one row less": out[:-1],
            "one row more": torch.cat([out, out[:1]]),
            "one column less": out[:, :-1].contiguous(),
            "float64": out.double(),
            "strided": strided(out),
            "other device": elsewhere(out),
            "flattened": out.flatten(),
            "number": 1.0,
        }.items():
            wrong[f"{name}: {how}"] = name, value
    return wrong


def attempt(call: Callable[[], Any]) -> str:
    """The answer of the call: the text of its ValueError, or the other event."""
    try:
        call()
    except ValueError as error:
        return "ValueError: " + str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def dispatch_wrongly(rank: Rank, chosen: list[list[str]] | None) -> tuple[dict[str, str], list[Outcome]]:
    """A body: rank 0 makes each wrong call, then all ranks a right round."""
    said, outcomes = {}, []
    with rank.all_to_all(**CASE.options()) as a2a:
        mutations = dispatch_mutations(rank)
        for names in [[name] for name in mutations] if chosen is None else chosen:
            if rank.rank == 0:
                arguments = {**right_call(rank), **dict(mutations[name] for name in names)}
                said[", ".join(names)] = attempt(lambda arguments=arguments: dispatch(a2a, arguments))  # type: ignore[misc]
            outcomes.append(play_round(a2a, rank, CASE, 0))
    return said, outcomes


def check_rounds(results: list[tuple[dict[str, str], list[Outcome]]]) -> None:
    for outcomes in zip(*[outcomes for _, outcomes in results], strict=True):
        check_round(CASE, 0, dict(enumerate(outcomes)))


def spoken(name: str) -> list[str]:
    """The ways to name an argument."""
    return [name, name.replace(" ", "s[") + "]", name.replace(" ", "["), name.replace(" ", "_")]


def test_dispatch_refuses_every_wrong_argument(device: str) -> None:
    results = run_ranks(2, dispatch_wrongly, None, mode="thread", device=device)
    wrong = {}
    for what, said in results[0][0].items():
        argument = what.split(":")[0]
        if not said.startswith("ValueError") or not any(name in said for name in spoken(argument)):
            wrong[what] = said
    assert not wrong
    check_rounds(results)


MUTATION_NAMES = sorted(dispatch_mutations(Rank(0, 2, torch.device("cpu"))))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chosen=st.lists(
        st.lists(st.sampled_from(MUTATION_NAMES), min_size=2, max_size=4, unique_by=lambda name: name.split(":")[0]),
        min_size=1,
        max_size=4,
    )
)
def test_dispatch_refuses_several_wrong_arguments_at_once(chosen: list[list[str]], device: str) -> None:
    results = run_ranks(2, dispatch_wrongly, chosen, mode="thread", device=device)
    for what, said in results[0][0].items():
        assert said.startswith("ValueError"), what
    check_rounds(results)


def dispatch_wrong_counts(rank: Rank) -> tuple[dict[str, str], list[Outcome]]:
    said, outcomes = {}, []
    right = right_call(rank)
    ids, weights, first, second = right["topk_ids"], right["topk_weights"], right["payload 0"], right["payload 1"]
    calls: dict[str, tuple[Any, ...]] = {
        "no payload": (ids, weights),
        "one payload less": (ids, weights, first),
        "one payload more": (ids, weights, first, second, second),
        "payloads swapped": (ids, weights, second, first),
        "ids and weights swapped": (weights, ids, first, second),
    }
    with rank.all_to_all(**CASE.options()) as a2a:
        for name, arguments in calls.items():
            if rank.rank == 0:
                said[name] = attempt(lambda arguments=arguments: a2a.dispatch(*arguments))  # type: ignore[misc]
            outcomes.append(play_round(a2a, rank, CASE, 0))
    return said, outcomes


def test_dispatch_refuses_a_wrong_number_of_payloads(device: str) -> None:
    results = run_ranks(2, dispatch_wrong_counts, mode="thread", device=device)
    assert len(results[0][0]) == 5
    for what, said in results[0][0].items():
        assert said.startswith("ValueError"), what
        assert "payload" in said or "topk_ids" in said, (what, said)
    check_rounds(results)


def combine_wrongly(rank: Rank) -> tuple[dict[str, str], list[Outcome]]:
    """A body: rank 0 makes each wrong combine inside a round that all ranks then end with a right one."""
    said, outcomes = {}, []
    with rank.all_to_all(**CASE.options()) as a2a:
        for what, (name, value) in combine_mutations(rank).items():
            outcomes.append(play_round(Interposed(a2a, rank, what, name, value, said), rank, CASE, 0))  # type: ignore[arg-type]
    return said, outcomes


class Interposed:
    """An AllToAll whose combine makes a wrong call first, on rank 0."""

    def __init__(
        self, a2a: putget.AllToAll, rank: Rank, what: str, name: str, value: Any, said: dict[str, str]
    ) -> None:
        self._a2a = a2a
        self._rank = rank
        self._wrong = what, {name: value}
        self._said = said

    def __getattr__(self, name: str) -> Any:
        return getattr(self._a2a, name)

    def combine(self, *arguments: Any, **options: Any) -> Any:
        if self._rank.rank == 0:
            what, wrong = self._wrong
            self._said[what] = attempt(lambda: self._a2a.combine(**wrong))
        return self._a2a.combine(*arguments, **options)


def test_combine_refuses_every_wrong_argument(device: str) -> None:
    results = run_ranks(2, combine_wrongly, mode="thread", device=device)
    wrong = {}
    for what, said in results[0][0].items():
        argument = what.split(":")[0]
        if not said.startswith("ValueError") or argument not in said.replace("max_", ""):
            wrong[what] = said
    assert not wrong
    check_rounds(results)


MASKS: list[Any] = [
    [],
    [True],
    [True] * 3,
    [False, True],
    [False, False],
    None,
    3,
    "tt",
    [1.5, 2.5],
    [None, None],
    ["yes", "no"],
]


def mask_wrongly(rank: Rank) -> tuple[dict[str, str], list[Outcome]]:
    said, outcomes = {}, []
    with rank.all_to_all(**CASE.options()) as a2a:
        for mask in MASKS:
            if rank.rank == 0:
                said[repr(mask)] = attempt(lambda mask=mask: a2a.set_active_ranks(mask))  # type: ignore[misc]
            outcomes.append(play_round(a2a, rank, CASE, 0))
    return said, outcomes


def test_set_active_ranks_refuses_every_wrong_mask(device: str) -> None:
    results = run_ranks(2, mask_wrongly, mode="thread", device=device)
    wrong = {mask: said for mask, said in results[0][0].items() if not said.startswith("ValueError: ")}
    assert not wrong
    assert all("mask" in said for said in results[0][0].values())
    check_rounds(results)


ROW = putget.Payload((4,), torch.float32)
FP8 = torch.float8_e4m3fn
# The argument that is wrong and others that are needed for that.
WIRES: list[tuple[str, dict[str, Any]]] = [
    *[
        ("combine_dtype", {"combine_dtype": value, "output": putget.Payload((16,), torch.bfloat16)})
        for value in (torch.float8_e5m2, torch.float16, torch.float32, torch.int8, "fp8", 8, "float8_e4m3fn")
    ],
    *[
        ("combine_dtype", {"combine_dtype": FP8, "output": putget.Payload((n,), torch.float32)})
        for n in (1, 8, 24, 129)
    ],
]
LAUNCHES: list[tuple[str, dict[str, Any]]] = [
    (
        "sentinel_rows",
        {
            "output": putget.Payload((32,), torch.bfloat16),
            "combine_dtype": FP8,
            "tuning": Tuning(combine=Launch(sentinel_rows=False)),
        },
    ),
    *[("tuning", {"tuning": value}) for value in (1, Launch(), {"blocks": 1}, "Tuning", Tuning)],
]

CONSTRUCTOR: list[tuple[str, Any]] = [
    *[("num_experts", value) for value in (0, -1, 2.0, "8", None, True, 2**31)],
    *[("top_k", value) for value in (0, 33, -1, 2.0, "8", None, True)],
    *[("max_tokens_per_rank", value) for value in (0, -1, 2.0, "8", None, True, 2**31)],
    *[("payloads", value) for value in ([], [ROW] * 9, None, ROW, [(4,)], [torch.zeros(4)], [None], 3)],
    *[("output", value) for value in (None, [ROW], (4,), putget.Payload((4,), torch.float64), 3)],
    *[("output", putget.Payload((4,), dtype)) for dtype in (torch.int32, torch.uint8, torch.float8_e4m3fn)],
    *[("device", value) for value in ("tpu", "meta", 3.5, None, "cpu:x")],
    *[("timeout_s", value) for value in (0, -1.0, float("nan"), "30", None, float("inf"))],
    *[("warmup_timeout_s", value) for value in (0, -1.0, float("nan"), "30", None)],
    *[("workspace", value) for value in (3, "ws", torch.zeros(100, dtype=torch.uint8))],
    *[("num_sms", value) for value in (0, -1, 2.0, "8", True)],
    *[
        ("expert_to_rank", value)
        for value in (
            torch.zeros(3, dtype=torch.int32),
            torch.zeros(2, 4, dtype=torch.int32),
            torch.zeros(8),
            torch.full((8,), 2, dtype=torch.int32),
            torch.full((8,), -1, dtype=torch.int32),
            [0] * 7,
            "table",
            3,
        )
    ],
]


def construct_wrongly(rank: Rank) -> list[tuple[str, str]]:
    """A body: every rank makes the same wrong constructor calls, then a right one."""
    said = []
    for name, value in CONSTRUCTOR:
        what = f"{name}={value!r}"
        base = {"num_experts": 8}
        said.append((what, attempt(lambda o={**base, name: value}: rank.all_to_all(**o).close())))  # type: ignore[misc]
    for name, options in (*WIRES, *LAUNCHES):
        base = {"num_experts": 8, **options}
        said.append((f"{name}={options}", attempt(lambda o=base: rank.all_to_all(**o).close())))  # type: ignore[misc]
    for value in (3, None, "comm"):
        options = {"num_experts": 8, "top_k": 2, "max_tokens_per_rank": 8, "payloads": [ROW], "output": ROW}
        said.append(("comm", attempt(lambda v=value, o=options: putget.AllToAll(v, device="cpu", **o))))  # type: ignore[misc]
    for value in (0, -1, 2.5, "big", None):
        said.append(("num_bytes", attempt(lambda v=value: putget.Workspace(rank.comm, v, device="cpu"))))  # type: ignore[misc]
    with rank.all_to_all() as a2a:
        a2a.check()
    return said


def test_the_constructor_refuses_every_wrong_argument(device: str) -> None:
    for said in run_ranks(2, construct_wrongly, mode="thread", device=device):
        wrong = [
            (what, text) for what, text in said if not text.startswith("ValueError") or what.split("=")[0] not in text
        ]
        assert not wrong


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("shape", ((-1,), torch.float32)),
        ("shape", ((0,), torch.float32)),
        ("shape", ((2.0,), torch.float32)),
        ("shape", (4, torch.float32)),
        ("shape", ("4", torch.float32)),
        ("shape", (None, torch.float32)),
        ("dtype", ((4,), "float32")),
        ("dtype", ((4,), None)),
        ("dtype", ((4,), float)),
    ],
)
def test_payload_refuses(name: str, arguments: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=name):
        putget.Payload(*arguments)


def test_payload_row_bytes() -> None:
    assert putget.Payload((), torch.int64).row_bytes == 8
    assert putget.Payload((7168,), torch.float8_e4m3fn).row_bytes == 7168
    assert putget.Payload((3, 5), torch.bfloat16).row_bytes == 30
    assert putget.Payload((3,), torch.bool) == putget.Payload((3,), torch.bool)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, value in CONSTRUCTOR if name in ("num_experts", "top_k", "payloads", "output")]
    + [("ep_size", value) for value in (0, -1, 129, 2.0, "8", None)]
    + [("max_tokens_per_rank", value) for value in (0, 2.0, None)],
)
def test_workspace_bytes_refuses(name: str, value: Any) -> None:
    options: dict[str, Any] = {
        "ep_size": 4,
        "max_tokens_per_rank": 8,
        "top_k": 2,
        "payloads": [ROW],
        "output": ROW,
        "num_experts": 8,
    }
    options[name] = value
    if name == "num_experts" and value is None:
        assert putget.workspace_bytes(**options) > 0
        return
    with pytest.raises(ValueError, match=name):
        putget.workspace_bytes(**options)


@pytest.mark.parametrize(("name", "wrong"), WIRES)
def test_workspace_bytes_refuses_the_same_wires(name: str, wrong: dict[str, Any]) -> None:
    options: dict[str, Any] = {"ep_size": 4, "max_tokens_per_rank": 8, "top_k": 2, "payloads": [ROW], "output": ROW}
    with pytest.raises(ValueError, match=name):
        putget.workspace_bytes(**{**options, **wrong})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("blocks", value) for value in (0, -1, 257, 1.0, "1", True)],
        *[("threads", value) for value in (0, -32, 31, 800, 33, 32.0, "32")],
        *[("segment_bytes", value) for value in (0, -512, 256, 513, 1 << 27, 512.0)],
    ],
)
def test_launch_refuses(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} is .*expected None or a multiple"):
        Launch(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("dispatch", value) for value in (1, {"blocks": 1}, Launch)],
        *[("combine", value) for value in (2, "Launch", Tuning())],
        *[("finish_num_sms", value) for value in (0, -1, 2.0, "8", True, 1 << 40)],
    ],
)
def test_tuning_refuses(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^Tuning {name} is .*, expected"):
        Tuning(**{name: value})


def misspelt(rank: Rank) -> str:
    with pytest.raises(TypeError) as caught:
        rank.all_to_all(num_expert=4)
    return str(caught.value)


def test_an_argument_that_there_is_not_is_named() -> None:
    (said,) = run_ranks(1, misspelt, mode="thread")
    assert "'num_expert'" in said


@pytest.mark.parametrize("value", [0, 1, 2, "yes"])
def test_launch_takes_a_bool_for_sentinel_rows(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^Launch sentinel_rows is .*, expected None or a bool"):
        Launch(sentinel_rows=value)


@pytest.mark.parametrize("num_tokens", [-1, 9, 2.0, "3", None, True])
def test_launches_refuses(num_tokens: Any) -> None:
    (comm,) = putget.Communicator.local(1)
    with Rank(0, 1, torch.device("cpu"), _comm=comm).all_to_all() as a2a, pytest.raises(ValueError, match="num_tokens"):
        a2a.launches(num_tokens)
    comm.close()
