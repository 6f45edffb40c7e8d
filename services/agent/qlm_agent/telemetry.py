"""Spans and metrics of an agent. Times are seconds of the queue's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Link, SpanContext
from opentelemetry.util.types import AttributeValue
from prometheus_client import Counter, Gauge, Histogram

from qlm.api.v1 import instance_pb2
from qlm_agent.engine import Tier
from qlm_agent.held_run import HeldRun
from qlm_process.metrics import Metrics
from qlm_process.tracing import record_span

SWAP_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)


class AgentMetrics(Metrics):
    """What an agent counts."""

    def __init__(self) -> None:
        super().__init__()
        registry = self.registry
        self.running = Gauge("qlm_agent_running_requests", "Requests on the engine.", registry=registry)
        self.kv_used = Gauge("qlm_agent_kv_used_tokens", "KV in use, in tokens.", registry=registry)
        self.kv_capacity = Gauge("qlm_agent_kv_capacity_tokens", "KV of the active model, in tokens.", registry=registry)
        self.held = Gauge("qlm_agent_held_tokens", "Output tokens that the server has not confirmed yet.", registry=registry)
        self.pulls = Counter("qlm_agent_pulls_total", "Pull calls that took requests.", registry=registry)
        self.pulled = Counter("qlm_agent_pulled_requests_total", "Requests pulled.", registry=registry)
        self.emitted = Counter("qlm_agent_emitted_tokens_total", "Output tokens stored and sent.", registry=registry)
        self.ended = Counter("qlm_agent_ended_requests_total", "Requests ended by this agent, by state.", ["state"], registry=registry)
        self.returned = Counter("qlm_agent_returned_requests_total", "Requests given back, by cause.", ["cause"], registry=registry)
        self.dropped = Counter("qlm_agent_dropped_requests_total", "Requests dropped: ended elsewhere, or another's.", registry=registry)
        self.swaps = Counter("qlm_agent_model_swaps_total", "Models made active, by model.", ["model"], registry=registry)
        self.swap_s = Histogram("qlm_agent_model_swap_seconds", "Time to make a model active.", buckets=SWAP_BUCKETS_S, registry=registry)
        self.failed_loads = Counter("qlm_agent_failed_model_loads_total", "Models that could not be loaded.", ["model"], registry=registry)
        self.lease_losses = Counter("qlm_agent_lease_losses_total", "Leases lost.", registry=registry)
        self.lost_calls = Counter(
            "qlm_agent_lost_calls_total", "Calls that the server did not answer, by call.", ["call"], registry=registry
        )
        self.preemptions = Gauge("qlm_agent_preemptions", "Runs that the engine preempted since its start.", registry=registry)


class AgentTelemetry:
    """Records what happened to runs, as metrics and as spans of the request's own trace (names as in the docs)."""

    def __init__(self, instance: str, metrics: AgentMetrics, provider: TracerProvider) -> None:
        self.metrics = metrics
        self._instance = instance
        self._tracer = provider.get_tracer("qlm_agent")
        self._last_swap: tuple[str, float, SpanContext] | None = None  # model, end, span

    def pulled(self, held: HeldRun, began_s: float) -> None:
        """A pull that began at `began_s` gave this run. If it waited for the last model swap, its wait is linked to that."""
        swap = self._last_swap
        links = (Link(swap[2]),) if swap is not None and swap[0] == held.model and swap[1] > held.pulled.accepted_s else ()
        self._span("qlm.queue_wait", held, held.pulled.accepted_s, held.pulled_s, links=links)
        self._span("qlm.pull", held, began_s, held.pulled_s)

    def left_engine(self, held: HeldRun) -> None:
        """The run is off the engine, for whatever reason."""
        if held.started_s and held.first_token_s:
            self._span("qlm.prefill", held, held.started_s, held.first_token_s)
            self._span("qlm.decode", held, held.first_token_s, held.last_token_s, {"qlm.output_tokens": len(held.output)})
        elif held.started_s and held.last_token_s:
            # Resumed: the first token was made by an earlier attempt.
            self._span("qlm.decode", held, held.started_s, held.last_token_s, {"qlm.output_tokens": len(held.output)})

    def completed(self, held: HeldRun, began_s: float, ended_s: float) -> None:
        """The call that wrote the end of the run."""
        self._span("qlm.complete", held, began_s, ended_s)

    def swapped(self, model: str, tier: str, began_s: float, ended_s: float) -> None:
        """A model was moved to a tier: a trace of its own."""
        attributes: dict[str, AttributeValue] = {"qlm.model": model, "qlm.tier": tier, "qlm.instance": self._instance}
        span = record_span(self._tracer, "qlm.model_swap", Context(), began_s, ended_s, attributes)
        if tier == Tier.ACTIVE:
            self._last_swap = (model, ended_s, span.get_span_context())

    def load(self, load: instance_pb2.InstanceLoad, held_tokens: int, preemptions: int) -> None:
        """The agent now."""
        metrics = self.metrics
        metrics.running.set(load.running)
        metrics.kv_used.set(load.kv_used_tokens)
        metrics.kv_capacity.set(load.kv_capacity_tokens)
        metrics.held.set(held_tokens)
        metrics.preemptions.set(preemptions)

    def _span(
        self,
        name: str,
        held: HeldRun,
        start_s: float,
        end_s: float,
        more: Mapping[str, AttributeValue] | None = None,
        links: Sequence[Link] = (),
    ) -> None:
        pulled = held.pulled
        attributes: dict[str, AttributeValue] = {
            "qlm.request_id": pulled.key.request_id,
            "qlm.tenant": pulled.key.tenant,
            "qlm.model": held.model,
            "qlm.queue_id": pulled.queue_id,
            "qlm.group_id": pulled.group_id,
            "qlm.instance": self._instance,
            "qlm.attempt": pulled.attempt,
            **(more or {}),
        }
        record_span(self._tracer, name, held.trace, start_s, end_s, attributes, links)
