"""Waiting and running requests by model, as vLLM's servers report it of themselves: for routers and autoscalers that read those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.model import ModelSpec
from qlm_process.queue.instances import instances_in
from qlm_process.wire.running import from_body
from qlm_queue.overview import Overview

FAMILIES = {
    "waiting": (
        "vllm:num_requests_waiting",
        "Requests of a model that wait on virtual queues, of the whole queue: the same at each gateway.",
    ),
    "running": ("vllm:num_requests_running", "Requests of a model on engines, of the whole queue, as agents reported last."),
    "kv_usage": (
        "vllm:kv_cache_usage_perc",
        "KV in use on the instances where a model is active, 0 to 1: tokens that agents reported last over the capacity of the profiles.",
    ),
}
"""Fields of `ModelLoad` as vLLM names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    waiting: int
    running: int
    kv_usage: float


def model_loads(overview: Overview, catalogue: Mapping[str, ModelSpec], profiles: ProfileSnapshot) -> dict[str, ModelLoad]:
    """By name, of each served model. Requests that are in no group yet are not counted."""
    waiting, running = Counter[str](), Counter[str]()
    used, capacity = Counter[str](), Counter[str]()
    for group in overview.groups.values():
        if group.instance:
            waiting[group.meta.get("model", "")] += group.waiting
    bodies = {record.name: record.body for record in overview.instances}
    for facts in instances_in(overview):
        spec = catalogue.get(facts.active_model)
        hardware = None if spec is None else profiles.hardware_for(facts, spec)
        if spec is None or hardware is None:
            continue
        reported = from_body(bodies[facts.name])
        capacity[spec.name] += hardware.kv_capacity_tokens
        for runs in () if reported is None else reported.groups.values():
            running[spec.name] += len(runs.output_tokens)
            used[spec.name] += max(0, runs.prompt_tokens - runs.prefill_left_tokens + sum(runs.output_tokens) - runs.offloaded_tokens)
    return {
        name: ModelLoad(
            waiting=waiting[name],
            running=running[name],
            kv_usage=min(1.0, used[name] / capacity[name]) if capacity[name] else 0.0,
        )
        for name in catalogue
    }


class ModelLoadCollector(Collector):
    """Reads the loads at each scrape; without them (None: the queue is away) it has no samples."""

    def __init__(self) -> None:
        self.read: Callable[[], Mapping[str, ModelLoad] | None] = lambda: None

    def collect(self) -> Iterable[Metric]:
        """In the thread of a scrape."""
        loads = self.read() or {}
        for field, (name, text) in FAMILIES.items():
            family = GaugeMetricFamily(name, text, labels=("model_name",))
            for model, load in loads.items():
                family.add_metric((model,), getattr(load, field))
            yield family
