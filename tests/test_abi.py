"""The Python mirrors of the C headers against the headers themselves, and the C ABI used from C alone."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from putget import _abi, _abi_balancer, _abi_moe
from putget_bench import domains, probe_library

ROOT = Path(__file__).resolve().parents[1]
INCLUDE = ROOT / "native" / "include"
STRUCTS = {
    "putget_launch": _abi.Launch,
    "putget_config": _abi.Config,
    "putget_layout": _abi.Layout,
    "putget_memory_config": _abi.MemoryConfig,
    "putget_share": _abi.Share,
    "putget_tables": _abi.Tables,
    "putget_dispatch_args": _abi.DispatchArgs,
    "putget_combine_args": _abi.CombineArgs,
    "putget_fault": _abi.Fault,
    "putget_gpu": _abi.Gpu,
}
MOE_STRUCTS = {
    "putget_moe_config": _abi_moe.MoeConfig,
    "putget_moe_layout": _abi_moe.MoeLayout,
    "putget_moe_group_args": _abi_moe.MoeGroupArgs,
    "putget_moe_finalize_args": _abi_moe.MoeFinalizeArgs,
    "putget_moe_rows": _abi_moe.MoeRows,
    "putget_moe_expand_args": _abi_moe.MoeExpandArgs,
    "putget_moe_by_source_args": _abi_moe.MoeBySourceArgs,
    "putget_moe_routes_args": _abi_moe.MoeRoutesArgs,
    "putget_moe_compact_args": _abi_moe.MoeCompactArgs,
    "putget_moe_send_pairs_args": _abi_moe.MoeSendPairsArgs,
    "putget_moe_place_pairs_args": _abi_moe.MoePlacePairsArgs,
    "putget_moe_sum_pairs_args": _abi_moe.MoeSumPairsArgs,
    "putget_moe_activation_args": _abi_moe.MoeActivationArgs,
    "putget_moe_product_args": _abi_moe.MoeProductArgs,
    "putget_moe_networks_args": _abi_moe.MoeNetworksArgs,
}
DOMAINS_STRUCTS = {"putget_engine_config": _abi.EngineConfig, "putget_domains_config": _abi.DomainsConfig}
BALANCER_STRUCTS = {
    "putget_balance_args": _abi_balancer.BalanceArgs,
    "putget_choose_args": _abi_balancer.ChooseArgs,
    "putget_blob_part": _abi_balancer.BlobPart,
    "putget_gathering": _abi_balancer.Gathering,
    "putget_host_pages": _abi_balancer.HostPages,
    "putget_landing_config": _abi_balancer.LandingConfig,
    "putget_landing_progress": _abi_balancer.LandingProgress,
    "putget_put_order": _abi_balancer.PutOrder,
    "putget_take_order": _abi_balancer.TakeOrder,
    "putget_replicas_args": _abi_balancer.ReplicasArgs,
    "putget_table": _abi_balancer.Table,
}
PROBE_STRUCTS = {
    "putget_probe_memory": probe_library.ProbeMemory,
    "putget_probe_copy_args": probe_library.CopyArgs,
    "putget_probe_rows_args": probe_library.RowsArgs,
    "putget_probe_domains_args": probe_library.DomainsArgs,
}
CONSTANTS = {
    f"PUTGET_{name}": getattr(_abi, name)
    for name in ("MAGIC", "ABI_VERSION", "MAX_RANKS", "MAX_TOP_K", "MAX_PAYLOADS", "FAULT")
}
PROBE_CONSTANTS = {
    "PUTGET_PROBE_ABI_VERSION": probe_library.ABI_VERSION,
    "PUTGET_MAGIC": probe_library.MAGIC,
    "PUTGET_MAX_RANKS": probe_library.MAX_RANKS,
    "PUTGET_PROBE_SEND": probe_library.SEND,
    "PUTGET_DOMAINS_AGENTS": domains.AGENTS,
    "PUTGET_DOMAINS_ROUTES": domains.ROUTES,
}
BALANCER_CONSTANTS = {
    "PUTGET_MAGIC": _abi.MAGIC,
    "PUTGET_MAX_CELLS": _abi_balancer.MAX_CELLS,
    "PUTGET_MAX_ORDERS": _abi_balancer.MAX_ORDERS,
    "PUTGET_HOST_NEAR_NODE": _abi_balancer.HOST_NEAR_NODE,
    "PUTGET_HOST_HUGE_ALLOWED": _abi_balancer.HOST_HUGE_ALLOWED,
    "PUTGET_HOST_FILLED_HERE": _abi_balancer.HOST_FILLED_HERE,
}
NODES = {
    "putget_network_destroy",
    "putget_network_engine",
    "putget_network_local",
    "putget_network_transport",
    "putget_domains_bytes",
    "putget_domains_card",
    "putget_domains_connect",
    "putget_domains_create",
    "putget_domains_end",
    "putget_domains_leave",
    "putget_domains_run",
    "putget_domains_start",
}
BALANCER = {
    "putget_balance",
    "putget_choose",
    "putget_choose_words",
    "putget_host_pages_map",
    "putget_host_pages_unmap",
    "putget_landing_bytes",
    "putget_landing_create",
    "putget_landing_destroy",
    "putget_landing_move",
    "putget_landing_planned",
    "putget_landing_post",
    "putget_landing_progress_of",
    "putget_landing_step",
    "putget_landing_take",
    "putget_replicas",
    "putget_replicas_words",
}
MOE = {name for name in _abi._FUNCTIONS if name.startswith("putget_moe_")}
# header, its structures, its functions, its constants
MIRRORS = [
    ("putget.h", STRUCTS, _abi._FUNCTIONS.keys() - BALANCER - NODES - MOE, CONSTANTS),
    ("putget_moe.h", MOE_STRUCTS, MOE, {"PUTGET_MAGIC": _abi.MAGIC}),
    ("putget_domains.h", DOMAINS_STRUCTS, NODES, {"PUTGET_MAGIC": _abi.MAGIC}),
    ("putget_balancer.h", BALANCER_STRUCTS, BALANCER, BALANCER_CONSTANTS),
    ("putget_probe.h", PROBE_STRUCTS, probe_library._FUNCTIONS.keys(), PROBE_CONSTANTS),
]
CC = shutil.which("gcc") or shutil.which("cc")
needs_cc = pytest.mark.skipif(CC is None, reason="needs a C compiler")


def compile_and_run(source: str, folder: Path, *extra: str) -> str:
    assert CC is not None
    program = folder / "program"
    (folder / "program.c").write_text(source)
    command = [CC, "-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", str(folder / "program.c"), *extra]
    subprocess.run([*command, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("header", "structs", "functions", "constants"), MIRRORS, ids=[str(mirror[0]) for mirror in MIRRORS]
)
def test_everything_of_a_header_is_mirrored(
    header: str, structs: dict[str, Any], functions: set[str], constants: dict[str, int]
) -> None:
    text = (INCLUDE / header).read_text()
    assert set(re.findall(r"^typedef struct (putget_\w+) \{", text, re.M)) == structs.keys()
    assert set(re.findall(r"^PUTGET_API [\w ]+?\*?\s?(putget_\w+)\(", text, re.M)) == functions
    assert constants


@needs_cc
@pytest.mark.parametrize(
    ("header", "structs", "functions", "constants"), MIRRORS, ids=[str(mirror[0]) for mirror in MIRRORS]
)
def test_sizes_and_offsets_agree(
    header: str, structs: dict[str, Any], functions: set[str], constants: dict[str, int], tmp_path: Path
) -> None:
    assert functions
    lines = []
    for name, mirror in structs.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [f'printf("{name}.{field[0]} %zu\\n", offsetof({name}, {field[0]}));' for field in mirror._fields_]
    lines += [f'printf("{constant} %zu\\n", (size_t){constant});' for constant in constants]
    source = f"#include <stdio.h>\n#include <{header}>\nint main(void) {{\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    told = dict(line.split() for line in compile_and_run(source, tmp_path).splitlines())
    for name, mirror in structs.items():
        assert int(told[name]) == ctypes.sizeof(mirror), name
        for field in mirror._fields_:
            assert int(told[f"{name}.{field[0]}"]) == getattr(mirror, field[0]).offset, f"{name}.{field[0]}"
    for constant, value in constants.items():
        assert int(told[constant]) == value, constant


def test_a_structure_of_another_version_is_refused() -> None:
    layout = _abi.Layout()
    for field, value in (("size", 4), ("magic", 7)):
        config = _abi.Config()
        setattr(config, field, value)
        with pytest.raises(ValueError, match="another version of the header"):
            _abi.call("putget_layout_of", ctypes.byref(config), ctypes.byref(layout))


@needs_cc
def test_a_round_between_two_ranks_written_in_c(tmp_path: Path) -> None:
    library = _abi.library_path()
    source = (ROOT / "examples" / "c" / "round.c").read_text()
    output = compile_and_run(source, tmp_path, str(library), f"-Wl,-rpath,{library.parent}", "-pthread")
    assert output.splitlines() == ["rank 0: ok", "rank 1: ok"]
