"""Checks of what callers pass: every message names the argument, what came and what is allowed."""

from __future__ import annotations

import hashlib
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from putget import _abi
from putget.payload import Payload

Kind = TypeVar("Kind")
_LISTED_EXPERTS = 64  # in messages
_SHOWN_BITS = 256  # of an int in messages


def check_seconds(name: str, value: float) -> float:
    """A time-out in seconds.

    Raises:
        ValueError: It is not a number above 0 and up to a day.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86400:
        raise ValueError(f"{name} is {value!r}, expected seconds above 0, at most 86400")
    return float(value)


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """value as an int within [low, high].

    Raises:
        ValueError: It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {shown(value)}, allowed are ints from {low} to {high}")
    return value


def as_count(name: str, value: Any, low: int, high: int) -> int:
    """A number of things as an int within [low, high]. An integer of numpy is taken too.

    Raises:
        ValueError: It is none, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ValueError(f"{name} is {shown(value)}, allowed are {low} to {high}")
    return int(value)


def as_number(name: str, value: Any, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """A finite number within [low, high], or within (low, high] if `above`, as a float.

    Raises:
        ValueError: It is none, or out of range.
    """
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:  # an int that no float holds
        number = math.nan
    if math.isfinite(number) and low <= number <= high and not (above and number == low):
        return number
    least = f"above {low:g}" if above else f"from {low:g}"
    most = "" if math.isinf(high) else f" to {high:g}"
    raise ValueError(f"{name} is {shown(value)}, allowed are finite numbers {least}{most or ' on'}")


def as_flag(name: str, value: Any) -> bool:
    """A bool, of Python or numpy.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} is {shown(value)}, expected a bool")
    return bool(value)


def as_kind(name: str, value: Any, kind: type[Kind]) -> Kind:
    """The value, which is an object of this class.

    Raises:
        ValueError: It is of another.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {shown(value)}, expected a {kind.__name__}")
    return value


def as_path(name: str, value: Any) -> Path:
    """A path that was given as a str or a path.

    Raises:
        ValueError: It is neither.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    try:
        if isinstance(text, str) and b"\0" not in os.fsencode(text) and text:
            return Path(text)
    except UnicodeEncodeError:
        pass  # half of a character that no file system takes
    raise ValueError(f"{name} is {shown(value)}, expected the path of a file, a str or a path")


def as_name(name: str, value: Any) -> str:
    """A str that is not empty and that UTF-8 can write.

    Raises:
        ValueError: It is none.
    """
    is_name = (
        isinstance(value, str) and value and not any(sign == "\0" or "\ud800" <= sign <= "\udfff" for sign in value)
    )
    if not is_name:
        raise ValueError(f"{name} is {shown(value)}, expected a name")
    return str(value)


def as_list(name: str, value: Any) -> list[Any]:
    """The elements of a sequence, as a list; a str is one thing, not many.

    Raises:
        ValueError: It cannot.
    """
    try:
        if not isinstance(value, str | bytes):
            return list(value)
    except TypeError:
        pass  # told below
    raise ValueError(f"{name} is {shown(value)}, expected a sequence")


def as_array(name: str, value: Any) -> NDArray[Any]:
    """The value as an array: it may be an array, nested sequences, or a tensor on any device, with a gradient too.

    Floats that numpy does not know become float32. The result may share memory with the value.

    Raises:
        ValueError: It is not rectangular, or has no numbers that the host can read; the message names the first row
            that differs.
    """
    try:
        if not isinstance(value, torch.Tensor):
            return np.asarray(value)
        found = value.detach().cpu().resolve_conj().resolve_neg()
        is_known = not found.is_floating_point() or found.dtype in (torch.float64, torch.float32, torch.float16)
        array: NDArray[Any] = (found if is_known else found.float()).numpy()
        return array
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = _ragged(value) or str(error).split("\n")[0]
        raise ValueError(f"{name} is {shown(value)}: {reason}") from error


def _ragged(value: Any) -> str | None:
    """Which row of a nested sequence differs from the first one, or None."""
    rows = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()
    lengths = [len(row) if hasattr(row, "__len__") else None for row in rows]
    for index, length in enumerate(lengths):
        if length != lengths[0]:
            said = ["no list" if one is None else f"{one} entries" for one in (length, lengths[0])]
            return f"row {index} has {said[0]}, row 0 has {said[1]}"
    for index, row in enumerate(rows):
        inner = _ragged(row)
        if inner is not None:
            return f"row {index}: {inner}"
    return None


