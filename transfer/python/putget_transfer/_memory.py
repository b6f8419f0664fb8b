"""Where the bytes of a Python object lie, and what keeps them there."""

from __future__ import annotations

import array
import ctypes
import functools
import struct
import sys
from typing import Any, NamedTuple

from putget_transfer._native import Pin

# The first bytes of torch's storage object: more than up to its flags, and fewer than it has.
_STORAGE_BYTES = 64


class Located(NamedTuple):
    """Registered memory."""

    address: int
    length: int
    device: str
    keeper: object
    """Keeps the memory where it is; None with an address."""
    guarded: bool
    """Nobody is known to keep the memory mapped and writable."""
    word: int
    """Address of the word that says where the memory is; 0 where there is none."""
    expected: int
    """What that word has to be."""


class _Buffer(ctypes.Structure):
    """`Py_buffer`."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def locate(memory: Any, length: int | None, device: str | None, read_only: bool) -> Located:
    """Find address, length in bytes, device and keeper of some memory.

    Args:
        memory: An address, a tensor (`data_ptr`), an object with `__cuda_array_interface__`, or a buffer.
        length: Bytes; needed with an address, otherwise taken from the object, which it may not exceed.
        device: "cpu" or "cuda:N"; taken from the object, "cpu" for an address.
        read_only: Nothing is to land in the memory, so the buffer need not be writable.

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
        return Located(memory, length, device or "cpu", None, guarded=True, word=0, expected=0)
    if hasattr(memory, "data_ptr"):
        found = _tensor(memory)
    elif hasattr(memory, "__cuda_array_interface__"):
        found = _cuda_array(memory, device, read_only)
    else:
        found = _buffer(memory, read_only)
    if device is not None and device != found.device:
        raise ValueError(f"device: {device!r} came; the memory is on {found.device!r}")
    if length is not None and length > found.length:
        raise ValueError(f"length: {length} came; the memory has {found.length} bytes")
    return found if length is None else found._replace(length=length)


def _tensor(memory: Any) -> Located:
    if not memory.is_contiguous():
        raise ValueError("memory: a tensor that is not contiguous came")
    device = f"cuda:{memory.device.index or 0}" if memory.device.type == "cuda" else memory.device.type
    keeper, guarded, word, expected = _storage(memory, device)
    return Located(memory.data_ptr(), memory.numel() * memory.element_size(), device, keeper, guarded, word, expected)


def _storage(memory: Any, device: str) -> tuple[object, bool, int, int]:
    """Hold a tensor's storage. torch cannot resize it as long as it is held: that would free the memory."""
    if not hasattr(memory, "untyped_storage"):
        return memory, True, 0, 0
    storage = memory.untyped_storage()
    places = _places()
    if places is None:
        # An unknown torch: its own way, which is for good.
        if device == "cpu":
            memory.detach().reshape(-1).view(dtype=sys.modules["torch"].uint8).numpy()
        return (memory, storage), True, 0, 0
    pin = Pin(storage._cdata + places.resizable)
    # Memory that torch has not allocated cannot be resized anyhow, and torch does not know who keeps it.
    if pin.holds and storage.resizable():
        raise ValueError("memory: a tensor came whose storage torch goes on resizing")
    word = storage._cdata + places.data if device == "cpu" else 0
    return (memory, storage, pin), not pin.holds, word, storage.data_ptr()


class _Places(NamedTuple):
    """Offsets in torch's storage object."""

    data: int
    resizable: int


@functools.lru_cache(maxsize=1)
def _places() -> _Places | None:
    """Find out where torch keeps a storage's address and the flag that lets it be resized. None: it cannot be seen."""
    tensor = sys.modules["torch"].zeros(1)
    storage = tensor.untyped_storage()
    before = ctypes.string_at(storage._cdata, _STORAGE_BYTES)
    # This clears the flag.
    tensor.numpy()
    after = ctypes.string_at(storage._cdata, _STORAGE_BYTES)
    changed = [at for at in range(_STORAGE_BYTES) if before[at] != after[at]]
    words = list(struct.unpack("8N", before))
    if len(changed) != 1 or (before[changed[0]], after[changed[0]]) != (1, 0) or storage.data_ptr() not in words:
        return None
    if storage.resizable():
        return None
    return _Places(words.index(storage.data_ptr()) * ctypes.sizeof(ctypes.c_size_t), changed[0])


def _cuda_array(memory: Any, device: str | None, read_only: bool) -> Located:
    interface = memory.__cuda_array_interface__
    if interface.get("strides") is not None:
        raise ValueError("memory: an array that is not contiguous came")
    length = int(interface["typestr"][2:])
    for extent in interface["shape"]:
        length *= extent
    address, cannot_be_written = interface["data"]
    if cannot_be_written and not read_only:
        raise ValueError(f"memory: {type(memory).__name__} came; a writable array is needed")
    return Located(address, length, device or "cuda:0", memory, guarded=True, word=0, expected=0)


def _buffer(memory: Any, read_only: bool) -> Located:
    # The view holds the buffer's export, so the object cannot move or resize it meanwhile.
    try:
        view = memoryview(memory)
    except TypeError:
        kind = type(memory).__name__
        raise TypeError(f"memory: {kind} came; an address, a tensor or a buffer is needed") from None
    if not view.c_contiguous or (view.readonly and not read_only):
        kind = "contiguous buffer" if read_only else "writable, contiguous buffer"
        raise ValueError(f"memory: {type(memory).__name__} came; a {kind} is needed")
    raw = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(raw), 0)
    address = raw.buf or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(raw))
    guarded, word, expected = _owner(view.obj)
    return Located(address, view.nbytes, "cpu", view, guarded, word, expected)


def _owner(exporter: object) -> tuple[bool, int, int]:
    """Say whether nobody is known to keep a buffer's memory, and which word says where it is."""
    numpy = sys.modules.get("numpy")
    while numpy is not None and isinstance(exporter, numpy.ndarray):
        if exporter.base is None:
            # numpy moves memory under a buffer if it is told not to look (`resize(refcheck=False)`).
            word, expected = id(exporter) + object.__basicsize__, exporter.__array_interface__["data"][0]
            known = ctypes.c_size_t.from_address(word).value == expected
            return not exporter.flags.owndata, word if known else 0, expected
        exporter = exporter.base.obj if isinstance(exporter.base, memoryview) else exporter.base
    return not isinstance(exporter, (bytes, bytearray, array.array)), 0, 0


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
