"""What an agent's machine is set to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qlm_core.profile import HardwareProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSettings:
    """`models`: those it can serve. `lookahead_requests`: how many it may pull beyond what runs at once. `coalesce_s`: longest that output
    waits for more, but for the first and last of a run. `buffer_tokens_max`: output held while the server is away; the engine pauses
    there. `poll_s`: how often an idle agent looks at its queue by itself. `owned_check_s`: how often it compares what it owns with the
    server. `drain_finish_s`: how long runs may go on where a drain does not say. `give_up_s`: how long after the end of a drain it tries
    to give back what is left before it stops anyway.

    `hardware`: by model, on this agent's GPUs and by its clock. `weights_gb`: by model, as the engine counts them, where that is known; the
    others as `hardware` says. `host_memory_gb`: budget for the weights of warm models. `slo_band`: the band of requests with an SLO among
    those with strict priorities, as the planner has it. `host_kv_apart`: whether each model has host memory for KV of its own; else all
    share it. `evict`, `kv_swap`, `warm_ahead`: whether it does so. `displacements_max`: how often a request gives way to others.
    `offloaded_max_s`: after so long in host memory a run counts as more urgent than whatever is at the head. `batch_by_slo`: fewer than
    `batch_max` requests run at once where more would be too slow for their SLOs."""

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
