"""The load in a server's /metrics: vLLM's names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

RUNNING, WAITING, KV_USAGE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
CACHE = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """All clients together. `kv_capacity_tokens` is 0 if not reported; KV is used in blocks of `block_tokens`."""

    running: int
    waiting: int
    kv_usage: float
    kv_capacity_tokens: int
    preemptions: int
    block_tokens: int = 1


def read_load(metrics: str) -> ServerLoad | None:
    """None if they are not vLLM's. Raises ValueError for text that is no metrics."""
    sums = dict.fromkeys((RUNNING, WAITING, PREEMPTIONS), 0.0)
    usages: list[float] = []
    capacity, block_tokens = 0, 1
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name in sums:
                sums[sample.name] += sample.value
            elif sample.name == KV_USAGE:
                usages.append(sample.value)
            elif sample.name == CACHE:
                size = _whole(sample.labels.get("block_size", ""))
                capacity += _whole(sample.labels.get("num_gpu_blocks", "")) * size
                block_tokens = max(block_tokens, size)
    if not usages:
        return None
    if not all(math.isfinite(value) for value in (*sums.values(), *usages)):
        raise ValueError("a load that is no number")
    return ServerLoad(
        running=int(sums[RUNNING]),
        waiting=int(sums[WAITING]),
        kv_usage=sum(usages) / len(usages),
        kv_capacity_tokens=capacity,
        preemptions=int(sums[PREEMPTIONS]),
        block_tokens=block_tokens,
    )


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() else 0
