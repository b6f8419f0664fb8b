"""Several device groups and providers in one engine, and the topology that they are chosen by, from Python."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip(
    "putget_transfer._native", reason="putget_transfer is not built: it needs cargo (see `make transfer`)"
)
import putget_transfer as pt

LONG_S = 60.0
LEN = 4096


def build(*groups: pt.DeviceGroup) -> pt.Engine:
    builder = pt.Engine.builder()
    for group in groups:
        builder = builder.group(group)
    return builder.build()


def tcp() -> pt.DeviceGroup:
    return pt.DeviceGroup.tcp(["127.0.0.1"])


@pytest.fixture
def engines() -> Iterator[tuple[pt.Engine, pt.Engine, pt.Engine]]:
    with build(pt.DeviceGroup.host(), tcp()) as a, build(pt.DeviceGroup.host(), tcp()) as b, build(tcp()) as c:
        yield a, b, c


def test_one_scatter_reaches_peers_over_shared_memory_and_tcp(engines: tuple[pt.Engine, pt.Engine, pt.Engine]) -> None:
    a, b, c = engines
    src, _ = a.alloc_mr(LEN)
    src.write(0, bytes(range(256)) * (LEN // 256))
    (at_b, to_b), (at_c, to_c) = b.alloc_mr(LEN), c.alloc_mr(LEN)
    group, connected = a.add_peer_group([b.main_address(), c.main_address()])
    connected.wait(LONG_S)
    dsts = [pt.ScatterDst(LEN, 0, (desc, 0)) for desc in (to_b, to_c)]
    a.submit_scatter(group, 3, src, dsts).wait(LONG_S)
    for engine, memory in ((b, at_b), (c, at_c)):
        engine.expect_imm_count(3, 1, deadline_s=LONG_S).wait(LONG_S)
        assert memory.read(0, LEN) == src.read(0, LEN)
    with pytest.raises(ValueError, match="dst: device groups of Tcp with 1 NICs came; this engine has Host"):
        a.submit_single_write(8, None, (src, 0), (to_c, 0), device_group=0)
    with pytest.raises(ValueError, match="device_group: 2 came; 0 to 1 are allowed"):
        a.submit_single_write(8, None, (src, 0), (to_b, 0), device_group=2)


def test_every_call_takes_its_device_group(engines: tuple[pt.Engine, pt.Engine, pt.Engine]) -> None:
    a, b, _ = engines
    (src, _), (_dst, desc) = a.alloc_mr(LEN), b.alloc_mr(LEN)
    heard: list[tuple[str, bytes]] = []
    b.submit_recvs(64, 4, lambda sender, data: heard.append((sender.peer.rsplit("/")[-1], data)))
    pages = pt.Pages([0, 1], 64)
    for group in (1, 0):
        counted = [
            a.submit_single_write(8, 1, (src, 0), (desc, 0), device_group=group),
            a.submit_paged_writes(64, 1, (src, pages), (desc, pages), device_group=group),
            a.submit_scatter(None, 1, src, [pt.ScatterDst(8, 0, (desc, 0))], device_group=group),
            a.submit_barrier(None, 1, [desc], device_group=group),
            a.submit_writes(1, [(8, (src, 0), (desc, 0))], device_group=group),
            a.submit_prepared(a.prepare_writes([(8, (src, 0), (desc, 0))], device_group=group), 1),
            a.submit_template(a.scatter_template(None, src, [desc]), 1, [(8, 0, 0)], device_group=group),
        ]
        for transfer in [*counted, a.submit_send(b.main_address(), b"hello", device_group=group)]:
            transfer.wait(LONG_S)
    b.expect_imm_count(1, 14, deadline_s=LONG_S).wait(LONG_S)
    end = time.monotonic() + LONG_S
    while len(heard) < 2 and time.monotonic() < end:
        time.sleep(0.001)
    # Device groups keep no order between each other.
    assert sorted(heard) == [("0", b"hello"), ("1", b"hello")]


def test_memory_is_registered_in_bulk_and_for_some_groups_alone(
    engines: tuple[pt.Engine, pt.Engine, pt.Engine],
) -> None:
    a, b, _ = engines
    src, _ = a.alloc_mr(LEN)
    buffers = [bytearray(LEN) for _ in range(100)]
    registered = b.reg_mrs(buffers, groups=[1])
    for number, (_, desc) in enumerate(registered):
        src.write(0, number.to_bytes(8, "little"))
        a.submit_single_write(8, None, (src, 0), (desc, 0)).wait(LONG_S)
        assert int.from_bytes(buffers[number][:8], "little") == number
    with pytest.raises(ValueError, match="dst"):
        a.submit_single_write(8, None, (src, 0), (registered[0][1], 0), device_group=0)
    assert b.reg_mrs([]) == []
    handles = [handle for handle, _ in registered]
    with pytest.raises(ValueError, match="registration has ended"):
        b.dereg_mrs([*handles, handles[0]])
    b.mirror_imm(1, handles[7], 0)
    with pytest.raises(ValueError, match="still use it"):
        b.dereg_mrs(handles)
    assert [handle.read(0, 8) for handle in handles] == [bytes(buffer[:8]) for buffer in buffers]  # all have stayed
    b.unmirror_imm(1)
    b.dereg_mrs(handles)
    b.dereg_mrs([])
    with pytest.raises(ValueError, match="registration has ended"):
        handles[0].read(0, 8)
    with pytest.raises(ValueError, match=r"groups: \[2\] came"):
        b.alloc_mr(8, groups=[2])


def test_counters_are_an_array_in_memory(engines: tuple[pt.Engine, pt.Engine, pt.Engine]) -> None:
    a, b, _ = engines
    words, desc = b.alloc_mr(64)
    b.mirror_imms(40, 3, words, 16)
    for imm in (40, 42, 42):
        a.submit_barrier(None, imm, [desc]).wait(LONG_S)
    b.expect_imm_count(40, 1, deadline_s=LONG_S).wait(LONG_S)
    b.expect_imm_count(42, 2, deadline_s=LONG_S).wait(LONG_S)
    assert [words.load_word(at) for at in (8, 16, 24, 32, 40)] == [0, 1, 0, 2, 0]
    b.unmirror_imms(40, 3)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_the_nics_near_a_gpu_are_found(tmp_path: Path) -> None:
    root = tmp_path / "devices" / "pci0000:00" / "0000:00:01.0"
    gpu, near = root / "0000:02:00.0", root / "0000:03:00.0"
    far = tmp_path / "devices" / "pci0000:40" / "0000:40:01.0" / "0000:41:00.0"
    write(gpu / "vendor", "0x10de")
    write(gpu / "class", "0x030200")
    for device, node in ((gpu, 0), (near, 0), (far, 1)):
        write(device / "numa_node", str(node))
    write(tmp_path / "devices/system/node/node0/cpulist", "0-1")
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:02:00.0").symlink_to(gpu)
    (tmp_path / "class/infiniband").mkdir(parents=True)
    for name, device in (("mlx5_0", far), ("mlx5_1", near)):
        write(device / "infiniband" / name / "ports/1/state", "4: ACTIVE")
        (device / "infiniband" / name / "device").symlink_to(device)
        (tmp_path / "class/infiniband" / name).symlink_to(device / "infiniband" / name)

    topology = pt.Topology(tmp_path)
    assert topology.gpus == [("0000:02:00.0", 0)]
    assert topology.nics == [("mlx5_0", True, True, 1), ("mlx5_1", True, True, 0)]
    assert topology.nics_near("0000:02:00.0") == ["mlx5_1"]
    assert topology.proximity("0000:02:00.0", "mlx5_1") == "switch, 1 bridges"
    assert topology.proximity("0000:02:00.0", "mlx5_0") == "machine"
    assert topology.cpus_near_gpu("0000:02:00.0") == [0, 1]
    assert topology.cpus_near_nic("mlx5_0") is None
    assert "processors" in repr(pt.DeviceGroup.verbs_near(topology, "cpu"))
    with pytest.raises(ValueError, match="0000:02:00"):
        topology.nics_near("0000:99:00.0")
    with pytest.raises(pt.Unavailable, match="verbs"):
        pt.DeviceGroup.verbs_near(pt.Topology(tmp_path / "nowhere"), "cpu")


def test_threads_are_pinned() -> None:
    def affinity(name: str) -> set[str]:
        found = set()
        for task in Path("/proc/self/task").iterdir():
            try:
                text = (task / "status").read_text()
            except OSError:  # a thread that has ended meanwhile
                continue
            status = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
            if status["Name"] == name:
                found.add(status["Cpus_allowed_list"])
        return found

    builder = pt.Engine.builder().group(pt.DeviceGroup.host().cpus([0])).cpus([0])
    with builder.build():
        assert "0" in affinity("pt-worker0")
        assert "0" in affinity("pt-callbacks")
    with pytest.raises(pt.EngineError, match="processors"):
        pt.Engine.builder().group(pt.DeviceGroup.host()).cpus([1023]).build()
