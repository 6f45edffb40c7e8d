"""Converts the end of a run for the queue: the Result and the caller's part of the lifecycle event."""

from __future__ import annotations

from qlm.api.v1 import request_pb2
from qlm.internal.v1 import events_pb2
from qlm_agent.decisions.effects import CompleteItem
from qlm_agent.delivery.held_run import HeldRun
from qlm_agent.engines.port import FinishReason
from qlm_core.vocabulary.request import RequestState, SloKind
from qlm_queue.values import Completion

FINISH_REASONS = {
    FinishReason.STOP: request_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: request_pb2.FINISH_REASON_LENGTH,
}


def completion_of(held: HeldRun, item: CompleteItem, now_s: float) -> Completion:
    """The completion that ends a run. The queue adds the request's own times; the event's are this run's, with `first_token_s` 0 if an
    earlier attempt made the first token."""
    finish = item.ending.finish
    result = request_pb2.Result(
        model=held.model,
        usage=request_pb2.Usage(prompt_tokens=held.prompt_tokens, output_tokens=item.end),
    )
    if finish is not None:
        result.finish_reason = FINISH_REASONS[finish]
    else:
        result.error.CopyFrom(request_pb2.ResultError(reason=item.ending.reason, message=item.ending.message))
    event = events_pb2.RequestEvent(
        model=held.model,
        output_tokens=item.end,
        started_s=held.started_s,
        first_token_s=held.first_token_s,
        finished_s=now_s,
        slo_class=held.slo_class,
        slack_s=_slack_s(held, now_s),
        length_guess=held.length_guess,
        paused_s=held.paused_s,
        cached_tokens=held.cached_tokens,
    )
    return Completion(
        last=held.emission(item.start, item.end),
        state=RequestState.COMPLETED if finish is not None else RequestState.FAILED,
        result=result.SerializeToString(),
        event=event.SerializeToString(),
    )


def _slack_s(held: HeldRun, finished_s: float) -> float | None:
    """Seconds left of the SLO at the end, negative if missed; None if unknown here: a priority, or a first token of an earlier attempt."""
    slo = held.slo
    if slo is None or slo.kind is SloKind.PRIORITY:
        return None
    met_s = finished_s if slo.kind is SloKind.COMPLETION else held.first_token_s
    return slo.deadline_s(held.pulled.accepted_s) - met_s if met_s else None


def failure_result(message: str) -> bytes:
    """The Result of a request with only failed attempts."""
    error = request_pb2.ResultError(reason="ATTEMPTS_EXHAUSTED", message=message)
    return request_pb2.Result(error=error).SerializeToString()