def shown(value: Any) -> str:
    """A value for a message: short, whatever it is."""
    if isinstance(value, torch.Tensor | np.ndarray):
        dtype = str(value.dtype).removeprefix("torch.")
        place = f" on {value.device}" if isinstance(value, torch.Tensor) else ""
        return f"a {type(value).__name__} {dtype} {list(value.shape)}{place}"
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__}"
    return reprlib.repr(value)


def check_row_bytes(name: str, row_bytes: int, most: int = _abi.MAX_ROW_BYTES) -> int:
    """Bytes of one row, as native code counts them.

    Raises:
        ValueError: They are none, or too many.
    """
    if not 1 <= row_bytes <= most:
        raise ValueError(f"{name} has rows of {row_bytes} bytes, allowed are 1 to {most}")
    return row_bytes


def check_tensor(
    name: str, value: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> torch.Tensor:
    """A contiguous tensor of exactly this shape, one of these dtypes, on this device.

    Raises:
        ValueError: It is not; the message says what came.
    """
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}, expected a tensor")
    if value.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} has dtype {str(value.dtype).removeprefix('torch.')}, expected {allowed}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, expected {device}")
    if value.shape != shape:
        raise ValueError(f"{name} has shape {list(value.shape)}, expected {list(shape)}")
    if not value.is_contiguous():
        raise ValueError(f"{name} has strides {list(value.stride())}, expected a contiguous tensor")
    return value


def check_apart(name: str, written: torch.Tensor, other_name: str, read: torch.Tensor) -> None:
    """Raises ValueError where two contiguous tensors share bytes: a kernel would read what it has written."""
    begin, other = written.data_ptr(), read.data_ptr()
    if begin < other + read.nbytes and other < begin + written.nbytes:
        raise ValueError(f"{name} overlaps {other_name}, expected memory of its own")


def check_expert_to_rank(value: Any, num_experts: int, ep_size: int, device: torch.device) -> torch.Tensor:
    """An int32 table [num_experts] of ranks on the device: a sequence, or a tensor on the CPU, is copied there.

    Raises:
        ValueError: Shape, dtype, device or a rank in it is wrong.
    """
    if isinstance(value, Sequence):
        try:
            value = torch.tensor(value, dtype=torch.int32, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"expert_to_rank: expected {num_experts} ranks: {error}") from error
    elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and device.type != "cpu":
        value = value.to(device)
    table = check_tensor("expert_to_rank", value, (num_experts,), (torch.int32,), device)
    low, high = int(table.min()), int(table.max())
    if low < 0 or high >= ep_size:
        raise ValueError(f"expert_to_rank holds ranks from {low} to {high}, allowed are 0 to {ep_size - 1}")
    return table


def describe_table(table: torch.Tensor) -> str:
    """Ranks of experts for a comparison between ranks: as they are where they are few, else a digest of all."""
    ranks = table.cpu()
    if len(ranks) <= _LISTED_EXPERTS:
        return str(ranks.tolist())
    digest = hashlib.sha256(ranks.numpy().astype("<i4").tobytes()).hexdigest()
    return f"{len(ranks)} ranks with the digest {digest[:32]}"


def check_rows(x: Any, ep_size: int, max_rows: int, output: Payload, device: torch.device) -> tuple[int, int]:
    """Strides in bytes, (slot, source), of rows given to combine.

    They are [ep_size, max_rows, *shape] or [max_rows * ep_size, *shape].

    Raises:
        ValueError: Another shape, dtype or device, or rows that are not contiguous in themselves.
    """
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"x is a {type(x).__name__}, expected a tensor")
    if x.dtype != output.dtype:
        raise ValueError(f"x has dtype {x.dtype}, expected {output.dtype}")
    if x.device != device:
        raise ValueError(f"x is on {x.device}, expected {device}")
    shape = output.shape
    item = x.element_size()
    by_source = (ep_size, max_rows, *shape)
    flat = (max_rows * ep_size, *shape)
    lead = 2 if x.dim() == len(by_source) else 1
    if tuple(x.shape) not in (by_source, flat):
        raise ValueError(
            f"x has shape {list(x.shape)}, expected {list(by_source)} or {list(flat)}; rows by expert come with layout="
        )
    if not x[(0,) * lead].is_contiguous():
        raise ValueError(f"x has strides {list(x.stride())}, expected contiguous rows")
    if lead == 2:
        return x.stride(1) * item, x.stride(0) * item
    return x.stride(0) * item * ep_size, x.stride(0) * item
