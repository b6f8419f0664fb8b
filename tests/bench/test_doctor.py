"""The doctor's findings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from putget_bench import cli, doctor


@pytest.fixture
def sys_tree(tmp_path: Path) -> Path:
    for path, text in {
        "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
        "class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
        "class/net/lo/operstate": "unknown\n",
        "class/net/eth0/operstate": "up\n",
        "class/net/eth0/speed": "25000\n",
        "class/net/eth1/operstate": "down\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_network_devices(sys_tree: Path) -> None:
    found = {finding.name: finding for finding in doctor._nics(sys_tree)}
    assert set(found) == {"mlx5_0", "mlx5_1", "eth0", "eth1"}
    assert found["mlx5_0"].status == "ok"
    assert "400 Gb/sec" in found["mlx5_0"].detail
    assert found["mlx5_1"].status == "missing"
    assert found["mlx5_1"].remedy is not None
    assert found["eth0"].detail == "up, 25000 Mb/s"
    assert found["eth1"].status == "absent"


def test_a_machine_without_rdma_says_so(tmp_path: Path) -> None:
    assert [(finding.name, finding.status) for finding in doctor._nics(tmp_path)] == [("RDMA devices", "absent")]


def test_networks_of_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(doctor, "why_not", lambda provider: None if provider == "tcp" else f"no {provider} here")
    found = {finding.name: finding for finding in doctor._domains()}
    assert {name: finding.status for name, finding in found.items()} == {
        "sim": "ok", "tcp": "ok", "host": "missing", "nvlink": "missing", "verbs": "missing", "efa": "missing"
    }  # fmt: skip
    assert found["verbs"].detail == "no verbs here"
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert [(finding.name, finding.status) for finding in doctor._domains()] == [("sim", "ok"), ("engine", "missing")]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "putget.doctor/1"
    assert document["runs"]["cpu"] is True
    areas = {finding["area"] for finding in document["findings"]}
    assert areas == {"putget", "cpu", "gpu", "links", "memory", "nic", "transport", "domains"}
    for finding in document["findings"]:
        assert finding["status"] in ("ok", "missing", "absent")
        if finding["status"] == "missing":
            assert finding["remedy"]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "native library" in printed
    assert "CPU ranks: yes." in printed
