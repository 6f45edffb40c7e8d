"""What a simulated cluster is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from qlm_agent.simulated.core import SimulatedLimits
from qlm_core.model import ModelSpec
from qlm_core.profile import ProfileSnapshot
from qlm_queue.values import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDescription:
    """One agent and its engine. `models`: names out of the cluster's. The other fields are settings of the agent and its engine, with the
    meaning and the defaults of the configuration; `wake_min_s`: least time between two looks at the engine."""

    name: str
    gpu: str = "A100-80GB"
    n_gpu: int = 1
    models: tuple[str, ...]
    time_scale: float = 1.0
    batch_max: int = 256
    prefill_chunk_tokens: int = 2048
    host_memory_gb: float = 64.0
    host_kv_gb: float = 16.0
    kv_capacity_tokens: int = 0
    tell_every_s: float = 0.02
    step_noise: float = 0.05
    bias_max: float = 0.15
    lookahead_requests: int = 0
    coalesce_s: float = 0.05
    buffer_tokens_max: int = 500_000
    poll_s: float = 1.0
    owned_check_s: float = 15.0
    slo_band: int = 0
    evict: bool = True
    kv_swap: bool = True
    warm_ahead: bool = True
    displacements_max: int = 3
    offloaded_max_s: float = 300.0
    operations: tuple[str, ...] = ()
    drain_finish_s: float = 20.0
    heartbeat_s: float = 1.0
    wake_min_s: float = 0.002

    @property
    def limits(self) -> SimulatedLimits:
        """What the engine takes of this."""
        return SimulatedLimits(
            time_scale=self.time_scale,
            batch_max=self.batch_max,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            host_memory_gb=self.host_memory_gb,
            host_kv_gb=self.host_kv_gb,
            kv_capacity_tokens=self.kv_capacity_tokens,
            tell_every_s=self.tell_every_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDescription:
    """`planners`, `estimators`: processes of each role, of which one leads. `clock_skew_max_s`: how far a process may be off in what it
    takes for the server's clock. `profiles`: of its GPUs, None for those that come with QLM. `stream_buffer_tokens_max`: of a gateway, for
    a reader that is slow."""

    models: tuple[ModelSpec, ...]
    instances: tuple[InstanceDescription, ...]
    gateways: int = 1
    planners: int = 1
    estimators: int = 1
    bounds: Bounds = field(default_factory=Bounds)
    lease_ttl_s: float = 3.0
    lease_renew_s: float = 1.0
    profiles_every_s: float = 1.0
    clock_skew_max_s: float = 0.0
    stream_buffer_tokens_max: int = 4_096
    profiles: ProfileSnapshot | None = None
