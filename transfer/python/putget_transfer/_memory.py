"""Where the bytes of a Python object lie."""

from __future__ import annotations

import ctypes
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
