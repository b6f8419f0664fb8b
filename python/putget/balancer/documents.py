"""Files of other programs, JSON, YAML and .pt: every fault is a ValueError that names the file and the place in it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from putget._arguments import shown

_LISTED = 16  # names of a document in messages
_MOST_BITS = 63


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
        ValueError: It cannot be read, or is not JSON.
    """
    return _parse(path, "JSON", json.loads, _text(path), (ValueError, RecursionError))


def read_yaml(path: Path) -> Any:
    """Reads a YAML file. It needs PyYAML.

    Raises:
        ValueError: It cannot be read, or is not YAML.
    """
    import yaml

    faults = (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError)
    return _parse(path, "YAML", yaml.safe_load, _text(path), faults)


def read_pt(path: Path) -> Any:
    """The object that ``torch.save`` wrote, on the CPU; nothing in it is executed.

    Raises:
        ValueError: It cannot be read, or is no such file.
    """
    raw = io.BytesIO(_bytes(path))
    # A damaged file fails anywhere in the unpickler, with whatever its bytes lead to.
    return _parse(
        path, "a .pt file", lambda file: torch.load(file, map_location="cpu", weights_only=True), raw, Exception
    )


def entry(found: Any, key: str) -> Any:
    """A named value of a document.

    Raises:
        ValueError: The document has no names, or not this one.
    """
    if not isinstance(found, dict):
        raise ValueError(f"it holds {_kind(found)}, not names and values")
    if key not in found:
        names = ", ".join(str(name) for name in list(found)[:_LISTED]) or "nothing"
        raise ValueError(f"it has no {key!r}; it has {names}")
    return found[key]


def whole(name: str, value: Any, low: int) -> int:
    """An int from `low` on.

    Raises:
        ValueError: The value is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} is {_shown(value)}, expected an integer from {low} on")
    return value


def rows(name: str, value: Any, layers: list[Any] | None = None) -> Any:
    """A table of integers, as lists of lists; one list is one layer. Tensors pass as they are.

    Args:
        name: of the table.
        value: what the document has.
        layers: names of the rows; their numbers if None.

    Raises:
        ValueError: It is something else, or a row differs from the first in length; the message names the layer.
    """
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} is {_shown(value)}, expected a list for each layer")
    is_flat = layers is None and not any(isinstance(row, list) for row in value) and isinstance(value[0], int)
    table = [value] if is_flat else value
    for number, row in enumerate(table):
        layer = f"layer {number if layers is None else layers[number]}"
        if not isinstance(row, list):
            raise ValueError(f"{name}: {layer} is {_shown(row)}, expected a list of integers")
        for slot, item in enumerate(row):
            if not isinstance(item, int) or isinstance(item, bool) or item.bit_length() > _MOST_BITS:
                raise ValueError(f"{name}: {layer}, slot {slot} is {_shown(item)}; entries must be integers of 64 bits")
        if len(row) != len(table[0]):
            raise ValueError(f"{name}: {layer} has {len(row)} entries, the first layer has {len(table[0])}")
    return table


@contextmanager
def named(path: Path) -> Iterator[None]:
    """A ValueError inside begins with the file's name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError inside becomes a ValueError that names the file.

    torch reports a file that it cannot open by a RuntimeError.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be written: {error}") from error


def _parse(path: Path, kind: str, parse: Callable[[Any], Any], text: Any, faults: Any) -> Any:
    try:
        return parse(text)
    except faults as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path} is not {kind}: {reason}") from error


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _shown(value: Any) -> str:
    """A value as JSON and YAML have it, a long one by its kind."""
    if value is None:
        return "null"
    return _kind(value) if isinstance(value, list | dict) else shown(value)
