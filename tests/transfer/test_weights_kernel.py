"""The kernel that rounds to FP8: its source on a CPU, and itself on a GPU, against `quantise` on a CPU, bit for bit."""

from __future__ import annotations

import ctypes
import math
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.project.checkout import ROOT

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
from putget_transfer import weights
from putget_transfer._native import EngineError, Unavailable
from putget_transfer.weights import _kernel, _native, _quantise

SOURCE = ROOT / "transfer/engine/src/providers/nvlink/quantise.cu"
FILL = 0xEE
MARGIN = 4096
"""Elements around what is written: rows next to the window, and blocks next to the grid."""
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Window = tuple[int, int, int, int]
FIELDS = ["source", "rows", "columns", "matrix_stride", "row_stride", "column_stride"]
FIELDS += ["values", "first_row", "first_column", "num_rows", "num_columns", "scales", "flags"]


class Blocks(ctypes.Structure):
    """The kernel's argument."""

    _fields_ = [(name, ctypes.c_uint64) for name in FIELDS]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Return the kernel as a function that runs on this machine's CPU."""
    compiler = shutil.which("c++")
    if not compiler:
        pytest.skip("there is no C++ compiler")
    library = tmp_path_factory.mktemp("kernel") / "quantise.so"
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f'-DSOURCE="{SOURCE}"']
    subprocess.run([*command, Path(__file__).with_name("quantise_on_cpu.cpp"), "-o", library], check=True, timeout=120)
    kernel = ctypes.CDLL(str(library))
    run, misaligned = kernel.run, kernel.misaligned_stores

    def launch(source: torch.Tensor, values: torch.Tensor, window: Window, scales: torch.Tensor, powers: bool) -> None:
        stored = 2 if scales.dtype == torch.float8_e8m0fnu else 0
        places = source.data_ptr(), *source.shape[1:], *source.stride(), values.data_ptr(), *window, scales.data_ptr()
        run(ctypes.byref(Blocks(*places, int(powers) | stored)), source.element_size(), scales.numel())
        assert not misaligned(), "a GPU refuses such stores"

    return launch


