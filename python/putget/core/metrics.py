"""Metrics of an object, in Prometheus' text format. All values are read on request, none in rounds."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from putget.core.geometry import Geometry
from putget.core.native_object import NativeObject
from putget.memory.workspace import Workspace


def text(workspace: Workspace, geometry: Geometry, native: NativeObject) -> str:
    """Waits for the device; see ``AllToAll.metrics_text``."""
    rounds = workspace.memory.epoch()
    # A copy: another thread may run the next round meanwhile, and ids must not change behind the comparison.
    ranks = native.target_ranks[: native.num_tokens].flatten().to("cpu", copy=True)
    sent = torch.bincount(ranks[ranks >= 0], minlength=geometry.ep_size).tolist()
    received = native.received_tokens.tolist() if rounds else [0] * geometry.ep_size
    out = sum(payload.row_bytes for payload in geometry.payloads)
    back = geometry.combine_row_bytes
    rank = workspace.comm.rank
    lines: list[str] = []

    def add(name: str, kind: str, meaning: str, samples: Mapping[str, int]) -> None:
        lines.extend((f"# HELP putget_{name} {meaning}", f"# TYPE putget_{name} {kind}"))
        lines.extend(f'putget_{name}{{rank="{rank}"{labels}}} {value}' for labels, value in samples.items())

    def by_peer(rows: list[int], factor: int = 1) -> dict[str, int]:
        return {f',peer="{peer}"': count * factor for peer, count in enumerate(rows)}

    add("rounds_total", "counter", "Rounds on the workspace, replays of graphs too.", {"": rounds})
    add("sent_rows", "gauge", "Rows of the last round to each rank.", by_peer(sent))
    add("received_rows", "gauge", "Rows of the last round from each rank.", by_peer(received))
    add("sent_bytes", "gauge", "Payload of these rows in dispatch.", by_peer(sent, out))
    add("returned_bytes", "gauge", "Rows that combine brought back from each rank.", by_peer(sent, back))
    faults = {f',kind="{kind}"': count for kind, count in sorted(workspace.num_faults.items())}
    add("timeouts_total", "counter", "Rounds that ended without a rank.", {"": workspace.num_faults["PeerTimeout"]})
    add("faults_total", "counter", "Faults that calls have raised.", faults)
    late = {f',peer="{peer}"': count for peer, count in enumerate(workspace.num_missing)}
    add("waits_in_vain_total", "counter", "Time-outs that named the rank.", late)
    inactive = sum(not is_active for is_active in workspace.active_ranks)
    add("inactive_ranks", "gauge", "Ranks that rounds go on without.", {"": inactive})
    return "\n".join(lines) + "\n"
