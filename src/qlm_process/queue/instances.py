"""The instances of the queue as read (`Overview`)."""

from __future__ import annotations

import structlog

from qlm_core.vocabulary.instance import InstanceFacts
from qlm_process.wire.instance import from_body
from qlm_queue.overview import Overview


def instances_in(overview: Overview) -> tuple[InstanceFacts, ...]:
    """The registered instances whose lease holds, in the overview's order. One whose stored body is no instance is logged and left out,
    so that it does not take the others with it."""
    found: list[InstanceFacts] = []
    for record in overview.instances:
        if record.alive:
            try:
                found.append(from_body(record.body, record.incarnation))
            except ValueError as error:
                structlog.get_logger().warning("instance_unreadable", instance=record.name, error=str(error))
    return tuple(found)
