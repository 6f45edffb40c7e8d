"""What the end of a run says of its SLO."""

from __future__ import annotations

import pytest

from qlm.api.v1 import request_pb2
from qlm.internal.v1.events_pb2 import RequestEvent
from qlm_agent.decisions.effects import CompleteItem
from qlm_agent.decisions.runs import Ending
from qlm_agent.delivery.requests import read_pulled
from qlm_agent.delivery.results import completion_of
from qlm_agent.engines.port import FinishReason
from qlm_core.request import RequestKey
from qlm_queue.values import Pulled

ACCEPTED_S = 1_000.0
COMPLETION = request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=20.0)
FIRST_TOKEN = request_pb2.Slo(kind=request_pb2.SLO_KIND_FIRST_TOKEN, seconds=5.0)
PRIORITY = request_pb2.Slo(kind=request_pb2.SLO_KIND_PRIORITY, priority=3)


def event(slo: request_pb2.Slo, *, first_token_s: float, finished_s: float) -> RequestEvent:
    body = request_pb2.Request(
        model="m",
        tokens=request_pb2.TokenPrompt(ids=[1, 2]),
        admission=request_pb2.Admission(prompt_tokens=2, output_tokens_max=4, slo=slo),
    )
    pulled = Pulled(
        queue_id="1-0", key=RequestKey("t", "r"), group_id="g", acceptance_number=1, accepted_s=ACCEPTED_S, attempt=1, failed_attempts=0,
        gateway="", body=body.SerializeToString(), progress=b"",
    )  # fmt: skip
    held = read_pulled(pulled, text_output=False, pulled_s=ACCEPTED_S + 1.0, engine_clock_s=500.0)
    assert held.refusal == ""
    held.first_token_s = first_token_s
    item = CompleteItem(run_id=held.run_id, start=0, end=0, ending=Ending(finish=FinishReason.LENGTH))
    return RequestEvent.FromString(completion_of(held, item, finished_s).event)


@pytest.mark.parametrize(
    ("slo", "first_token_s", "finished_s", "slack_s"),
    [
        (COMPLETION, ACCEPTED_S + 2.0, ACCEPTED_S + 15.0, 5.0),
        (COMPLETION, ACCEPTED_S + 2.0, ACCEPTED_S + 23.0, -3.0),
        (COMPLETION, 0.0, ACCEPTED_S + 20.0, 0.0),
        (FIRST_TOKEN, ACCEPTED_S + 2.0, ACCEPTED_S + 23.0, 3.0),
        (FIRST_TOKEN, ACCEPTED_S + 7.5, ACCEPTED_S + 8.0, -2.5),
        (FIRST_TOKEN, 0.0, ACCEPTED_S + 8.0, None),  # an earlier attempt made it
        (PRIORITY, ACCEPTED_S + 2.0, ACCEPTED_S + 3.0, None),
    ],
)
def test_the_event_tells_how_much_of_the_objective_was_left(
    slo: request_pb2.Slo, first_token_s: float, finished_s: float, slack_s: float | None
) -> None:
    told = event(slo, first_token_s=first_token_s, finished_s=finished_s)
    assert told.finished_s == finished_s
    assert (told.slack_s if told.HasField("slack_s") else None) == slack_s
