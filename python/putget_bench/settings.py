"""The flags of `putget bench`, checked and resolved to what will run."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from putget import Network, Payload, hardware, workspace_bytes
from putget_bench import profiles, routing

BACKENDS = ("nvlink_one_sided",)
DEVICES = ("auto", "cpu", "cuda")
COMBINE_DTYPES = ("bfloat16", "float16", "float32", "fp8_block")
FP8_PACK = 16  # a row in FP8 has a multiple of this many values
PEERS = ("nccl", "flashinfer", "deepep")
MAX_EP_SIZE = 128
MAX_TOP_K = 32
MAX_HIDDEN_SIZE = 2**20
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class Settings:
    """The settings of one run of the bench. Plain values: every rank gets a copy.

    Attributes:
        batches: tokens a rank, ascending; every rank has the same number.
        router: "random", "perfect" or "file".
        iters: timed iterations of every size.
        warmup: iterations before them.
        flush: what empties the caches before a dispatch, one of `timing.FLUSHES`.
        peers: contenders beside putget, by name.
        ablate: groups of variants of putget beside it, by name.
        no_sync: putget waits for nobody, being a library without waits; its results are not looked at.
        network: provider of the network between domains; None: all ranks are one domain.
        domain_size: ranks of a domain; None: those of a host.
    """

    backend: str
    device: str
    ep_size: int
    profile: str
    hidden_size: int
    top_k: int
    num_experts: int
    quant: str
    payload_dtype: str
    combine_dtype: str
    batches: tuple[int, ...]
    max_tokens_per_rank: int
    iters: int
    warmup: int
    seed: int
    router: str
    routing_file: str | None
    num_sms: int | None
    cuda_graph: bool
    flush: str
    kernel_breakdown: bool
    iter_stats: bool
    peers: tuple[str, ...]
    ablate: tuple[str, ...]
    no_sync: bool
    network: str | None
    domain_size: int | None

    def payloads(self) -> list[Payload]:
        """The bytes that dispatch carries for one token."""
        return profiles.payloads(self.quant, self.hidden_size, profiles.ROW_DTYPES[self.payload_dtype])

    def output(self) -> Payload:
        """The row that experts write and combine reduces; what crosses in FP8 is written as BF16."""
        dtype = torch.bfloat16 if self.combine_is_fp8 else profiles.ROW_DTYPES[self.combine_dtype]
        return Payload((self.hidden_size,), dtype)

    def combine_options(self) -> dict[str, Any]:
        """The arguments of `putget.AllToAll` that say how combine's rows travel."""
        return {"combine_dtype": torch.float8_e4m3fn} if self.combine_is_fp8 else {}

    def make_network(self) -> Network | None:
        """The network that joins the domains of `putget.Communicator`."""
        return None if self.network is None else Network(self.network, domain_size=self.domain_size)

    @property
    def combine_is_fp8(self) -> bool:
        """Whether combine brings rows back as FP8."""
        return self.combine_dtype.startswith("fp8")

    def make_router(self) -> routing.Router:
        """The expert choices of every rank."""
        if self.routing_file is not None:
            return routing.recorded_router(routing.read_routing_file(Path(self.routing_file)), self.ep_size)
        if self.router == "perfect":
            return routing.perfect_router(self.num_experts, self.top_k, self.ep_size)
        return routing.random_router(self.num_experts, self.top_k, self.seed)


def batch_sizes(first: int, last: int, step: int | None, factor: int | None) -> tuple[int, ...]:
    """The sizes from first to last: by a step, or by a factor (2 if neither is given).

    Raises:
        ValueError: if a number is out of range or both are given.
    """
    if first < 0:
        raise ValueError(f"-b must be 0 or more, got {first}")
    if last < first:
        raise ValueError(f"-e must be at least the first batch size {first} (-b), got {last}")
    if step is not None and factor is not None:
        raise ValueError(f"-i (step, {step}) and -f (factor, {factor}) exclude each other")
    if step is not None:
        if step < 1:
            raise ValueError(f"-i must be 1 or more, got {step}")
        return tuple(range(first, last + 1, step))
    factor = 2 if factor is None else factor
    if factor < 2:
        raise ValueError(f"-f must be 2 or more, got {factor}")
    sizes = [first]
    while (following := max(1, sizes[-1] * factor)) <= last:
        sizes.append(following)
    return tuple(sizes)


