"""Settings of the agent's machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qlm_core.profiles.profile import HardwareProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSettings:
    """`models`: served models. `lookahead_requests`: how many it may pull beyond the batch. `coalesce_s`: longest that output waits for
    more, except the first and last of a run. `buffer_tokens_max`: output held while the server is away; the engine pauses there. `poll_s`:
    how often an idle agent polls its queue. `owned_check_s`: how often it compares its runs with the server. `drain_finish_s`: how long
    runs may continue in a drain without a time. `give_up_s`: how long after the end of a drain it tries to give back the rest before it
    stops anyway.

    `hardware`: by model, on this agent's GPUs and by its clock. `weights_gb`: by model, as the engine counts them, as far as known; else
    from `hardware`. `host_memory_gb`: budget for the weights of warm models. `slo_band`: the planner's band of requests with an SLO among
    those with strict priorities. `host_kv_apart`: each model has host memory for KV of its own; else all share it. `evict`, `kv_swap`,
    `warm_ahead`: switches. `displacements_max`: how often a request is evicted or offloaded for others. `offloaded_max_s`: after so long in
    host memory a run is more urgent than any head. `batch_by_slo`: fewer than `batch_max` requests run at once if more would be too slow
    for their SLOs."""

    models: tuple[str, ...]
    batch_max: int = 256
    lookahead_requests: int = 0
    coalesce_s: float = 0.05
    buffer_tokens_max: int = 500_000
    poll_s: float = 1.0
    owned_check_s: float = 15.0
    drain_finish_s: float = 30.0
    give_up_s: float = 10.0
    hardware: Mapping[str, HardwareProfile] = field(default_factory=dict)
    weights_gb: Mapping[str, float] = field(default_factory=dict)
    host_memory_gb: float = 0.0
    host_kv_apart: bool = False
    slo_band: int = 0
    evict: bool = True
    kv_swap: bool = True
    warm_ahead: bool = True
    displacements_max: int = 3
    offloaded_max_s: float = 300.0
    batch_by_slo: bool = False
