"""The kernel that rounds to FP8 in blocks, for what it takes on machines that have it."""

from __future__ import annotations

from typing import Any

from putget_transfer._native import EngineError, Unavailable
from putget_transfer.weights._native import prepare_blocks, quantise_blocks

DTYPES = ("bfloat16", "float32")

_loaded: dict[int, bool] = {}


def _bind() -> None:
    """Make the current GPU's primary context that of the thread: a new one has none, and default streams name none."""
    import torch

    torch.cuda.Event().record()  # type: ignore[no-untyped-call]


def is_loaded(device: Any) -> bool:
    """Load the kernel for a device, once; say whether it is there."""
    import torch

    device = torch.device(device)
    if device.type != "cuda":
        return False
    number = torch.cuda.current_device() if device.index is None else device.index
    if number not in _loaded:
        with torch.cuda.device(number):
            _bind()
            try:
                prepare_blocks(torch.cuda.current_stream())
                _loaded[number] = True
            except Unavailable:
                _loaded[number] = False
            except EngineError:
                return False  # memory may be short now: the next call may load it
    return _loaded[number]


def takes(tensor: Any) -> bool:
    """Say whether the kernel takes a tensor's matrices."""
    return str(tensor.dtype).removeprefix("torch.") in DTYPES and is_loaded(tensor.device)


def matrices(tensor: Any) -> Any:
    """Return a tensor as (matrices, rows, columns) without a copy; None if their distances differ."""
    if tensor.dim() == 3:
        return tensor
    try:
        return tensor.view(-1, *tensor.shape[-2:]) if tensor.numel() else tensor.reshape(0, *tensor.shape[-2:])
    except RuntimeError:
        return None


def launch(source: Any, values: Any, window: tuple[int, int, int, int], scales: Any, *, powers_of_two: bool) -> None:
    """Order the rounding of matrices on the current stream.

    Args:
        source: (matrices, rows, columns), with any strides.
        values: Contiguous bytes for the window's values; None: they are not wanted.
        window: First row, first column, rows and columns that have values.
        scales: Contiguous scales of all blocks, float32 or float8_e8m0fnu; None: they are not wanted.
        powers_of_two: Scales are powers of two.
    """
    import torch

    with torch.cuda.device(source.device):
        _bind()
        quantise_blocks(
            torch.cuda.current_stream(),
            str(source.dtype).removeprefix("torch."),
            source.data_ptr(),
            list(source.shape),
            list(source.stride()),
            0 if values is None else values.data_ptr(),
            list(window),
            0 if scales is None else scales.data_ptr(),
            "float32" if scales is None else str(scales.dtype).removeprefix("torch."),
            powers_of_two,
        )
