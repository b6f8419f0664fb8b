"""When is a prompt's cache at the decoder? A model with two parameters per NIC, and the real planner's writes.

A NIC takes `max(writes / writes_per_s, bytes / bytes_per_s)` for some writes. Both parameters come from the paged
writes of 1 and 64 KiB in Table 2 of "RDMA Point-to-Point Communication for LLM Systems"; 8 and 16 KiB of that table are
the check. The time of a prefill is assumed: its operations over a rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from putget_transfer.kv._models import Model, geometry
from putget_transfer.kv._native import plan

GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class Nic:
    """A rank's NIC, by which it sends."""

    name: str
    writes_per_s: float
    bytes_per_s: float

    def seconds(self, num_writes: int, num_bytes: int) -> float:
        """Return how long some writes take."""
        return max(num_writes / self.writes_per_s, num_bytes / self.bytes_per_s)

    def gigabits_per_s(self, page_bytes: int) -> float:
        """Return the rate of paged writes of one size."""
        return page_bytes / self.seconds(1, page_bytes) / GIGABIT


# Paged writes of the paper's Table 2: Gbit/s and writes/s, by KiB of a page.
PUBLISHED: dict[str, dict[int, tuple[float, float]]] = {
    "efa": {1: (17, 2.11e6), 8: (138, 2.10e6), 16: (274, 2.08e6), 64: (364, 0.69e6)},
    "connectx7": {1: (91, 11.10e6), 8: (320, 4.89e6), 16: (367, 2.80e6), 64: (370, 0.71e6)},
}


def fit(name: str, rows: dict[int, tuple[float, float]]) -> Nic:
    """Return a NIC by its pages of 1 KiB, which writes bound, and of 64 KiB, which bytes bound."""
    return Nic(name, rows[1][1], rows[64][0] * GIGABIT)


NICS = {name: fit(name, rows) for name, rows in PUBLISHED.items()}


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """A model's cache and its operations.

    Attributes:
        model: The cache.
        page_tokens: Tokens of a page.
        parameters: Active parameters per token: two operations each.
        attention_width: Sum over the heads of the dimensions of keys and of values: two operations for each token
            before, in each layer.
    """

    model: Model
    page_tokens: int
    parameters: float
    attention_width: int

    def operations(self, tokens: int) -> float:
        """Return the operations of the first so many tokens."""
        pairs = tokens * (tokens + 1) / 2
        return 2 * self.parameters * tokens + 2 * self.attention_width * self.model.layers * pairs


MODELS = {
    "deepseek-v3": Prefill(
        model=Model(layers=61, kv_heads=1, head_bytes=1152),
        page_tokens=64,
        parameters=37e9,
        attention_width=128 * (192 + 128),
    ),
    "llama-70b": Prefill(
        model=Model(layers=80, kv_heads=8, head_bytes=256),
        page_tokens=16,
        parameters=70e9,
        attention_width=64 * (128 + 128),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The assumptions of a simulation.

    Attributes:
        operations_per_s: The whole prefill's.
        chunk_tokens: Tokens of one forward step, which are a segment, too.
        latency_s: From the last write to the decoder's knowledge.
        prefill_tp: Prefill ranks; each has a NIC.
        decode_tp: Decode ranks. One of them is looked at, because each has a NIC.
    """

    operations_per_s: float
    chunk_tokens: int
    latency_s: float
    prefill_tp: int
    decode_tp: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt. Times are in seconds from the beginning of its prefill."""

    model: str
    nic: str
    tokens: int
    num_bytes: int
    num_writes: int
    prefill_s: float
    transfer_s: float
    after_s: float
    layerwise_s: float

    def dictionary(self) -> dict[str, object]:
        """Return it for JSON."""
        return asdict(self)


def served(nic: Nic, portions: Sequence[tuple[float, int, int]]) -> float:
    """Return when a NIC has sent its portions: when each can leave, its writes and its bytes."""
    free = 0.0
    for ready, num_writes, num_bytes in portions:
        free = max(free, ready) + nic.seconds(num_writes, num_bytes)
    return free


def simulate(name: str, nic: Nic, tokens: int, setting: Setting) -> Row:
    """Return when the decoder has a prompt, with portions that leave as soon as they are computed and without.

    Raises:
        ValueError: The planner's, for a model that cannot be divided so.
    """
    prefill = MODELS[name]
    layers, chunk = prefill.model.layers, setting.chunk_tokens
    sides = ((setting.prefill_tp, setting.prefill_tp), (1, setting.decode_tp))
    sources, targets = (
        [geometry(prefill.model, tokens, rank, tp, "LBHNC", prefill.page_tokens) for rank in range(ranks)]
        for ranks, tp in sides
    )
    found = plan(sources, targets[0], request_id=name, tokens=tokens, segment_tokens=chunk)

    def computed(first: int, end: int, layer: int) -> float:
        """Return when a step has computed its first layers."""
        begun, done = prefill.operations(first), prefill.operations(end)
        return (begun + (done - begun) * layer / layers) / setting.operations_per_s

    over = computed(0, tokens, layers)
    layerwise = transfer = over
    for source in range(setting.prefill_tp):
        portions = found.of(source).portions
        at_once = [(computed(first, end, layer), writes, size) for first, end, layer, size, writes in portions]
        layerwise = max(layerwise, served(nic, at_once))
        transfer = max(transfer, served(nic, [(over, writes, size) for _, writes, size in at_once]))
    return Row(
        model=name,
        nic=nic.name,
        tokens=tokens,
        num_bytes=found.num_bytes,
        num_writes=found.num_writes,
        prefill_s=over,
        transfer_s=transfer - over,
        after_s=transfer + setting.latency_s,
        layerwise_s=layerwise + setting.latency_s,
    )
