"""Numbers beyond what the C ABI holds: a ValueError that names the argument, and never their lowest 32 bits."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import putget
from putget import _abi, _abi_moe, moe
from putget.tuning import Launch
from tests.harness import Rank, run_ranks

WORD = 1 << 32
ROW = putget.Payload((4,), torch.float32)
SIZES: dict[str, Any] = {
    "ep_size": 2,
    "max_tokens_per_rank": 8,
    "top_k": 2,
    "payloads": [ROW],
    "output": ROW,
    "num_experts": 8,
}

# Ints that are beyond 32 or 64 bits, or below zero; many are small numbers in their lowest bits.
BEYOND = st.one_of(
    st.integers(min_value=1, max_value=64).map(lambda low: WORD + low),
    st.integers(min_value=0, max_value=64).map(lambda low: (1 << 64) + low),
    st.integers(min_value=WORD, max_value=1 << 80),
    st.integers(max_value=-1, min_value=-(1 << 80)),
)


def test_a_row_of_more_bytes_than_32_bits_hold_is_refused() -> None:
    for row in (putget.Payload((WORD + 16,), torch.uint8), putget.Payload((1 << 20, 1 << 20), torch.float32)):
        with pytest.raises(ValueError, match=r"payloads\[1\] has rows of \d+ bytes, allowed are 1 to 67108864"):
            putget.workspace_bytes(**{**SIZES, "payloads": [ROW, row]})
        with pytest.raises(ValueError, match="output has rows of"):
            putget.workspace_bytes(**{**SIZES, "output": putget.Payload(row.shape, torch.float32)})
    assert putget.workspace_bytes(**{**SIZES, "payloads": [putget.Payload((1 << 26,), torch.uint8)]}) > 1 << 26


@settings(max_examples=200)
@given(name=st.sampled_from(["ep_size", "max_tokens_per_rank", "top_k", "num_experts", "payloads", "output"]), n=BEYOND)
def test_no_size_of_a_workspace_wraps(name: str, n: int) -> None:
    value: Any = n
    if name in ("payloads", "output"):
        if n < 0:
            return
        row = putget.Payload((n,), torch.float32)
        value = [row] if name == "payloads" else row
    with pytest.raises(ValueError, match=name):
        putget.workspace_bytes(**{**SIZES, name: value})


@settings(max_examples=100)
@given(name=st.sampled_from(["blocks", "threads", "segment_bytes", "splits", "senders", "sentinel_rows"]), n=BEYOND)
def test_no_field_of_a_launch_wraps(name: str, n: int) -> None:
    with pytest.raises(ValueError, match=name):
        Launch(**{name: n})
    with pytest.raises(ValueError, match=name):
        _abi.Launch(**{name: n})


STRUCTURES = [
    _abi.Config,
    _abi.MemoryConfig,
    _abi.Share,
    _abi.DispatchArgs,
    _abi.CombineArgs,
    _abi_moe.MoeConfig,
    _abi_moe.MoeFinalizeArgs,
    _abi_moe.MoeRows,
    _abi_moe.MoeExpandArgs,
    _abi_moe.MoeActivationArgs,
]
INTS = (ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64)


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: structure.__name__)
def test_no_structure_takes_what_does_not_fit(structure: Any) -> None:
    names = [field[0] for field in structure._fields_ if field[1] in INTS and field[0] not in ("size", "magic")]
    assert names
    for name in names:
        for value in (1 << 64, (1 << 64) + 5, -(1 << 64) + 1):
            with pytest.raises(ValueError, match=f"{name} is -?[0-9]+, which does not fit"):
                structure(**{name: value})
        assert getattr(structure(**{name: 7}), name) == 7


def construct(rank: Rank, names: list[str], value: int) -> list[str]:
    said = []
    for name in names:
        try:
            rank.all_to_all(**{name: value}).close()
            said.append("accepted")
        except ValueError as error:
            said.append(str(error))
    return said


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=BEYOND)
def test_no_argument_of_the_constructor_wraps(n: int, device: str) -> None:
    names = [
        "num_sms",
        "timeout_s",
        "warmup_timeout_s",
        "top_k",
        "max_tokens_per_rank",
        "num_experts",
    ]
    (said,) = run_ranks(1, construct, names, n, mode="thread", device=device)
    for name, words in zip(names, said, strict=True):
        assert words.startswith(name), (name, n, words)


def ask_wrongly(rank: Rank, n: int) -> list[str]:
    with rank.all_to_all() as a2a:
        with pytest.raises(ValueError, match=r"^num_tokens is") as tokens:
            a2a.launches(n)
        workspace_size = a2a.workspace.num_bytes
    said = [str(tokens.value)]
    for value in (n, workspace_size + (1 << 64)):
        with pytest.raises(ValueError, match=r"^num_bytes is") as size:
            putget.Workspace(rank.comm, value, rank.device)
        said.append(str(size.value))
    return said


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=BEYOND.filter(lambda n: not 0 <= n < 1 << 46))
def test_no_size_wraps(n: int, device: str) -> None:
    (said,) = run_ranks(1, ask_wrongly, n, mode="thread", device=device)
    assert len(said) == 3


def test_rows_around_experts_are_bounded() -> None:
    """Rows of more than 4 GiB that nobody has written to take no memory."""
    wide = torch.empty(1, WORD + 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"source\[0\] has rows of 4294967312 bytes"):
        moe.expand(wide, torch.zeros(1, dtype=torch.int32))
    columns = torch.empty(1, 2 * ((1 << 24) + 1), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"x has 2 \* 16777217 columns, allowed are"):
        moe.gated_activation(columns)


# --- the C ABI has other users ----------------------------------------------------------------------------------------


def c_config(**fields: Any) -> _abi.Config:
    config = _abi.Config(
        ep_size=1,
        num_experts=4,
        top_k=2,
        max_tokens_per_rank=4,
        num_payloads=1,
        output_elements=16,
        timeout_ns=1,
        warmup_timeout_ns=1,
    )
    config.row_bytes[0] = 16
    for name, value in fields.items():
        setattr(config, name, value)
    return config


@pytest.fixture
def c_memory() -> Any:
    layout = _abi.Layout()
    _abi.call("putget_layout_of", ctypes.byref(c_config()), ctypes.byref(layout))
    memory = ctypes.c_void_p()
    wanted = _abi.MemoryConfig(ep_size=1, bytes=layout.total_bytes)
    _abi.call("putget_memory_create", ctypes.byref(wanted), ctypes.byref(memory))
    yield memory
    _abi.library().putget_memory_destroy(memory)


TABLE = torch.zeros(16, dtype=torch.int64)  # stands in for every table


def c_object(memory: Any, config: _abi.Config) -> ctypes.c_void_p:
    tables = _abi.Tables(**{field[0]: TABLE.data_ptr() for field in _abi.Tables._fields_[2:]})
    found = ctypes.c_void_p()
    _abi.call("putget_create", ctypes.byref(config), memory, ctypes.byref(tables), ctypes.byref(found))
    return found


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("num_sms", {"num_sms": WORD - 1}),
        ("finish_num_sms", {"finish_num_sms": WORD - 1}),
        ("timeout_ns", {"timeout_ns": 0}),
        ("timeout_ns", {"timeout_ns": (1 << 64) - 1}),
        ("warmup_timeout_ns", {"warmup_timeout_ns": 0}),
        ("warmup_timeout_ns", {"warmup_timeout_ns": 1 << 63}),
        ("wire_type", {"wire_type": 2}),
    ],
)
def test_create_bounds_every_field(name: str, fields: dict[str, Any], c_memory: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is "):
        c_object(c_memory, c_config(**fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"domain_ranks": 5}, "domain_ranks is 5, allowed are 0 to 4"),
        ({"domain_begin": 3}, "domain_begin is 3, allowed are 0 to 2"),
        ({"domain_ranks": 2}, "ep_rank is 2, a domain that begins with 0 has 2 ranks"),
    ],
)
def test_a_rank_is_in_its_domain(fields: dict[str, int], words: str) -> None:
    config, layout = c_config(ep_size=4, ep_rank=2, **fields), _abi.Layout()
    with pytest.raises(ValueError, match=f"^{words}"):
        _abi.call("putget_layout_of", ctypes.byref(config), ctypes.byref(layout))


def test_objects_have_the_domain_of_their_memory() -> None:
    assert _abi.library().putget_sentinel_begin(4, 5, 1 << 20) == 0
    assert "domain_ranks" in _abi.last_error()
    wanted, memory = _abi.MemoryConfig(ep_size=2, domain_ranks=1, bytes=1 << 20), ctypes.c_void_p()
    _abi.call("putget_memory_create", ctypes.byref(wanted), ctypes.byref(memory))
    with pytest.raises(ValueError, match=r"^domain_ranks differs from the memory's"):
        c_object(memory, c_config(ep_size=2))
    _abi.library().putget_memory_destroy(memory)


def test_calls_bound_every_field(c_memory: Any) -> None:
    found = c_object(c_memory, c_config())
    out = torch.zeros(4, 16)
    launch = _abi.Launch()
    with pytest.raises(ValueError, match=r"^num_tokens is 5, allowed are 0 to 4"):
        _abi.call("putget_launches", found, 5, None, ctypes.byref(launch), ctypes.byref(launch))
    for name in ("row_slot_bytes", "row_source_bytes"):
        args = _abi.CombineArgs(rows=out.data_ptr(), out=out.data_ptr(), **{name: 1 << 63})
        with pytest.raises(ValueError, match=rf"^{name} is "):
            _abi.call("putget_combine", found, ctypes.byref(args))
    for size in (0, 129, WORD - 1):
        assert _abi.library().putget_sentinel_begin(size, 0, 1 << 30) == 0
        assert "ep_size" in _abi.last_error()
    _abi.library().putget_destroy(found)


def test_expert_major_rows_are_bounded_where_no_expert_is_local() -> None:
    config = _abi_moe.MoeConfig(ep_size=128, num_experts=1, top_k=32, max_rows=(1 << 22) - 1, alignment=1)
    with pytest.raises(ValueError, match=r"^rows of all experts is "):
        _abi.call("putget_moe_layout_of", ctypes.byref(config), ctypes.byref(_abi_moe.MoeLayout()))
