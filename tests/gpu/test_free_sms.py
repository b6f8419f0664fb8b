"""With few SMs free a round goes on, if the CTAs that wait fit on them together: docs/guides/overlap.md has the table.

One rank alone on its GPU, so that no other rank's kernels take places. Somebody else's kernel holds all SMs but some.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import putget

pytestmark = pytest.mark.timed

HIDDEN, TOP_K, EXPERTS = 7168, 8, 32
TIMEOUT_S = 1.0
FP8 = torch.float8_e4m3fn
LADDER = (1, 2, 4, 8, 16, 32, 64, 96)


@dataclass(frozen=True)
class Way:
    """One way through a round.

    Attributes:
        tokens: of the batch.
        fp8: rows travel back quantised, also a rank's own: combine waits for them.
        sentinel_rows: whether rows come so, or are got.
        num_sms: the caller's bound.
    """

    tokens: int
    fp8: bool
    sentinel_rows: bool
    num_sms: int | None = None


WAYS = {
    "got rows": Way(512, False, False),
    "got rows, 4 SMs": Way(512, False, False, 4),
    "sentinel rows, all CTAs send and sum": Way(8, True, True),
    "sentinel rows, more CTAs that send and sum": Way(32, True, True),
    "sentinel rows, half of the CTAs leave": Way(512, True, True),
    "sentinel rows, 4 SMs": Way(32, True, True, 4),
}


class Hog:
    """Holds SMs by a kernel of its own."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.putget_hold_sms.argtypes = [ctypes.c_uint, ctypes.c_ulonglong]

    def hold(self, sms: int) -> None:
        assert self._library.putget_hold_sms(sms, int(20e9)) == 0

    def let_go(self) -> None:
        assert self._library.putget_let_sms_go() == 0


@pytest.fixture(scope="module")
def hog(tmp_path_factory: pytest.TempPathFactory) -> Hog:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc on PATH")
    library = tmp_path_factory.mktemp("hog") / "libhog.so"
    source = Path(__file__).with_name("hog.cu")
    command = [nvcc, "-shared", "-Xcompiler", "-fPIC", "-arch=sm_90", "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Hog(library)


def resident_ctas(way: Way, dispatch: putget.tuning.Launch, combine: putget.tuning.Launch) -> int:
    """CTAs of one kernel that must have places together, so that those which wait do not keep out those waited for.

    Dispatch: the first CTA waits for all others, which wait for nobody of their rank. Got rows: the first CTA is all
    that a peer waits for. Sentinel rows: a CTA that sends and then sums waits for all others that send.
    """
    of_dispatch = min(dispatch.blocks or 1, 2)
    if not way.sentinel_rows:
        return of_dispatch
    if (combine.splits or 1) > 1:
        return max(of_dispatch, (combine.blocks or 1) - (combine.senders or 0))
    return max(of_dispatch, (combine.blocks or 1) if combine.senders == combine.blocks else 2)


class Round:
    """One object and the tensors of its rounds: nothing is allocated while SMs are held."""

    def __init__(self, way: Way) -> None:
        (self._comm,) = putget.Communicator.local(1)
        generator = torch.Generator(device="cuda").manual_seed(1)
        scores = torch.rand(way.tokens, EXPERTS, device="cuda", generator=generator)
        self._ids = scores.topk(TOP_K).indices.int()
        self._weights = torch.rand(way.tokens, TOP_K, device="cuda", generator=generator)
        self._rows = torch.randn(way.tokens, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator)
        self._out = torch.empty_like(self._rows)
        self.a2a = putget.AllToAll(
            self._comm,
            num_experts=EXPERTS,
            top_k=TOP_K,
            max_tokens_per_rank=way.tokens,
            payloads=[putget.Payload((HIDDEN,), torch.bfloat16)],
            output=putget.Payload((HIDDEN,), torch.bfloat16),
            combine_dtype=FP8 if way.fp8 else None,
            tuning=putget.tuning.Tuning(combine=putget.tuning.Launch(sentinel_rows=way.sentinel_rows)),
            device="cuda",
            num_sms=way.num_sms,
            timeout_s=TIMEOUT_S,
            warmup_timeout_s=60.0,
        )
        self.run()
        self.want = self._out.clone()

    def run(self) -> None:
        received = self.a2a.dispatch(self._ids, self._weights, self._rows)
        self.a2a.combine_input.copy_(received.payloads[0])
        self.a2a.combine(out=self._out)
        self.a2a.check()

    def goes_on(self, hog: Hog, free: int) -> bool:
        """Whether a round ends, with the right rows, while all SMs but `free` are held."""
        gpu_sms = torch.cuda.get_device_properties(0).multi_processor_count
        self._out.zero_()
        torch.cuda.synchronize()
        hog.hold(gpu_sms - free)
        try:
            self.run()
        except putget.PeerTimeout:
            return False
        finally:
            hog.let_go()
        assert torch.equal(self._out, self.want)
        return True

    def close(self) -> None:
        self.a2a.close()
        self._comm.close()


@pytest.mark.parametrize("name", WAYS)
def test_a_round_goes_on_where_its_waiting_ctas_fit(name: str, hog: Hog, capsys: pytest.CaptureFixture[str]) -> None:
    way = WAYS[name]
    with torch.cuda.stream(torch.cuda.Stream()):
        probe = Round(way)
        dispatch, combine = probe.a2a.launches(way.tokens)
        assert combine.sentinel_rows == way.sentinel_rows
        needed = resident_ctas(way, dispatch, combine)
        assert probe.goes_on(hog, needed), f"{needed} SMs are enough for {dispatch}, {combine}"
        probe.close()
        least = needed
        for free in LADDER:
            if free >= needed:
                break
            one = Round(way)
            goes_on = one.goes_on(hog, free)
            one.close()
            if goes_on:
                least = free
                break
    with capsys.disabled():
        print(
            f"\n{name}: {way.tokens} tokens; dispatch {dispatch.blocks} x {dispatch.threads}, "
            f"combine {combine.blocks} x {combine.threads}, {combine.senders} send, splits {combine.splits}: "
            f"needs {needed} SMs at most, went on with {least}"
        )
    assert least <= needed


def test_a_green_context_bounds_launches() -> None:
    """SMs are counted as the stream's green context leaves them, and rounds on it have the same bits."""
    driver = pytest.importorskip("cuda.bindings.driver")

    def done(answer: tuple[object, ...]) -> object:
        assert answer[0] == driver.CUresult.CUDA_SUCCESS, answer
        return answer[1] if len(answer) == 2 else answer[1:]

    whole = Round(Way(512, True, True))
    device = done(driver.cuDeviceGet(0))
    sms = done(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    parts, _, _ = done(driver.cuDevSmResourceSplitByCount(1, sms, 0, 16))
    described = done(driver.cuDevResourceGenerateDesc(parts, 1))
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    green = done(driver.cuGreenCtxCreate(described, device, flags))
    stream = done(driver.cuGreenCtxStreamCreate(green, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
    allowed = parts[0].sm.smCount
    try:
        with torch.cuda.stream(torch.cuda.ExternalStream(int(stream))):
            launches = whole.a2a.launches(512)
            assert max(launch.blocks or 0 for launch in launches) <= allowed
            whole.run()
            torch.cuda.current_stream().synchronize()
            assert torch.equal(whole._out, whole.want)
        assert max(launch.blocks or 0 for launch in whole.a2a.launches(512)) > allowed
    finally:
        whole.close()
        done((*driver.cuStreamDestroy(stream), None))
        done((*driver.cuGreenCtxDestroy(green), None))
