"""Spans of the planner: a placement in the trace of its request, a change of the plan and a solver's job in traces of their own."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.trace import Tracer, set_span_in_context

from qlm_planner.machine.effects import JobEnded, Placement, PlanApplied
from qlm_process.tracing import context_of, record_span

NAMES_MAX = 16
"""Most instances named in a span; `groups_moved` counts all."""


def trace_placements(tracer: Tracer, placed: Sequence[Placement], placed_s: float) -> None:
    """`qlm.placement` for each placed request, from its acceptance."""
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
    """`qlm.plan`: from the decision to the last chunk. Below it `qlm.load_balance` (QLM section 5) if groups changed their queue: only
    plans balance load."""
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
    """`planner.solve`: a job of the solver from its question to the judgement of its answer, in a trace of its own."""
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
