"""How much memory there is: asked of files that look like the kernel's, and before a workspace is made."""

from __future__ import annotations

from pathlib import Path

import pytest

import putget
from putget.memory import host_memory
from tests.harness import Rank, run_ranks

GIB = 1 << 30
MEMINFO = (
    "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB\nSwapTotal: 2097152 kB\nSwapFree: 1048576 kB\n"
)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def found(root: Path) -> list[tuple[str, int, int]]:
    """(where, most, free) of every bound, in GiB."""
    return [
        (limit.name.removeprefix(f"{root}/"), limit.most // GIB, limit.free // GIB)
        for limit in host_memory.limits(root)
    ]


HOST = ("this host (MemTotal and SwapTotal of /proc/meminfo)", 34, 17)


def test_the_host_alone(tmp_path: Path) -> None:
    assert found(tree(tmp_path, {})) == [HOST]
    assert host_memory.limits(tmp_path / "nothing") == []


def test_every_cgroup_of_version_2_around_the_process(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pod"
    files = {
        "proc/self/cgroup": "0::/pod/box\n",
        f"{group}/memory.max": f"{8 * GIB}\n",
        f"{group}/memory.current": f"{7 * GIB}\n",
        f"{group}/memory.stat": f"anon 5\nactive_file {2 * GIB}\ninactive_file {GIB}\nfile {3 * GIB}\n",
        f"{group}/memory.swap.max": "0\n",
        f"{group}/box/memory.max": f"{4 * GIB}\n",
        f"{group}/box/memory.current": f"{GIB}\n",
        f"{group}/box/memory.swap.max": "max\n",
    }
    inner, outer = f"{group}/box/memory.max", f"{group}/memory.max"
    assert found(tree(tmp_path, files)) == [HOST, (inner, 4, 4), (outer, 8, 4)]
    assert found(tree(tmp_path, {f"{group}/box/memory.max": "max\n"})) == [HOST, (outer, 8, 4)]


def test_a_container_that_sees_its_cgroup_as_the_root(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../../elsewhere\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory.swap.max": "0\n",
    }
    assert found(tree(tmp_path, files)) == [HOST, ("sys/fs/cgroup/memory.max", 2, 0)]


def test_a_cgroup_of_version_1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/box"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/box\n4:memory:/box\n0::/\n",
        f"{group}/memory.limit_in_bytes": f"{6 * GIB}\n",
        f"{group}/memory.usage_in_bytes": f"{5 * GIB}\n",
        f"{group}/memory.stat": f"total_active_file 0\ntotal_inactive_file {GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    }
    assert found(tree(tmp_path, files)) == [HOST, (f"{group}/memory.limit_in_bytes", 6, 2)]


def test_ranks_that_share_a_bound_are_counted_together() -> None:
    bounds = [host_memory.Limit("a", "a host", 8 * GIB, 4 * GIB), host_memory.Limit("b", "a group", GIB, GIB)]
    host_memory.require_room(GIB, bounds, {"a": 4})
    with pytest.raises(putget.PutgetError, match="num_bytes") as caught:
        host_memory.require_room(GIB, bounds, {"a": 5})
    assert str(caught.value) == (
        f"num_bytes: the workspace wants {5 * GIB} bytes of shared memory, {GIB} for each of 5 ranks; free are "
        f"{4 * GIB} of the {8 * GIB} bytes of a host"
    )
    with pytest.raises(putget.PutgetError, match=f"wants {GIB + 1} bytes of shared memory; free are {GIB} of"):
        host_memory.require_room(GIB + 1, bounds, {})


def want_too_much(rank: Rank, free: int) -> list[str]:
    said = []
    # As much as all ranks together may not have, though each of them might.
    for num_bytes in (1 << 45, free * 3 // 4):
        try:
            putget.Workspace(rank.comm, num_bytes, rank.device).close()
            said.append("accepted")
        except (putget.PutgetError, ValueError) as error:
            said.append(str(error))
    with rank.all_to_all() as a2a:
        a2a.check()
    return said


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_workspace_larger_than_memory_is_an_error(mode: str) -> None:
    host = host_memory.limits()[0]
    for said in run_ranks(2, want_too_much, host.free, mode=mode):
        assert len(said) == 2
        for words in said:
            assert "bytes of shared memory" in words
            assert "each of 2 ranks; free are" in words