def _check_waits(no_sync: bool) -> None:
    """Only a library of its own has no waits, and what it gives is wrong: neither is used by accident."""
    without = hardware.build().ablated == "waits"
    if no_sync and not without:
        raise ValueError(
            "--no_sync needs a library that is built without waits: cmake -S . -B build/no_waits -DPUTGET_ABLATE=waits "
            "&& cmake --build build/no_waits, then PUTGET_LIBRARY=build/no_waits/libputget.so"
        )
    if without and not no_sync:
        raise ValueError("this library is built without waits and gives wrong results: use another, or --no_sync")


def _check_num_sms(num_sms: int | None, on_cpu: bool) -> None:
    if num_sms is None:
        return
    if on_cpu:
        raise ValueError(f"--num_sms {num_sms} needs --device cuda, this run is on the CPU")
    most = min((gpu.num_sms for gpu in hardware.gpus()), default=0)
    if not 1 <= num_sms <= most:
        raise ValueError(f"--num_sms must be 1 to {most}, what the GPUs here have, got {num_sms}")


def _resolve_network(args: argparse.Namespace, device: str, ep_size: int, world_size: int | None) -> str | None:
    """The provider; None where no flag asks for domains."""
    if args.network is None and args.domain_size is None:
        return None
    asked = f"--network {args.network}" if args.network is not None else f"--domain_size {args.domain_size}"
    if device != "cpu":
        raise ValueError(f"{asked} needs --device cpu: domains of GPUs are not timed in this version")
    if args.no_sync:
        raise ValueError(f"{asked} and --no_sync exclude each other")
    if args.domain_size is None and world_size is None:
        raise ValueError(f"{asked} needs --domain_size, since all ranks are on this host")
    if args.domain_size is not None and not 1 <= args.domain_size < ep_size:
        raise ValueError(f"--domain_size must be 1 to {ep_size - 1}, below --ep_size {ep_size}, got {args.domain_size}")
    return str(args.network or "auto")


def resolve(args: argparse.Namespace, world_size: int | None) -> Settings:
    """Checks every flag against the others and the machine, and fills in what was left out.

    Args:
        args: the parsed flags.
        world_size: ranks that a launcher (torchrun, srun) has started, or None.

    Raises:
        ValueError: naming the flag, its value and what is allowed.
    """
    _check_waits(args.no_sync)
    device = resolve_device(args.device, args.ep_size)
    ep_size = resolve_ep_size(args.ep_size, device, world_size, emulates=True)
    on_cpu = device == "cpu"
    in_turns = on_cpu or share_gpus(device, ep_size) is not None  # ranks that take turns: few iterations
    shape, router = _resolve_shape(args)
    _check_shape(shape, ep_size, router)
    if args.payload_dtype is not None and shape.quant != "bf16":
        raise ValueError(
            f"--payload_dtype {args.payload_dtype} is for unquantised rows (--quant bf16), got --quant {shape.quant}"
        )
    if args.combine_dtype.startswith("fp8") and shape.hidden_size % FP8_PACK:
        raise ValueError(
            f"--hidden_size must be a multiple of {FP8_PACK} for --combine_dtype {args.combine_dtype}, got "
            f"{shape.hidden_size}"
        )
    profiles.payloads(shape.quant, shape.hidden_size)
    batches = _resolve_batches(args, 64 if in_turns else 2048)
    capacity = args.max_tokens_per_rank if args.max_tokens_per_rank is not None else max(1, batches[-1])
    if capacity < max(1, batches[-1]):
        raise ValueError(f"--max_tokens_per_rank must be at least the largest batch {batches[-1]} (-e), got {capacity}")
    _check_num_sms(args.num_sms, on_cpu)
    iters = args.iters if args.iters is not None else (20 if in_turns else 100)
    warmup = args.warmup if args.warmup is not None else (3 if in_turns else 20)
    for flag, value, least in (
        ("--iters", iters, 1), ("--warmup", warmup, 0), ("--seed", args.seed, 0)
    ):  # fmt: skip
        if value < least:
            raise ValueError(f"{flag} must be {least} or more, got {value}")
    if args.seed > MAX_SEED:
        raise ValueError(f"--seed must be at most {MAX_SEED}, got {args.seed}")
    settings = Settings(
        backend=args.backend,
        device=device,
        ep_size=ep_size,
        profile=args.profile,
        hidden_size=shape.hidden_size,
        top_k=shape.top_k,
        num_experts=shape.num_experts,
        quant=shape.quant,
        payload_dtype=args.payload_dtype or "bfloat16",
        combine_dtype=args.combine_dtype,
        batches=batches,
        max_tokens_per_rank=capacity,
        iters=iters,
        warmup=warmup,
        seed=args.seed,
        router=router,
        routing_file=args.routing_file,
        num_sms=args.num_sms,
        cuda_graph=not args.no_cuda_graph and not on_cpu,
        flush="none" if on_cpu or args.no_flush_l2 else "overwrite",
        kernel_breakdown=args.kernel_breakdown,
        iter_stats=args.iter_stats,
        peers=_resolve_peers(args.peers, device, ep_size),
        ablate=_resolve_ablate(args),
        no_sync=args.no_sync,
        network=_resolve_network(args, device, ep_size, world_size),
        domain_size=args.domain_size,
    )
    # The library's own limits on sizes, asked before any rank is started.
    workspace_bytes(
        ep_size=ep_size,
        max_tokens_per_rank=capacity,
        top_k=shape.top_k,
        payloads=settings.payloads(),
        output=settings.output(),
        num_experts=shape.num_experts,
        **settings.combine_options(),
    )
    return settings


