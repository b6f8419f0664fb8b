"""The published algorithm of DeepSeek's expert-parallel load balancer, as an oracle (github.com/deepseek-ai/EPLB, MIT).

Written from its description: groups are packed onto nodes, experts are replicated inside a node, replicas are packed
onto the node's GPUs. Packing gives the heaviest item to the lightest pack that has room; a replica goes to the expert
with the most load a replica. Equal ones: the first. Without groups, or where they do not divide by the nodes, all GPUs
are one node.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Its README's example: 2 layers of 12 experts, 16 slots, 4 groups, 2 nodes, 8 GPUs.
EXAMPLE_LOAD = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
EXAMPLE_PLAN = np.array(
    [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
)


def pack(weights: NDArray[np.float64], packs: int) -> tuple[list[int], list[int]]:
    """The pack of each item, and its place there."""
    room = len(weights) // packs
    if room == 1:
        return list(range(len(weights))), [0] * len(weights)
    pack_of, place_of = [0] * len(weights), [0] * len(weights)
    sums, filled = [0.0] * packs, [0] * packs
    for item in np.argsort(-weights, kind="stable").tolist():
        lightest = min((one for one in range(packs) if filled[one] < room), key=sums.__getitem__)
        pack_of[item], place_of[item] = lightest, filled[lightest]
        sums[lightest] += float(weights[item])
        filled[lightest] += 1
    return pack_of, place_of


def replicate(weights: NDArray[np.float64], replicas: int) -> tuple[list[int], NDArray[np.int64]]:
    """The expert of each replica, and the replicas of each expert."""
    experts = list(range(len(weights)))
    count = np.ones(len(weights), np.int64)
    while len(experts) < replicas:
        heaviest = int(np.argmax(weights / count))
        experts.append(heaviest)
        count[heaviest] += 1
    return experts, count


def plan(load: NDArray[np.float64], replicas: int, groups: int, nodes: int, gpus: int) -> NDArray[np.int32]:
    """The expert of each slot, [num_layers, replicas]."""
    if groups % nodes:
        groups, nodes = 1, 1
    return np.array([_plan_layer(np.asarray(one, np.float64), replicas, groups, nodes, gpus) for one in load], np.int32)


def _plan_layer(load: NDArray[np.float64], replicas: int, groups: int, nodes: int, gpus: int) -> list[int]:
    in_group = len(load) // groups
    node_of, place_of = pack(load.reshape(groups, in_group).sum(axis=1), nodes)
    slots = [0] * replicas
    for node in range(nodes):
        own = sorted((group for group in range(groups) if node_of[group] == node), key=place_of.__getitem__)
        experts = [group * in_group + i for group in own for i in range(in_group)]
        weights = load[experts]
        replica, count = replicate(weights, replicas // nodes)
        gpu_of, place = pack((weights / count)[replica], gpus // nodes)
        for i, expert in enumerate(replica):
            slots[node * (replicas // nodes) + gpu_of[i] * (replicas // gpus) + place[i]] = experts[expert]
    return slots
