"""Where the time inside of dispatch and combine goes: needs GPUs and a library built with -DPUTGET_TRACE=ON.

    cmake -S . -B build-trace -DPUTGET_CUDA=ON -DPUTGET_TRACE=ON && cmake --build build-trace
    PUTGET_LIBRARY=build-trace/libputget.so PYTHONPATH=python python tests/gpu/stages.py --ranks 4 --tokens 1,8,64,512

Prints nanoseconds from the first CTA's start to each stage of native/protocol/round/stage.h, for the first CTA / the
one that comes last (medians over replays, rank 0), the time of a pair, which the marks themselves lengthen a little,
and from dispatch's first CTA to combine's.
Random routing, a DeepSeek-V3 shape, FP8 rows out; BF16 rows back, or FP8 with --fp8_back.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import putget
from putget import hardware

# Stage of native/protocol/round/stage.h, in its order.
STAGES = ("start", "woken", "state", "waited", "put", "published", "observed", "done")
IN_COMBINE = ("start", "woken", "state", "published", "observed", "done")
IN_SENTINEL = ("start", "woken", "state", "published", "done")  # nobody waits for flags
WHERE = {"dispatch": STAGES, "combine": IN_COMBINE, "sentinel_combine": IN_SENTINEL}
HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
LEADING, PAIRS, REPLAYS = 4, 20, 30


def stages(library: ctypes.CDLL, kernel: str) -> tuple[int, dict[str, tuple[int, int]]]:
    """When the last `kernel` on this rank began ("dispatch", "combine", "sentinel_combine"), in ns of the GPU's timer.

    And nanoseconds from then on by stage: of the first CTA, of the last one.
    """
    stamps = (ctypes.c_uint64 * (2 * len(STAGES)))()
    status = getattr(library, f"putget_stages_of_{kernel}")(stamps)
    if status != 0:
        raise RuntimeError(f"reading the stages of {kernel}: CUDA error {status}")
    first, last = stamps[: len(STAGES)], stamps[len(STAGES) :]
    return first[0], {
        name: (first[i] - first[0], last[i] - first[0]) for i, name in enumerate(STAGES) if name in WHERE[kernel]
    }


def medians(readings: list[dict[str, tuple[int, int]]]) -> str:
    """Each stage's name and its median over the readings: first CTA / last CTA."""
    columns = {name: zip(*(one[name] for one in readings), strict=True) for name in readings[0]}
    middles = {name: [str(int(statistics.median(column))) for column in both] for name, both in columns.items()}
    return "  ".join(f"{name} {'/'.join(both)}" for name, both in middles.items())


def run(rank: int, ranks: int, batches: list[int], port: int, sentinel_rows: bool | None, fp8_back: bool) -> None:
    """One rank: a graph of back-to-back pairs per batch size, replayed; rank 0 prints."""
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    library = ctypes.CDLL(hardware.build().library)
    a2a = putget.AllToAll(
        putget.Communicator(),
        num_experts=EXPERTS,
        top_k=TOP_K,
        max_tokens_per_rank=max(batches),
        payloads=[putget.Payload((HIDDEN,), torch.float8_e4m3fn), putget.Payload((HIDDEN // 128,), torch.float32)],
        output=putget.Payload((HIDDEN,), torch.bfloat16),
        timeout_s=10.0,
        combine_dtype=torch.float8_e4m3fn if fp8_back else None,
        tuning=putget.tuning.Tuning(combine=putget.tuning.Launch(sentinel_rows=sentinel_rows)),
    )
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for tokens in batches:
            generator = torch.Generator().manual_seed(rank)
            ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)])
            sent = (
                ids.int().cuda(),
                torch.rand(tokens, TOP_K, generator=generator).cuda(),
                torch.randn(tokens, HIDDEN, generator=generator).cuda().to(torch.float8_e4m3fn),
                torch.rand(tokens, HIDDEN // 128, generator=generator).cuda(),
            )
            out = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
            a2a.dispatch(*sent)
            a2a.combine(out=out)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
            with torch.cuda.graph(graph, stream=stream):
                for pair in range(LEADING + PAIRS):
                    if pair == LEADING:  # the ranks have met by now
                        begin.record(stream)
                    a2a.dispatch(*sent)
                    a2a.combine(out=out)
                end.record(stream)
            pairs: list[float] = []
            between: list[int] = []
            combine = "sentinel_combine" if a2a.launches(tokens)[1].sentinel_rows else "combine"
            seen: dict[str, list[dict[str, tuple[int, int]]]] = {"dispatch": [], combine: []}
            for _ in range(REPLAYS):
                dist.barrier()
                graph.replay()
                stream.synchronize()
                pairs.append(begin.elapsed_time(end) * 1e3 / PAIRS)
                begun = {}
                for kernel, readings in seen.items():
                    begun[kernel], reading = stages(library, kernel)
                    readings.append(reading)
                between.append(begun[combine] - begun["dispatch"])
            if rank == 0:
                later = int(statistics.median(between))
                print(f"{tokens} tokens a rank: pair {statistics.median(pairs):.2f} us, combine begins at {later} ns")
                for kernel, readings in seen.items():
                    print(f"  {kernel:<15} {medians(readings)}")
    a2a.check()
    dist.barrier()
    a2a.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--tokens", default="1,8,64,512", help="tokens a rank, comma-separated")
    parser.add_argument(
        "--sentinel_rows", action=argparse.BooleanOptionalAction, help="putget.tuning.Launch.sentinel_rows of combine"
    )
    parser.add_argument("--fp8_back", action="store_true", help="combine's rows travel as block-scaled FP8")
    parser.add_argument("--port", type=int, default=29511)
    args = parser.parse_args()
    batches = [int(batch) for batch in args.tokens.split(",")]
    if not 1 <= args.ranks <= torch.cuda.device_count():
        print(f"--ranks is {args.ranks}, there are {torch.cuda.device_count()} GPUs", file=sys.stderr)
        return 2
    if not hasattr(ctypes.CDLL(hardware.build().library), "putget_stages_of_dispatch"):
        print(f"{hardware.build().library} was not built with -DPUTGET_TRACE=ON", file=sys.stderr)
        return 2
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    mp.spawn(run, args=(args.ranks, batches, args.port, args.sentinel_rows, args.fp8_back), nprocs=args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
