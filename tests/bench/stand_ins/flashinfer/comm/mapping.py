from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Mapping:
    rank: int
    world_size: int
    gpus_per_node: int
    tp_size: int
    moe_ep_size: int
