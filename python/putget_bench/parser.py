"""The flags of the `putget` command. What a subcommand imports is imported when it runs: here stands its name."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

import putget

_USAGE = 2


class Parser(argparse.ArgumentParser):
    """Errors point to the help of the command that has them, which is ``parser`` of what is parsed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        """Ends the program with the message and the command whose help says more."""
        self.exit(_USAGE, f"{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")


def build_parser() -> Parser:
    """The parser of all subcommands."""
    parser = Parser(prog="putget", description="One-sided dispatch and combine for mixture-of-experts inference.")
    parser.add_argument("--version", action="version", version=f"putget {putget.__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="{bench,ablate,balance,simulate,serve,serve-bench,doctor,roofline,demo}"
    )
    _add_bench(commands.add_parser("bench", help="time dispatch and combine", allow_abbrev=False))
    _add_ablate(commands.add_parser("ablate", help="what each idea of putget is worth", allow_abbrev=False))
    _add_balance(commands.add_parser("balance", help="where experts lie: plan, simulate, show", allow_abbrev=False))
    _add_simulate(commands.add_parser("simulate", help="groups that span hosts, in virtual time", allow_abbrev=False))
    _add_serve(commands.add_parser("serve", help="a transformers model behind an OpenAI interface", allow_abbrev=False))
    _add_serve_bench(commands.add_parser("serve-bench", help="what clients of a server see", allow_abbrev=False))
    _add_doctor(commands.add_parser("doctor", help="what this machine can do, and what is missing", allow_abbrev=False))
    _add_roofline(commands.add_parser("roofline", help="measure the link", allow_abbrev=False))
    _add_demo(commands.add_parser("demo", help="a DeepSeek-V3-shaped layer, checked and timed", allow_abbrev=False))
    return parser


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    from putget_bench import settings

    parser.add_argument("--ep_size", type=int, metavar="N", help="ranks (the GPUs here, or 4 on the CPU)")
    parser.add_argument("--device", choices=settings.DEVICES, default="auto", help="where the ranks run (%(default)s)")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from putget.group.domains import GROUP_PROVIDERS, HOST_PROVIDERS
    from putget_bench import settings

    parser.description = (
        "Times dispatch, combine, and the two back to back. Every size is checked against the reference before it is "
        "timed. Starts its own ranks; works under torchrun and srun too."
    )
    _add_run(parser)
    add = parser.add_argument
    add("--peers", metavar="LIST", help=f"others to time in the same run, comma-separated: {', '.join(settings.PEERS)}")
    add("--plot", metavar="FILE", help="draw latency and bandwidth over batch size (.png, .svg, .pdf)")
    of_cpus = [provider for provider in GROUP_PROVIDERS if provider in HOST_PROVIDERS]
    add("--network", choices=of_cpus, help="joins domains of CPU ranks (none; with --domain_size: auto)")
    add(
        "--domain_size",
        type=int,
        metavar="N",
        help="ranks of a domain; the last one has what is left (those of a host)",
    )
    parser.set_defaults(module="run_bench")


def _add_ablate(parser: argparse.ArgumentParser) -> None:
    from putget_bench.variants import GROUPS

    parser.description = (
        "Times putget as it is by default, and variants of it that do one thing differently, in turns in one run. "
        "Every variant is checked against the reference at every size."
    )
    _add_run(parser)
    groups = ", ".join(GROUPS)
    parser.add_argument("--only", metavar="LIST", help=f"groups of variants, comma-separated: {groups} (all)")
    parser.set_defaults(module="run_bench", peers=None, plot=None, network=None, domain_size=None, groups=tuple(GROUPS))


