"""Counts of a connector, as vLLM logs them and gives them to Prometheus."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

ENDS = {
    "sent": "Prefills whose decode servers have them",
    "cancelled": "Prefills that their decode servers have given up",
    "expired": "Prefills that nobody has asked for in time",
    "aborted": "Prefills that have failed",
    "arrived": "Prompts that have arrived",
    "failed": "Prompts that will not arrive",
}
BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


class Stats(KVConnectorStats):  # type: ignore[misc]
    """Ends of requests since the last look, times of receives, and pages in quarantine."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Begin again."""
        self.data = {"ends": dict.fromkeys(ENDS, 0), "seconds": [], "quarantined_pages": 0}

    def count(self, end: str) -> None:
        """Count a request's end."""
        self.data["ends"][end] += 1

    def received(self, seconds: float) -> None:
        """Note a prompt that has arrived."""
        self.data["ends"]["arrived"] += 1
        self.data["seconds"].append(seconds)

    def quarantined(self, pages: int) -> None:
        """Note how many pages may still be written to."""
        self.data["quarantined_pages"] = pages

    def is_empty(self) -> bool:
        """Return whether there is nothing to tell."""
        return not any(self.data["ends"].values()) and not self.data["quarantined_pages"]

    def aggregate(self, other: KVConnectorStats) -> Stats:
        """Add those of another rank or time."""
        for end, count in other.data["ends"].items():
            self.data["ends"][end] += count
        self.data["seconds"] += other.data["seconds"]
        self.data["quarantined_pages"] = max(self.data["quarantined_pages"], other.data["quarantined_pages"])
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's log shows."""
        seconds = sorted(self.data["seconds"])
        middle = {"median ms from question to arrival": round(1e3 * seconds[len(seconds) // 2], 2)} if seconds else {}
        return {**self.data["ends"], **middle, "pages in quarantine": self.data["quarantined_pages"]}

    def take(self) -> Stats | None:
        """Return what was counted since the last call, if anything."""
        if self.is_empty():
            return None
        taken = Stats(self.data)
        self.reset()
        return taken


class Prometheus(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same for Prometheus, one set for each engine."""

    def __init__(self, config: Any, types: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(config, types, labels, values)

        def each(metric: Any) -> Any:
            return create_metric_per_engine(metric, values)

        self.ends = {
            end: each(self._counter_cls(name=f"vllm:putget_kv_{end}", documentation=text, labelnames=labels))
            for end, text in ENDS.items()
        }
        text = "Time from a decode server's question to the prompt's last page"
        self.seconds = each(
            self._histogram_cls(
                name="vllm:putget_kv_receive_seconds", documentation=text, buckets=BUCKETS_S, labelnames=labels
            )
        )
        text = "Pages of failed prompts that may still be written to"
        self.pages = each(
            self._gauge_cls(name="vllm:putget_kv_quarantined_pages", documentation=text, labelnames=labels)
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what vLLM has gathered."""
        for end, count in transfer_stats_data["ends"].items():
            self.ends[end][engine_idx].inc(count)
        for seconds in transfer_stats_data["seconds"]:
            self.seconds[engine_idx].observe(seconds)
        self.pages[engine_idx].set(transfer_stats_data["quarantined_pages"])
