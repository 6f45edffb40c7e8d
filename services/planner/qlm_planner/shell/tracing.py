"""What the planner does, as spans: a placement in the trace of its request, a change of the plan in a trace of its own."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.trace import Tracer, set_span_in_context

from qlm_planner.machine.effects import JobEnded, Placement, PlanApplied
from qlm_process.tracing import context_of, record_span

NAMES_MAX = 16
"""Most instances that a span names; `groups_moved` counts them all."""


def trace_placements(tracer: Tracer, placed: Sequence[Placement], placed_s: float) -> None:
    """`qlm.placement` for each request that found its group: from its acceptance until then."""
    for placement in placed:
        facts = placement.arrival.facts
        attributes = {
            "qlm.request_id": facts.key.request_id,
            "qlm.tenant": facts.key.tenant,
            "qlm.model": facts.model,
            "qlm.queue_id": facts.queue_id,
            "qlm.group_id": placement.group_id,
        }
        context = context_of(placement.arrival.traceparent, placement.arrival.tracestate)
        record_span(tracer, "qlm.placement", context, facts.accepted_s, placed_s, attributes)


def trace_plan(tracer: Tracer, applied: PlanApplied, applied_s: float) -> None:
    """`qlm.plan`: from the decision until its last chunk is in the queue. Under it, where groups changed their queue, `qlm.load_balance`
    (QLM section 5): the plan is the only one who balances."""
    plan = record_span(
        tracer,
        "qlm.plan",
        Context(),
        applied.began_s,
        applied_s,
        {
            "qlm.plan.cause": applied.cause.value,
            "qlm.plan.version": applied.plan_version,
            "qlm.plan.whole": applied.whole,
            "qlm.plan.chunks": applied.chunks,
            "qlm.plan.groups_named": applied.groups_named,
            "qlm.plan.late_before": applied.late_before,
        },
    )
    if applied.groups_moved:
        record_span(
            tracer,
            "qlm.load_balance",
            set_span_in_context(plan, Context()),
            applied.began_s,
            applied_s,
            {
                "qlm.plan.version": applied.plan_version,
                "qlm.groups_moved": applied.groups_moved,
                "qlm.sources": applied.sources[:NAMES_MAX],
                "qlm.destinations": applied.destinations[:NAMES_MAX],
            },
        )


def trace_job(tracer: Tracer, ended: JobEnded, ended_s: float) -> None:
    """`planner.solve`: a job of the solver, from its question until its answer was judged, in a trace of its own."""
    record_span(
        tracer,
        "planner.solve",
        Context(),
        ended.began_s,
        ended_s,
        {
            "qlm.solve.stage": ended.stage.value,
            "qlm.plan.cause": ended.cause.value,
            "qlm.solve.outcome": ended.outcome.value,
            "qlm.solve.groups": ended.groups,
            "qlm.solve.moves": ended.moves,
            "qlm.solve.gain": ended.gain,
            "qlm.solve.rule": ended.rule,
            "qlm.solve.reason": ended.reason,
        },
    )