def resolve_device(device: str, ep_size: int | None) -> str:
    """Where to run, "cuda" or "cpu"; "auto" takes the GPUs where there are enough of them.

    Raises:
        ValueError: if CUDA was asked for and cannot be used, with the reason.
    """
    num_gpus = len(hardware.gpus())
    if device == "cuda" and num_gpus == 0:
        why = hardware.why_no_cuda() or "no GPU found"
        raise ValueError(f"--device cuda cannot be used here ({why}), use --device cpu")
    if device != "auto":
        return device
    return "cuda" if num_gpus >= (ep_size or 1) else "cpu"


def why_cpu(asked: str, device: str, ep_size: int) -> str | None:
    """The note before a run on the CPU that nobody asked for, where there are GPUs; None elsewhere."""
    num_gpus = len(hardware.gpus())
    if asked != "auto" or device != "cpu" or num_gpus == 0:
        return None
    gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    return (
        f"These figures will be the CPU's: --ep_size {ep_size} is more than the {gpus} here. "
        f"--device cuda --ep_size {num_gpus} runs there; --device cuda alone emulates the ranks on {gpus}."
    )


def share_gpus(device: str, ep_size: int) -> str | None:
    """The note before a run of ranks that take turns on GPUs; None where each has one, or none."""
    num_gpus = len(hardware.gpus())
    if device != "cuda" or ep_size <= num_gpus:
        return None
    gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    return (
        f"{ep_size} ranks take turns on {gpus}: results are those of {ep_size} GPUs, and every one is checked; "
        "the times say nothing about them."
    )


def _resolve_peers(names: str | None, device: str, ep_size: int) -> tuple[str, ...]:
    found = _resolve_names("--peers", names, PEERS)
    if found and share_gpus(device, ep_size) is not None:
        raise ValueError(f"--peers {','.join(found)} needs a GPU for each rank, got --ep_size {ep_size}")
    return found


