"""Requests as decisions see them: what they ask for, never their text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, StrEnum


class SloKind(StrEnum):
    """The time that an SLO bounds (see `Slo` in request.proto)."""

    COMPLETION = "completion"
    FIRST_TOKEN = "first_token"
    PRIORITY = "priority"


class RequestState(Enum):
    """States of a request; the values are the letters that the scripts store."""

    ACCEPTED = "A"
    PLACED = "P"
    RUNNING = "R"
    COMPLETED = "C"
    FAILED = "F"
    CANCELLED = "X"
    EXPIRED = "E"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL_STATES


TERMINAL_STATES = frozenset({RequestState.COMPLETED, RequestState.FAILED, RequestState.CANCELLED, RequestState.EXPIRED})


@dataclass(frozen=True, slots=True, order=True)
class RequestKey:
    """The name of a request that its client knows."""

    tenant: str
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """A latency objective. `seconds` from acceptance for COMPLETION and FIRST_TOKEN, `priority` (lower first) for PRIORITY."""

    kind: SloKind
    seconds: float = math.inf
    priority: int = 0

    def deadline_s(self, accepted_s: float) -> float:
        """Acceptance + SLO, in seconds of the queue's clock; infinite for PRIORITY."""
        return accepted_s + self.seconds if self.kind is not SloKind.PRIORITY else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """The planner's facts of a waiting request. Times in seconds of the queue's clock. `predicted_output_tokens`: by the length model at
    arrival, 0 where that was not in use."""

    queue_id: str
    key: RequestKey
    acceptance_number: int
    accepted_s: float
    model: str
    slo: Slo
    prompt_tokens: int
    output_tokens_max: int
    predicted_output_tokens: int = 0

    @property
    def deadline_s(self) -> float:
        return self.slo.deadline_s(self.accepted_s)
