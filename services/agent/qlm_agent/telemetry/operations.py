"""Records of the LLM serving operations that an agent carries out (QLM section 5): each is a span, a metric, and, if no script of the queue
writes it, an event. Times are seconds of the queue's clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, Tracer
from opentelemetry.util.types import AttributeValue
from prometheus_client import CollectorRegistry, Counter, Histogram

from qlm.internal.v1 import events_pb2
from qlm_agent.decisions.runs import ReturnCause
from qlm_agent.delivery.held_run import HeldRun
from qlm_agent.engines.port import Tier
from qlm_process.tracing import record_span

LSO_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)


class Lso(StrEnum):
    """Operations of an agent; each value is a label, and "qlm." before it the name of a span. Load balance is the planner's."""

    PULL = "pull"
    UNPULL = "unpull"
    EVICT = "evict"
    KV_OFFLOAD = "kv_offload"
    KV_RESTORE = "kv_restore"
    MODEL_WARM = "model_warm"
    MODEL_SWAP = "model_swap"

    @property
    def span(self) -> str:
        return f"qlm.{self.value}"


GIVE_BACKS = {ReturnCause.UNSTARTED: Lso.UNPULL, ReturnCause.DISPLACED: Lso.UNPULL, ReturnCause.EVICTED: Lso.EVICT}
KV_EVENTS = {Lso.KV_OFFLOAD: events_pb2.EVENT_KIND_KV_OFFLOADED, Lso.KV_RESTORE: events_pb2.EVENT_KIND_KV_RESTORED}
MODEL_EVENTS = {Lso.MODEL_SWAP: events_pb2.EVENT_KIND_MODEL_SWAPPED, Lso.MODEL_WARM: events_pb2.EVENT_KIND_MODEL_WARMED}
TIER_LSOS = {Tier.ACTIVE: Lso.MODEL_SWAP, Tier.WARM: Lso.MODEL_WARM}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMove:
    """A model moved to a tier from another in `took_s` of the engine's clock; `from_model` was active before, "" for none."""

    model: str
    tier: Tier
    from_tier: Tier
    from_model: str
    took_s: float


class RunSpans:
    """Records spans of one instance's runs, each in the trace of its request."""

    def __init__(self, instance: str, tracer: Tracer) -> None:
        self._instance = instance
        self._tracer = tracer

    def record(
        self,
        name: str,
        held: HeldRun,
        start_s: float,
        end_s: float,
        more: Mapping[str, AttributeValue] | None = None,
        links: Sequence[Link] = (),
    ) -> None:
        if held.trace is None:
            return
        pulled = held.pulled
        attributes: dict[str, AttributeValue] = {
            "qlm.request_id": pulled.key.request_id,
            "qlm.tenant": pulled.key.tenant,
            "qlm.model": held.model,
            "qlm.queue_id": pulled.queue_id,
            "qlm.group_id": pulled.group_id,
            "qlm.instance": self._instance,
            "qlm.attempt": pulled.attempt,
        }
        if more:
            attributes.update(more)
        record_span(self._tracer, name, held.trace, start_s, end_s, attributes, links)


