"""A made-up report, as a run on GPUs would give it."""

from __future__ import annotations

from typing import Any

MARKS = ("min", "p01", "p05", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "max", "mean")


def phase(latency_us: float, ratio: float) -> dict[str, Any]:
    return {
        "latency_us": latency_us,
        "algorithm_gbps": 400 / latency_us,
        "wire_bytes": 350_000,
        "wire_gbps": 350 / latency_us,
        "ceiling_fraction": 1 / latency_us,
        "floor_us": 4.0,
        "ratio": ratio,
        "num_readings": 100,
        "percentiles_us": {mark: latency_us + i for i, mark in enumerate(MARKS)},
    }


def contender(name: str, scale: float) -> dict[str, Any]:
    times = {"dispatch": 7.5 * scale, "combine": 8.25 * scale, "pair": 9.125 * scale}
    return {
        "name": name,
        "group": None,
        "changes": None,
        **{key: phase(value, 1 / scale) for key, value in times.items()},
        "kernels": [
            {
                "name": f"kernel of {name} " + "<template>" * 9,
                "calls": 20,
                "mean_us": 6 * scale,
                "median_us": 5.5 * scale,
            }
        ],
    }


def gpu_document() -> dict[str, Any]:
    sizes = []
    for batch_size in (0, 1, 64):
        scale = max(1, batch_size / 8)
        sizes.append({
            "batch_size": batch_size,
            "checked": True,
            "bytes": {
                "dispatch": 1024.0 * batch_size,
                "combine": 2048.0 * batch_size,
                "dispatch_per_pair": 2048.0 * batch_size,
                "combine_per_pair": 4096.0 * batch_size,
                "all_gather": 4096.0 * batch_size,
                "reduce_scatter": 8192.0 * batch_size,
                "dispatch_algorithm": 2048.0 * batch_size,
                "combine_algorithm": 4096.0 * batch_size,
                "token_major_memory": 1 << 20,
                "expert_major_memory": 32 << 20,
            },
            "contenders": [contender("putget", scale), contender("nccl AG+RS", 2 * scale)],
        })  # fmt: skip
    return {
        "schema": "putget.bench/2",
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789ab",
        "versions": {
            "putget": "0.1.0",
            "native": "0.1.0",
            "native_has_cuda": True,
            "python": "3.12.1",
            "torch": "2.11.0",
            "cuda": "13.0",
            "nccl": "2.28.9",
        },
        "machine": {
            "os": "Linux 6.1",
            "arch": "x86_64",
            "cpu": "some processor",
            "cores": 64,
            "memory_bytes": 1 << 39,
            "gpus": [{"name": "NVIDIA H200", "compute_capability": [9, 0], "num_sms": 132, "total_bytes": 1 << 37}] * 8,
            "driver": "580.0",
        },
        "command": ["putget", "bench", "--ep_size", "8"],
        "config": {
            "backend": "nvlink_one_sided",
            "device": "cuda",
            "ep_size": 8,
            "profile": "deepseek_v3",
            "hidden_size": 7168,
            "top_k": 8,
            "num_experts": 256,
            "quant": "fp8",
            "payload_dtype": "bfloat16",
            "combine_dtype": "bfloat16",
            "batches": [0, 1, 64],
            "max_tokens_per_rank": 64,
            "iters": 100,
            "warmup": 20,
            "seed": 0,
            "router": "random",
            "routing_file": None,
            "num_sms": 16,
            "cuda_graph": True,
            "flush": "matmul",
            "kernel_breakdown": True,
            "iter_stats": True,
            "peers": ["nccl", "deepep"],
            "ablate": [],
            "no_sync": False,
            "network": None,
            "domain_size": None,
        },
        "row_bytes": {"dispatch": 7456, "combine": 14336},
        "timing": {
            "clock": "cuda events",
            "statistic": "median over iterations of the slowest rank",
            "cuda_graph": True,
            "flush": "matmul",
            "empty_us": 3.0,
        },
        "peers": [
            {"name": "nccl", "status": "measured", "detail": "NCCL 2.28.9"},
            {"name": "deepep", "status": "absent", "detail": "the Python package deep_ep is not installed"},
        ],
        "ceiling": {"write_gbps": 343.0, "read_gbps": 325.0, "barrier_us": 2.5, "bytes_per_peer": 1 << 26},
        "workspace": "a map",
        "results": sizes,
        "mismatches": [],
    }
