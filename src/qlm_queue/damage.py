"""Findings of a repair of a queue, and the fate of requests whose record is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from qlm.api.v1.request_pb2 import Result, ResultError

LOGGED_MAX = 20
"""Findings of one repair that are logged each; the rest is counted."""

DAMAGED_RESULT = Result(
    error=ResultError(reason="RECORD_DAMAGED", message="the request's record in the queue was damaged; send the request again")
).SerializeToString()


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A record that did not fit. `record`: its key on the server; `problem`: what is wrong; `remedy`: what a repair does about it."""

    record: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.record} {self.problem}: {self.remedy}"


def log_damage(found: Sequence[Damage]) -> None:
    for each in found[:LOGGED_MAX]:
        structlog.get_logger().error("record_damaged", record=each.record, problem=each.problem, remedy=each.remedy)
    if found:
        structlog.get_logger().error("queue_repaired", damaged=len(found))
