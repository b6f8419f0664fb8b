"""Where the bytes of a Python object lie."""

from __future__ import annotations

import array
import ctypes
import sys
from typing import Any


def locate(memory: Any, length: int | None, device: str | None) -> tuple[int, int, str, object]:
    """Find address, length in bytes, device and keeper of some memory.

    Args:
        memory: An address, a tensor (`data_ptr`), an object with `__cuda_array_interface__`, or a writable buffer.
        length: Bytes; needed with an address, otherwise taken from the object, which it may not exceed.
        device: "cpu" or "cuda:N"; taken from the object, "cpu" for an address.

    Returns:
        Address, length, device, and an object that keeps the memory where it is.

    Raises:
        ValueError: The memory is not contiguous or not writable, or the address or the length is none.
    """
    if length is not None and not 0 <= length < 1 << 63:
        raise ValueError(f"length: {length} came; bytes from 0 on are allowed")
    if isinstance(memory, int):
        if length is None:
            raise ValueError("length: None came; with an address it is needed")
        if not 0 <= memory < 1 << 64:
            raise ValueError(f"memory: {memory} came; that is no address")
        return memory, length, device or "cpu", None
    if hasattr(memory, "data_ptr"):
        if not memory.is_contiguous():
            raise ValueError("memory: a tensor that is not contiguous came")
        address, found = memory.data_ptr(), memory.numel() * memory.element_size()
        where = f"cuda:{memory.device.index or 0}" if memory.device.type == "cuda" else memory.device.type
        keeper: object = memory
    elif hasattr(memory, "__cuda_array_interface__"):
        interface = memory.__cuda_array_interface__
        if interface.get("strides") is not None:
            raise ValueError("memory: an array that is not contiguous came")
        found = int(interface["typestr"][2:])
        for extent in interface["shape"]:
            found *= extent
        address, where, keeper = interface["data"][0], device or "cuda:0", memory
    else:
        view = memoryview(memory)
        if view.readonly or not view.c_contiguous:
            raise ValueError(f"memory: {type(memory).__name__} came; a writable, contiguous buffer is needed")
        # The array holds the buffer's export, so nobody can move or resize it meanwhile.
        array = (ctypes.c_char * view.nbytes).from_buffer(view)
        address, found, where, keeper = ctypes.addressof(array), view.nbytes, "cpu", array
    if device is not None and device != where:
        raise ValueError(f"device: {device!r} came; the memory is on {where!r}")
    if length is None:
        length = found
    elif length > found:
        raise ValueError(f"length: {length} came; the memory has {found} bytes")
    return address, length, where, keeper


def integers(values: Any) -> tuple[bytes, bool]:
    """Read an array of integers as a whole, without an object for each.

    Args:
        values: A contiguous array of one dimension with integers of 64 or 32 bits: numpy's, torch's on the CPU,
            `array`'s; or any sequence of numbers.

    Returns:
        The integers as 64 bits each, in the machine's order, and whether they are signed.

    Raises:
        ValueError: The array has another type or shape, or is not contiguous, or a number does not fit.
    """
    if hasattr(values, "numpy") and hasattr(values, "is_cuda"):
        if values.is_cuda:
            raise ValueError(f"indices: a tensor on {values.device} came; one on the CPU is needed")
        values = values.numpy()
    try:
        view = memoryview(values)
    except TypeError:
        try:
            return array.array("Q", values).tobytes(), False
        except OverflowError:
            raise ValueError(f"indices: numbers from 0 to {2**64 - 1} are allowed") from None
    kind = view.format.lstrip("@=<") if sys.byteorder == "little" else view.format.lstrip("@=>")
    if view.ndim != 1 or not view.c_contiguous or kind not in {"q", "Q", "l", "L", "i", "I"}:
        problem = f"an array of type {view.format!r} with {view.ndim} dimensions came"
        raise ValueError(f"indices: {problem}; contiguous integers of 64 or 32 bits in one dimension are needed")
    signed = kind.islower()
    if view.itemsize == 8:
        return view.tobytes(), signed
    short: array.array[int] = array.array(kind)
    short.frombytes(view.tobytes())
    return array.array("q" if signed else "Q", short).tobytes(), signed
