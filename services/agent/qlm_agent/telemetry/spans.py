"""Spans of single requests, each in the request's own trace. Times are seconds of the queue's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry.trace import Link, Tracer
from opentelemetry.util.types import AttributeValue

from qlm_agent.delivery.held_run import HeldRun
from qlm_process.tracing import record_span


class RunSpans:
    """Records spans of one instance's runs."""

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