def any_bits(made: random.Random, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with every kind of number: NaN, infinities, subnormal numbers, zeros of both signs."""
    generator = torch.Generator().manual_seed(made.randrange(1 << 30))
    bits = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=generator)
    if dtype == torch.float32:
        return bits.to(torch.int32).view(dtype)
    return bits.to(torch.int16).view(dtype)


def case(made: random.Random) -> tuple[torch.Tensor, Window]:
    """Return matrices and a window of them."""
    dtype = made.choice([torch.bfloat16, torch.float32])
    count, rows, columns = made.randint(1, 3), made.randint(1, 300), made.randint(1, 300)
    if made.random() < 0.4:  # whole blocks take another path
        rows, columns = -(-rows // 128) * 128, -(-columns // 128) * 128
    kind = made.choice(["bits", "normal", "small", "large"])
    if kind == "bits":
        tensor = any_bits(made, dtype, (count, rows, columns))
    else:
        generator = torch.Generator().manual_seed(made.randrange(1 << 30))
        factor = {"normal": 1.0, "small": 2.0**-130, "large": 2.0**120}[kind]
        tensor = (torch.randn(count, rows, columns, generator=generator) * factor).to(dtype)
        for number in (float("nan"), -float("nan"), float("inf"), -float("inf")):
            tensor.view(-1)[made.randrange(tensor.numel())] = number
    tensor[made.randrange(count), : made.choice([0, 128, rows]), : made.choice([0, 128, columns])] = 0.0
    layout = made.choice(["plain", "turned", "wide", "odd"])
    if layout == "turned":
        tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "wide":  # rows are apart, and stay aligned
        tensor = torch.cat([tensor, tensor.new_zeros(count, rows, 64)], 2)[..., :columns]
    elif layout == "odd":
        tensor = torch.cat([tensor.new_zeros(count, rows, 1), tensor], 2)[..., 1:]
    if made.random() < 0.5:
        return tensor, (0, 0, rows, columns)
    row, column = made.randrange(min(rows, 128)), made.randrange(min(columns, 128))
    return tensor, (row, column, made.randint(1, rows - row), made.randint(1, columns - column))


def wanted(tensor: torch.Tensor, window: Window, scale: str) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = weights.quantise(tensor.cpu(), scale=scale)
    row, column, high, wide = window
    return values.view(torch.uint8)[:, row : row + high, column : column + wide], scales


def cases(number: int) -> Iterator[tuple[torch.Tensor, Window, str, torch.dtype]]:
    made = random.Random(number)
    for at in range(24):
        tensor, window = case(made)
        scale = made.choice(["float32", "ue8m0"])
        stored = torch.float8_e8m0fnu if scale == "ue8m0" and at % 2 else torch.float32
        yield tensor, window, scale, stored


def room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory with margins around it."""
    count = math.prod(shape)
    around = torch.full(((count + 2 * MARGIN) * dtype.itemsize,), FILL, dtype=torch.uint8, device=device)
    return around.view(dtype)[MARGIN : MARGIN + count].view(*shape)


def rooms(tensor: torch.Tensor, window: Window, stored: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for values and scales on the tensor's device."""
    values = room((tensor.shape[0], *window[2:]), torch.uint8, tensor.device)
    return values, room(_quantise.grid(tensor.shape), stored, tensor.device)


def margins(memory: torch.Tensor) -> torch.Tensor:
    """Return the bytes around memory that `room` has made."""
    width = memory.element_size()
    around = torch.tensor([], dtype=torch.uint8, device=memory.device).set_(memory.untyped_storage())
    return torch.cat([around[: MARGIN * width], around[(MARGIN + memory.numel()) * width :]]).cpu()


def same(values: torch.Tensor, scales: torch.Tensor, tensor: torch.Tensor, window: Window, scale: str) -> bool:
    right_values, right_scales = wanted(tensor, window, scale)
    for memory in (values, scales):
        around = margins(memory)
        assert around.numel() == 2 * MARGIN * memory.element_size()
        assert around.eq(FILL).all(), (memory.shape, window)
    found = scales.cpu().float() if scales.dtype != right_scales.dtype else scales.cpu()
    right = right_scales.float() if scales.dtype != right_scales.dtype else right_scales
    return torch.equal(values.cpu(), right_values) and torch.equal(found.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("number", range(4))
def test_the_source_makes_the_same_bytes(on_cpu: Callable[..., None], number: int) -> None:
    for tensor, window, scale, stored in cases(number):
        values, scales = rooms(tensor, window, stored)
        on_cpu(tensor, values, window, scales, scale == "ue8m0")
        assert same(values, scales, tensor, window, scale), (tensor.shape, tensor.stride(), window, scale, tensor.dtype)


def test_every_address_of_the_values_is_taken(on_cpu: Callable[..., None]) -> None:
    tensor = torch.randn(1, 256, 384)
    for first in range(8):
        window = (0, first, 250, 384 - 8)  # whole blocks lie within it
        right, right_scales = wanted(tensor, window, "float32")
        for shift in range(8):
            around = torch.full((right.numel() + 8,), FILL, dtype=torch.uint8)
            values = around[shift : shift + right.numel()].view(right.shape)
            scales = torch.zeros_like(right_scales)
            on_cpu(tensor, values, window, scales, False)
            assert torch.equal(values, right), (first, shift)
            assert torch.equal(scales, right_scales)


def test_pieces_of_the_way_without_a_kernel_make_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    for tensor, window, scale, stored in cases(9):
        whole = wanted(tensor, window, scale)
        with monkeypatch.context() as smaller:
            smaller.setattr(_quantise, "PIECE", 40_000)
            values, scales = rooms(tensor, window, stored)
            fp8 = values.view(torch.float8_e4m3fn)
            _quantise.blocks_into(tensor, fp8, window, scales, powers_of_two=scale == "ue8m0")
        assert torch.equal(values, whole[0])
        assert torch.equal(scales.float(), whole[1].float())
        assert all(margins(memory).eq(FILL).all() for memory in (values, scales))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("number", range(8))
def test_the_kernel_makes_the_same_bytes(number: int) -> None:
    assert _kernel.is_loaded("cuda")
    for tensor, window, scale, stored in cases(100 + number):
        # A copy to the device would drop the strides.
        there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda").copy_(tensor)
        values, scales = rooms(there, window, stored)
        _kernel.launch(there, values, window, scales, powers_of_two=scale == "ue8m0")
        assert same(values, scales, tensor, window, scale), (tensor.shape, tensor.stride(), window, scale, tensor.dtype)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_the_gpu_rounds_every_number_as_the_cpu_does(dtype: torch.dtype, scale: str) -> None:
    made = random.Random(5)
    tensors = [any_bits(made, dtype, (2, 3, 500, 390)), torch.zeros(128, 256, dtype=dtype)]
    # Each number of 16 bits in a block of one magnitude: nothing is scaled away.
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(dtype)
    tensors.append(every.view(512, 128))
    for tensor in tensors:
        for one, other in zip(
            weights.quantise(tensor, scale=scale), weights.quantise(tensor.cuda(), scale=scale), strict=True
        ):
            assert torch.equal(one.view(torch.uint8), other.cpu().view(torch.uint8))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float16"}, "dtype: 'float16' came|dtype: \"float16\" came"),
        ({"scale_dtype": "int8"}, "scale_dtype: .int8. came"),
        ({"window": [1, 0, 8, 8]}, r"window: \[1, 0, 8, 8\] came for matrices of 8 x 8"),
        ({"shape": [1 << 40, 8, 8]}, "shape: .* blocks are allowed"),
        ({"scale_dtype": "float8_e8m0fnu"}, "as_exponents: true came"),
        ({"stream": None}, "stream: None came"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(changes: dict[str, object], words: str) -> None:
    named: dict[str, object] = {
        "stream": 64,
        "dtype": "bfloat16",
        "source": 64,
        "shape": [1, 8, 8],
        "strides": [64, 8, 1],
        "values": 64,
        "window": [0, 0, 8, 8],
        "scales": 64,
        "scale_dtype": "float32",
        "powers_of_two": False,
    }
    with pytest.raises(ValueError, match=words):
        _native.quantise_blocks(*(named | changes).values())  # type: ignore[arg-type]


def test_the_kernel_is_for_gpus_alone() -> None:
    assert not _kernel.is_loaded("cpu")
    assert not _kernel.takes(torch.zeros(4, 4))


def test_matrices_at_distances_that_differ_are_the_kernels_as_well(
    on_cpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.randn(4, 8, 150, 140)
    part = whole[0:3, 0:2]
    launched = []

    def launch(source: torch.Tensor, *memory: object, powers_of_two: bool) -> None:
        launched.append(tuple(source.shape))
        on_cpu(source, *memory, powers_of_two)

    values, scales = (made[0:3, 0:2].contiguous() for made in weights.quantise(whole))
    own, grid = torch.zeros_like(values), torch.zeros_like(scales)
    with monkeypatch.context() as there:
        there.setattr(_kernel, "is_loaded", lambda _device: True)
        there.setattr(_kernel, "launch", launch)
        _quantise.blocks_into(part, own, (0, 0, 150, 140), grid, powers_of_two=False)
    assert launched == [(2, 150, 140)] * 3
    assert torch.equal(own.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(grid, scales)


class Context:
    """A GPU's context, in place of torch's calls and the driver's: a thread lacks it until it has recorded an event."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads = 0
        self.fails: Exception | None = None
        self.bound = threading.local()
        monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=self.bind))
        monkeypatch.setattr(torch.cuda, "device", lambda _number: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: 0)
        monkeypatch.setattr(_kernel, "_loaded", {})
        monkeypatch.setattr(_kernel, "prepare_blocks", self.call)
        monkeypatch.setattr(_kernel, "quantise_blocks", self.call)

    def bind(self) -> None:
        """Make it the thread's."""
        self.bound.is_now = True

    def call(self, *_arguments: object) -> None:
        """Refuse a thread without it, as the driver does."""
        self.loads += 1
        if not hasattr(self.bound, "is_now"):
            raise EngineError("cuStreamGetCtx: invalid device context")
        if self.fails is not None:
            raise self.fails


def test_a_thread_without_a_context_gets_one_before_the_driver_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(monkeypatch)
    assert _kernel.is_loaded("cuda:0")
    failed = []

    def other() -> None:
        try:
            _kernel.launch(torch.zeros(1, 8, 8), None, (0, 0, 8, 8), torch.zeros(1, 1, 1), powers_of_two=False)
        except EngineError as error:
            failed.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert not failed
    assert context.loads == 2


def test_a_kernel_that_could_not_be_loaded_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(monkeypatch)
    context.fails = EngineError("cuModuleLoadData: out of memory")
    assert not _kernel.is_loaded("cuda:0")
    context.fails = None
    assert _kernel.is_loaded("cuda:0")
    context.fails = Unavailable("CUDA is not available")
    for _ in range(2):
        assert not _kernel.is_loaded("cuda:1")
    assert context.loads == 3


@pytest.mark.parametrize("elsewhere", ["values", "scales"])
def test_memory_on_another_device_is_not_the_kernels(elsewhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(_kernel, "is_loaded", lambda _device: True)
    monkeypatch.setattr(_kernel, "launch", lambda *arguments, **_named: launched.append(arguments))
    devices = {"values": "cpu", "scales": "cpu"}
    for meta in ({}, {elsewhere: "meta"}):
        devices |= meta
        values = torch.zeros(1, 8, 8, dtype=torch.float8_e4m3fn, device=devices["values"])
        scales = torch.zeros(1, 1, 1, device=devices["scales"])
        _quantise.blocks_into(torch.ones(1, 8, 8), values, (0, 0, 8, 8), scales, powers_of_two=False)
    assert len(launched) == 1


@pytest.mark.gpu
@gpu
def test_a_new_thread_rounds_on_the_gpu() -> None:
    tensor, found = torch.randn(128, 128, device="cuda"), []
    thread = threading.Thread(target=lambda: found.append(weights.quantise(tensor)))
    thread.start()
    thread.join()
    for one, other in zip(found[0], weights.quantise(tensor.cpu()), strict=True):
        assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))