class LsoMetrics:
    """The figures of a process's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.total = Counter(
            "qlm_agent_lso_total",
            "LLM serving operations carried out, by operation: requests of pull, unpull, evict, kv_offload and kv_restore, models of "
            "model_warm and model_swap.",
            ["lso"],
            registry=registry,
        )
        self.seconds = Histogram(
            "qlm_agent_lso_seconds",
            "Time of one operation, over all its requests together, by operation.",
            ["lso"],
            buckets=LSO_BUCKETS_S,
            registry=registry,
        )
        for lso in Lso:  # so that unused operations read 0
            self.total.labels(lso=lso.value)
            self.seconds.labels(lso=lso.value)

    def done(self, lso: Lso, count: int, took_s: float) -> None:
        self.total.labels(lso=lso.value).inc(count)
        self.seconds.labels(lso=lso.value).observe(max(0.0, took_s))


class LsoRecords:
    """Records operations as they are done. `report`: takes events for the queue's event stream."""

    def __init__(
        self, instance: str, metrics: LsoMetrics, tracer: Tracer, spans: RunSpans, report: Callable[[events_pb2.RequestEvent], None]
    ) -> None:
        self._instance = instance
        self._metrics = metrics
        self._tracer = tracer
        self._spans = spans
        self._report = report
        self._last_swap: tuple[str, float, SpanContext] | None = None  # model, end, span
        self._last_warming: dict[str, SpanContext] = {}  # by model, until it is active

    def record_pull(self, runs: Sequence[HeldRun], began_s: float, ended_s: float) -> None:
        """A pull returned these runs."""
        if runs:
            self._metrics.done(Lso.PULL, len(runs), ended_s - began_s)
        for held in runs:
            self._spans.record(Lso.PULL.span, held, began_s, held.pulled_s)

    def record_return(self, cause: ReturnCause, runs: Sequence[HeldRun], began_s: float, ended_s: float) -> None:
        """Runs are back in the queue. A drain or a failure is no operation. An eviction begins when the run is taken off the engine."""
        lso = GIVE_BACKS.get(cause)
        if lso is None or not runs:
            return
        self._metrics.done(lso, len(runs), ended_s - min(held.taken_off_s or began_s for held in runs))
        for held in runs:
            self._spans.record(lso.span, held, held.taken_off_s or began_s, ended_s, {"qlm.output_tokens": len(held.output)})

    def record_kv_move(
        self, lso: Lso, runs: Sequence[HeldRun], incarnation: str, began_s: float, ended_s: float, took_s: float = 0.0
    ) -> None:
        """The KV of runs is in host memory, or back. `took_s`: of all of them together by the engine's clock, 0 where it is not known."""
        if not runs:
            return
        self._metrics.done(lso, len(runs), ended_s - began_s)
        sizes = [held.prompt_tokens + len(held.output) for held in runs]
        for number, (held, tokens) in enumerate(zip(runs, sizes, strict=True)):
            first = number == 0 and took_s > 0.0
            self._spans.record(lso.span, held, began_s, ended_s, {"qlm.kv_tokens": tokens})
            self._report(
                events_pb2.RequestEvent(
                    kind=KV_EVENTS[lso],
                    queue_id=held.pulled.queue_id,
                    group_id=held.pulled.group_id,
                    attempt=held.pulled.attempt,
                    slo_class=held.slo_class,
                    model=held.model,
                    incarnation=incarnation,
                    instance=self._instance,
                    kv_tokens=tokens,
                    started_s=began_s,
                    finished_s=ended_s,
                    took_s=took_s if first else 0.0,
                    moved_requests=len(runs) if first else 0,
                    moved_tokens=sum(sizes) if first else 0,
                )
            )

    def record_model_move(self, move: ModelMove, incarnation: str, began_s: float, ended_s: float) -> None:
        """A model is in another tier. Becoming cold only makes room: no operation."""
        lso = TIER_LSOS.get(move.tier)
        if lso is None:
            return
        model, from_model = move.model, move.from_model
        timed = move.from_tier is Tier.COLD or (move.tier, move.from_tier) == (Tier.ACTIVE, Tier.WARM)  # else nothing was loaded
        self._metrics.done(lso, 1, ended_s - began_s)
        attributes: dict[str, AttributeValue] = {"qlm.model": model, "qlm.instance": self._instance, "qlm.from_model": from_model}
        links = _links(self._last_warming.pop(model, None))
        span = record_span(self._tracer, lso.span, Context(), began_s, ended_s, attributes, links)
        if lso is Lso.MODEL_SWAP:
            self._last_swap = (model, ended_s, span.get_span_context())
        else:
            self._last_warming[model] = span.get_span_context()
        self._report(
            events_pb2.RequestEvent(
                kind=MODEL_EVENTS[lso],
                model=model,
                from_model=from_model if lso is Lso.MODEL_SWAP else "",
                incarnation=incarnation,
                instance=self._instance,
                started_s=began_s,
                finished_s=ended_s,
                took_s=move.took_s if timed else 0.0,
                from_warm=lso is Lso.MODEL_SWAP and move.from_tier is Tier.WARM,
            )
        )

    def model_swap_links(self, held: HeldRun) -> tuple[Link, ...]:
        """Links the model swap that ended while this request waited for its model."""
        swap = self._last_swap
        return _links(swap[2]) if swap is not None and swap[0] == held.model and swap[1] > held.pulled.accepted_s else ()


def _links(context: SpanContext | None) -> tuple[Link, ...]:
    """To the span of an operation, if its trace is kept."""
    return (Link(context),) if context is not None and context.is_valid else ()