def _add_run(parser: argparse.ArgumentParser) -> None:
    """The flags of a run: shape, sizes, timing, report."""
    from putget_bench import profiles, settings

    add = parser.add_argument
    add("--backend", choices=settings.BACKENDS, default=settings.BACKENDS[0], help="what is timed (%(default)s)")
    _add_ranks(parser)
    add("--profile", choices=tuple(profiles.PROFILES), default="deepseek_v3", help="shape of the layer (%(default)s)")
    add("--hidden_size", type=int, metavar="N", help="values in a row (the profile's)")
    add("--top_k", type=int, metavar="N", help="experts of a token (the profile's)")
    add("--num_experts", type=int, metavar="N", help="experts of all ranks (the profile's)")
    add("--quant", choices=profiles.QUANTS, help="what dispatch carries (the profile's)")
    add("--payload_dtype", choices=tuple(profiles.ROW_DTYPES), help="type of unquantised rows, --quant bf16 (bfloat16)")
    add(
        "--combine_dtype",
        choices=settings.COMBINE_DTYPES,
        default="bfloat16",
        help="type of the rows that combine brings back; with fp8_*, experts and result are BF16 (%(default)s)",
    )
    add("-b", dest="first", type=int, metavar="N", help="first batch size, tokens a rank (1)")
    add("-e", dest="last", type=int, metavar="N", help="last batch size (2048, or 64 on the CPU)")
    add("-i", dest="step", type=int, metavar="N", help="step between batch sizes")
    add("-f", dest="factor", type=int, metavar="N", help="factor between batch sizes (2)")
    add("--batches", metavar="LIST", help="batch sizes, comma-separated and ascending, instead of -b, -e, -i and -f")
    add("--max_tokens_per_rank", type=int, metavar="N", help="capacity of the workspace (the last batch size)")
    add("--iters", type=int, metavar="N", help="timed iterations of each size (100, or 20 on the CPU)")
    add("--warmup", type=int, metavar="N", help="iterations before them (20, or 3 on the CPU)")
    add("--seed", type=int, default=0, metavar="N", help="of inputs and routing (%(default)s)")
    add("--perfect_router", action="store_true", help="spread the (token, k) pairs evenly over the ranks")
    add("--routing_file", metavar="FILE", help="routing recorded from a model: .npz of integer [layers, tokens, top_k]")
    add("--num_sms", type=int, metavar="N", help="SMs that putget may use (its own choice)")
    add("--no_cuda_graph", action="store_true", help="launch every call instead of replaying a CUDA graph")
    add(
        "--no_sync",
        action="store_true",
        help="time a library built without waits: UNSAFE and unchecked, shows what synchronisation costs",
    )
    add("--no_flush_l2", action="store_true", help="leave the L2 cache warm before dispatch")
    add("--kernel_breakdown", action="store_true", help="time of each kernel, by torch's profiler")
    add("--iter_stats", action="store_true", help="percentiles over the iterations")
    add("--output_file", metavar="FILE", help="write the report as JSON (docs/reference/bench_json.md)")
    _add_commit(parser)


