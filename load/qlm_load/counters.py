"""Sums counters of processes that may die: each life of a process counts from 0."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families


class CounterSums:
    """The largest value seen of each counter in each life of each process. Counts between the last reading and a death are unseen, so sums
    are lower bounds."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, str], float] = {}

    def observe(self, process: str, pid: int, counters: Mapping[str, float]) -> None:
        """Adds a reading of a process's counters; `pid` separates its lives."""
        for name, value in counters.items():
            key = (process, pid, name)
            self._seen[key] = max(value, self._seen.get(key, 0.0))

    def total(self, name: str) -> int:
        """The sum of a counter over all processes and lives, and over all labels if `name` has none."""
        return round(sum(value for (_, _, counter), value in self._seen.items() if counter == name or counter.startswith(f"{name}{{")))

    def total_beyond_first(self, name: str) -> int:
        """As `total`, without the first of each life: for a counter of models made active, the number of model swaps."""
        lives: dict[tuple[str, int], float] = {}
        for (process, pid, counter), value in self._seen.items():
            if counter == name or counter.startswith(f"{name}{{"):
                lives[process, pid] = lives.get((process, pid), 0.0) + value
        return round(sum(max(0.0, value - 1.0) for value in lives.values()))


def parse_counters(text: str) -> dict[str, float]:
    """Counters of a Prometheus text page: '..._total' or '..._total{cause="evicted"}', labels sorted by name."""
    return {
        _key(sample.name, sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        if family.type == "counter"
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def _key(name: str, labels: Mapping[str, str]) -> str:
    return name + ("{" + ",".join(f'{label}="{labels[label]}"' for label in sorted(labels)) + "}" if labels else "")