def resolve_ep_size(ep_size: int | None, device: str, world_size: int | None, emulates: bool = False) -> int:
    """The number of ranks: the launcher's, the one asked for, or what fits the machine.

    Args:
        ep_size: The one asked for.
        device: "cuda" or "cpu".
        world_size: The launcher's.
        emulates: Whether ranks may share GPUs.

    Raises:
        ValueError: if it is out of range, differs from the launcher's, or there are too few GPUs.
    """
    num_gpus = len(hardware.gpus())
    if ep_size is None:
        ep_size = world_size or (num_gpus if device == "cuda" else 4)
    if not 1 <= ep_size <= MAX_EP_SIZE:
        raise ValueError(f"--ep_size must be 1 to {MAX_EP_SIZE}, got {ep_size}")
    if world_size is not None and ep_size != world_size:
        raise ValueError(f"--ep_size must be what the launcher started, {world_size}, got {ep_size}")
    if device == "cuda" and world_size is None and ep_size > num_gpus and not emulates:
        raise ValueError(f"--ep_size must be at most {num_gpus}, the GPUs here, got {ep_size}; or use --device cpu")
    return ep_size


def _resolve_shape(args: argparse.Namespace) -> tuple[profiles.Profile, str]:
    """The layer's shape and the kind of router: flags win over a routing file, which wins over the profile."""
    profile = profiles.PROFILES[args.profile]
    top_k, num_experts, router = profile.top_k, profile.num_experts, "perfect" if args.perfect_router else "random"
    if args.routing_file is not None:
        if args.perfect_router:
            raise ValueError(f"--perfect_router and --routing_file {args.routing_file} exclude each other")
        recorded = routing.read_routing_file(Path(args.routing_file))
        top_k, num_experts, router = recorded.shape[1], int(recorded.max()) + 1, "file"
        if args.top_k is not None and args.top_k != top_k:
            raise ValueError(f"--top_k must be that of --routing_file, {top_k}, got {args.top_k}")
        if args.num_experts is not None and args.num_experts < num_experts:
            raise ValueError(f"--num_experts must be at least {num_experts} for --routing_file, got {args.num_experts}")
    return (
        profiles.Profile(
            hidden_size=profile.hidden_size if args.hidden_size is None else args.hidden_size,
            top_k=top_k if args.top_k is None else args.top_k,
            num_experts=num_experts if args.num_experts is None else args.num_experts,
            quant=profile.quant if args.quant is None else args.quant,
        ),
        router,
    )


def _check_shape(shape: profiles.Profile, ep_size: int, router: str) -> None:
    if not 1 <= shape.hidden_size <= MAX_HIDDEN_SIZE:
        raise ValueError(f"--hidden_size must be 1 to {MAX_HIDDEN_SIZE}, got {shape.hidden_size}")
    if not 1 <= shape.top_k <= MAX_TOP_K:
        raise ValueError(f"--top_k must be 1 to {MAX_TOP_K}, got {shape.top_k}")
    if shape.num_experts < shape.top_k:
        raise ValueError(f"--num_experts must be at least --top_k {shape.top_k}, got {shape.num_experts}")
    if router == "perfect" and math.ceil(shape.num_experts / math.ceil(shape.num_experts / ep_size)) < ep_size:
        raise ValueError(
            f"--perfect_router needs experts on every rank: --num_experts {shape.num_experts} leaves some of "
            f"--ep_size {ep_size} without"
        )


def _resolve_names(flag: str, text: str | None, allowed: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))
    for name in names:
        if name not in allowed:
            raise ValueError(f"{flag} must be a comma-separated list of {_any_of(allowed)}, got {name!r}")
    return names


def _resolve_ablate(args: argparse.Namespace) -> tuple[str, ...]:
    if args.command != "ablate":
        return ()
    return _resolve_names("--only", args.only, args.groups) or args.groups


def _resolve_batches(args: argparse.Namespace, usual_last: int) -> tuple[int, ...]:
    if args.batches is None:
        first = 1 if args.first is None else args.first
        last = max(first, usual_last) if args.last is None else args.last
        return batch_sizes(first, last, args.step, args.factor)
    for flag, value in (("-b", args.first), ("-e", args.last), ("-i", args.step), ("-f", args.factor)):
        if value is not None:
            raise ValueError(f"--batches {args.batches} and {flag} {value} exclude each other")
    parts = [part.strip() for part in args.batches.split(",")]
    sizes = tuple(int(part) for part in parts if part.isdecimal())
    if len(sizes) != len(parts) or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"--batches must be ascending numbers of tokens, comma-separated, got {args.batches!r}")
    return sizes


def _any_of(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + " or " + names[-1] if len(names) > 1 else names[0]