def _add_balance(parser: argparse.ArgumentParser) -> None:
    from putget_bench import balance

    balance.add_arguments(parser)
    parser.set_defaults(module="run_balance")


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    from putget_bench.domains import BACK_ROW_BYTES, NETWORKS, Round

    parser.description = (
        "Runs one round of each group in virtual time: with putget's proxies, and with the scheme of the paper that "
        "the published latencies are of. No NIC is needed, and none is measured."
    )
    add = parser.add_argument
    add("what", choices=("domains",), metavar="{domains}", help="ranks of several hosts")
    add("--ep_size", default="16,32,64", metavar="LIST", help="ranks, comma-separated (%(default)s)")
    add("--network", choices=(*NETWORKS, "all"), default="all", help="NIC of each rank (%(default)s)")
    add("--domain_size", type=int, default=Round.domain_size, metavar="N", help="ranks of a host (%(default)s)")
    add("--tokens", type=int, default=Round.num_tokens, metavar="N", help="of each rank (%(default)s)")
    add("--num_experts", type=int, default=Round.num_experts, metavar="N", help="of all ranks (%(default)s)")
    add("--top_k", type=int, default=Round.top_k, metavar="N", help="experts of a token (%(default)s)")
    add("--chunk_rows", type=int, default=0, metavar="N", help="rows of one write of putget's (its own choice)")
    add("--combine_dtype", choices=BACK_ROW_BYTES, default="bfloat16", help="putget's rows back (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of the routing (%(default)s)")
    add("--output_file", metavar="FILE", help="write the result as JSON (docs/reference/command_line.md)")
    parser.set_defaults(module="run_simulate")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serves a mixture-of-experts model of transformers on several ranks, each with requests of its own. All listen "
        "on one port, and answer OpenAI's completions and chat. Needs transformers[serving]."
    )
    add = parser.add_argument
    add("path", metavar="PATH", help="folder of the model and its tokenizer")
    add("--ep_size", type=int, metavar="N", help="ranks (the GPUs here, or 2 on the CPU)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the ranks run (%(default)s)")
    add("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    add("--port", type=int, default=8000, metavar="N", help="port to listen at, of all ranks (%(default)s)")
    add("--dtype", default="auto", help="of the weights, by torch's name (%(default)s: as they are)")
    add("--max_tokens_per_rank", type=int, default=1024, metavar="N", help="tokens of a rank's pass (%(default)s)")
    add("--cache_tokens", type=int, metavar="N", help="tokens in a rank's KV cache (on GPUs what fits; 32768 on CPUs)")
    add(
        "--stream_interval", type=int, default=1, metavar="N", help="tokens between two words of a stream (%(default)s)"
    )
    add(
        "--num_slots",
        type=int,
        metavar="N",
        help="expert slots of all CPU ranks; spare ones take a lost rank's experts",
    )
    add("--balance", choices=("off", "static", "online"), default="off", help="what spare slots hold (%(default)s)")
    add("--timeout_s", type=float, default=20.0, metavar="S", help="wait for another rank in a pass (%(default)s)")
    add("--setup_timeout_s", type=float, default=600.0, metavar="S", help="deadline of the start (%(default)s)")
    parser.set_defaults(module="run_serve")


def _add_serve_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sends requests to a server with OpenAI's interface (putget's, vLLM's, SGLang's), and says when tokens came, "
        "how many, and how long its ranks waited for each other. The requests are aiperf's."
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server (%(default)s)")
    add("--model", metavar="NAME", help="its name there (the first one that the server has)")
    add("--tokenizer", metavar="PATH", help="folder or hub name of the tokenizer that prompts are made with (--model)")
    add("--rates", default="1,2,4", metavar="LIST", help="requests a second, at random times (%(default)s)")
    add("--concurrency", metavar="LIST", help="requests under way at once, instead of --rates")
    add("--requests", type=int, default=100, metavar="N", help="requests of each load (%(default)s)")
    add("--prompt_tokens", type=int, default=128, metavar="N", help="of a prompt, mean (%(default)s)")
    add("--prompt_stddev", type=int, default=0, metavar="N", help="standard deviation of these (%(default)s)")
    add("--output_tokens", type=int, default=64, metavar="N", help="of an answer, mean (%(default)s)")
    add("--output_stddev", type=int, default=0, metavar="N", help="standard deviation of these (%(default)s)")
    add("--no_stream", action="store_true", help="answers come whole")
    add("--timeout_s", type=float, default=120.0, metavar="S", help="deadline of a request (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of arrivals, lengths and prompts (%(default)s)")
    add("--output_file", metavar="FILE", help="write the report as JSON (docs/reference/serve_json.md)")
    add("--plot", metavar="FILE", help="draw times, tokens a second and waits over the load (.png, .svg, .pdf)")
    _add_commit(parser)
    parser.set_defaults(module="run_serve_bench")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = "Says what this machine can do with putget, and what is missing for the rest."
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(module="doctor")


def _add_roofline(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measures what the link between the ranks can do: writes, reads, copies, a barrier."
    _add_ranks(parser)
    parser.add_argument(
        "--iters", type=int, metavar="N", help="timed iterations of each transfer (50, or 20 on the CPU)"
    )
    parser.add_argument("--output_file", metavar="FILE", help="write the result as JSON")
    _add_commit(parser)
    parser.set_defaults(module="run_roofline")


def _add_commit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--commit", metavar="ID", help="putget's commit for the report (PUTGET_COMMIT, or git's word)")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs dispatch, experts and combine of a DeepSeek-V3-shaped layer, checks every size against a dense "
        "reference, and shows a table and a plot. Then four CPU ranks of putget serve answer a prompt."
    )
    parser.add_argument("--ep_size", type=int, metavar="N", help="ranks (the GPUs here if there are two or more, or 8)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where (%(default)s)")
    parser.add_argument("--plot", default="putget_demo.png", metavar="FILE", help="where the plot goes (%(default)s)")
    parser.set_defaults(module="demo")
