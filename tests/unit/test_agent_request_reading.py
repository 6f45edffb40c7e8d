"""From stored requests to engine requests and back to results."""

from __future__ import annotations

import math

import pytest

from qlm.api.v1 import request_pb2
from qlm.internal.v1 import events_pb2
from qlm.internal.v1.frames_pb2 import Frame
from qlm_agent.decisions.effects import CompleteItem
from qlm_agent.decisions.events import QueueHead
from qlm_agent.decisions.runs import Ending
from qlm_agent.delivery.frames import output_piece
from qlm_agent.delivery.held_run import HeldRun
from qlm_agent.delivery.logprobs import record, record_bytes
from qlm_agent.delivery.requests import pulled_run, read_head, read_pulled
from qlm_agent.delivery.results import completion_of, failure_result
from qlm_agent.engines.port import EngineOutput, FinishReason, Sampling, TextPrompt, TokenPrompt
from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.values import HeadGroup, Pulled

TOKENS = request_pb2.TokenPrompt(ids=[1, 2, 3])
COMPLETION = request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=20.0)
FIRST_TOKEN = request_pb2.Slo(kind=request_pb2.SLO_KIND_FIRST_TOKEN, seconds=2.0)
PRIORITY = request_pb2.Slo(kind=request_pb2.SLO_KIND_PRIORITY, priority=-3)
ACCEPTED_S = 1000.0


def message(slo: request_pb2.Slo = COMPLETION, **fields: object) -> request_pb2.Request:
    admission = request_pb2.Admission(prompt_tokens=3, output_tokens_max=9, slo=slo)
    return request_pb2.Request(**{"model": "m", "tokens": TOKENS, "admission": admission, **fields})  # type: ignore[arg-type]


def read(body: bytes, *, progress: bytes = b"", text_output: bool = False, logprobs: bytes = b"", slo_band: int = 0) -> HeldRun:
    pulled = Pulled(
        queue_id="5-0",
        key=RequestKey("t", "r"),
        group_id="g",
        acceptance_number=4,
        accepted_s=ACCEPTED_S,
        attempt=2,
        failed_attempts=0,
        gateway="gw",
        body=body,
        progress=progress,
        logprobs=logprobs,
    )
    return read_pulled(pulled, text_output=text_output, pulled_s=1001.0, engine_clock_s=-900.0, slo_band=slo_band)


def test_a_request_as_the_engine_takes_it() -> None:
    held = read(message().SerializeToString(), progress=b"\x07\0\0\0")
    request = held.request
    assert request is not None
    assert (request.run_id, request.model, request.prompt) == ("5-0/2", "m", TokenPrompt(ids=(1, 2, 3)))
    assert (request.prompt_tokens, request.output_tokens_max, request.produced) == (3, 9, b"\x07\0\0\0")
    assert (request.arrival, request.deadline_s) == (4, 120.0)  # accepted at 1,000 with 20 s, on a clock that is 900 s behind
    assert request.sampling == Sampling()
    assert held.slo_class == "32s"


def test_text_and_chat_prompts() -> None:
    text, chat = message(), message()
    text.text = "hello"
    chat.chat.messages.add(role="user", content="hi")
    assert read(text.SerializeToString()).request.prompt == TextPrompt(text="hello")  # type: ignore[union-attr]
    hi = {"role": "user", "content": "hi"}
    assert read(chat.SerializeToString()).request.prompt == ChatPrompt(messages=(hi,))  # type: ignore[union-attr]
    chat.chat.messages[0].more_json = '{"name": "f"}'
    chat.chat.variables_json = '{"tools": []}'
    chat.control_tokens_in_text = text.control_tokens_in_text = chat.chat.continue_final_message = True
    assert read(text.SerializeToString()).request.prompt == TextPrompt(text="hello", control_tokens=True)  # type: ignore[union-attr]
    assert read(chat.SerializeToString()).request.prompt == ChatPrompt(  # type: ignore[union-attr]
        messages=({**hi, "name": "f"},), variables={"tools": []}, continue_final_message=True, control_tokens=True
    )


@pytest.mark.parametrize("field", ["more_json", "variables_json"])
@pytest.mark.parametrize("said", ["[", "[]", '{"a": "\\ud800"}', '{"role": 1, "messages": 1}', "[" * 100_000])
def test_a_chat_whose_json_is_none_is_refused(field: str, said: str) -> None:
    chat = message()
    chat.chat.messages.add(role="user", content="hi")
    setattr(chat.chat if field == "variables_json" else chat.chat.messages[0], field, said)
    held = read(chat.SerializeToString())
    assert held.request is None
    assert field in held.refusal


def test_priority_has_no_deadline() -> None:
    held = read(message(PRIORITY).SerializeToString())
    assert held.request is not None
    assert (held.request.deadline_s, held.request.priority, held.slo_class) == (math.inf, -3, "p-3")


def test_an_slo_has_the_band_of_the_slos() -> None:
    slo, strict = (read(message(each).SerializeToString(), slo_band=5).request for each in (COMPLETION, PRIORITY))
    assert slo is not None
    assert strict is not None
    assert (slo.priority, strict.priority) == (5, -3)


def test_sampling_says_what_can_be_resumed() -> None:
    params = request_pb2.SamplingParams(temperature=0.0, top_k=5, stop=["x"])
    held = read(message(sampling=params).SerializeToString())
    assert held.request is not None
    assert held.request.sampling == Sampling(temperature=0.0, top_k=5, stop=("x",))
    assert held.request.sampling.resumable
    penalties = ({"presence_penalty": 0.5}, {"frequency_penalty": -0.5}, {"repetition_penalty": 1.1})
    for faithful in ({"seed": 0}, *penalties, {"json_schema": "{}"}, {"regex": "a"}):
        held = read(message(sampling=request_pb2.SamplingParams(**faithful)).SerializeToString())
        assert held.request is not None
        assert not held.request.sampling.resumable, faithful


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xff\xff",
        b"",
        request_pb2.Request(model="m").SerializeToString(),
        request_pb2.Request(model="m", tokens=TOKENS).SerializeToString(),
        message(admission=request_pb2.Admission(prompt_tokens=3, output_tokens_max=9)).SerializeToString(),
        message(
            admission=request_pb2.Admission(
                prompt_tokens=3, output_tokens_max=9, slo=request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=float("nan"))
            )
        ).SerializeToString(),
    ],
)
def test_what_no_gateway_accepts_is_refused_with_a_reason(body: bytes) -> None:
    held = read(body)
    assert held.request is None
    assert held.refusal


def output(**fields: object) -> EngineOutput:
    return EngineOutput(**{"run_id": "5-0/2", "token_ids": b"", "started_s": 0.0, "first_s": 0.0, "last_s": 0.0, **fields})  # type: ignore[arg-type]


def test_any_part_of_the_output_can_be_sent() -> None:
    held = read(message().SerializeToString(), progress=b"\x01\0\0\0\x02\0\0\0")
    assert held.output.add(output(token_ids=b"\x03\0\0\0\x04\0\0\0")) == 2
    emission = held.emission(1, 3)
    assert (emission.offset, emission.progress) == (4, b"\x02\0\0\0\x03\0\0\0")
    assert Frame.FromString(emission.frame) == Frame(queue_id="5-0", attempt=2, offset=1, token_ids=[2, 3])
    assert held.emission(4, 4).frame == b""


@pytest.mark.parametrize("top", [0, 3])
def test_log_probabilities_go_with_their_tokens(top: int) -> None:
    records = [record(-n / 4, [(n + place, -n / 4 - place) for place in range(top)]) for n in range(4)]
    body = message(sampling=request_pb2.SamplingParams(logprobs=top)).SerializeToString()
    held = read(body, progress=bytes(8), logprobs=records[0] + records[1])
    assert held.refusal == ""
    held.output.add(output(token_ids=bytes(8), logprobs=records[2] + records[3]))
    emission = held.emission(1, 3)
    assert emission.logprobs == records[1] + records[2]
    assert Frame.FromString(emission.frame).logprobs == request_pb2.Result.FromString(records[1] + records[2]).logprobs
    assert held.emission(4, 4).logprobs == b""


def test_stored_output_without_the_requested_log_probabilities_is_refused() -> None:
    body = message(sampling=request_pb2.SamplingParams(logprobs=2)).SerializeToString()
    assert "log probabilities" in read(body, progress=bytes(8), logprobs=record(-1.0, [(1, 0.0), (2, 0.0)])).refusal
    assert read(body).refusal == ""


@pytest.mark.parametrize("top", [None, 0, 20])
def test_records_are_equally_long(top: int | None) -> None:
    made = [record(-1e-30, [(1 << 31, -9999.0)] * top), record(-float("inf"), [(0, 0.0)] * top)] if top is not None else []
    assert {len(each) for each in made} == ({record_bytes(top)} if made else set())
    assert record_bytes(top) <= 176


def test_text_output_is_kept_in_pieces() -> None:
    progress = output_piece("ab") + output_piece("")
    held = read(message().SerializeToString(), progress=progress, text_output=True)
    assert len(held.output) == 2
    held.output.add(output(pieces=("ç",)))
    emission = held.emission(2, 3)
    assert emission.text
    assert (emission.offset, emission.progress) == (len(progress), output_piece("ç"))
    assert Frame.FromString(emission.frame) == Frame(queue_id="5-0", attempt=2, offset=2, pieces=["ç"])
    assert held.request is not None
    assert held.request.produced_pieces == ("ab", "")


def test_completion_reports_what_the_agent_knows() -> None:
    held = read(message().SerializeToString())
    held.output.add(output(token_ids=b"\x03\0\0\0\x04\0\0\0"))
    held.started_s, held.first_token_s = 1002.0, 1003.0
    item = CompleteItem(run_id=held.run_id, start=1, end=2, ending=Ending(finish=FinishReason.LENGTH))
    completion = completion_of(held, item, 1004.0)
    result = request_pb2.Result.FromString(completion.result)
    assert completion.state is RequestState.COMPLETED
    assert completion.last.progress == b"\x04\0\0\0"
    assert result.finish_reason == request_pb2.FINISH_REASON_LENGTH
    assert (result.usage.prompt_tokens, result.usage.output_tokens) == (3, 2)
    assert not result.HasField("timing"), "the queue writes the request's own times"
    event = events_pb2.RequestEvent.FromString(completion.event)
    assert event == events_pb2.RequestEvent(
        model="m", output_tokens=2, started_s=1002.0, first_token_s=1003.0, finished_s=1004.0, slo_class="32s", slack_s=16.0
    )
    assert all(field.number >= 10 for field, _ in event.ListFields())


def test_failures_carry_their_reason() -> None:
    item = CompleteItem(run_id="5-0/2", start=0, end=0, ending=Ending(reason="KV_CAPACITY_EXCEEDED", message="too big"))
    completion = completion_of(read(message().SerializeToString()), item, 1004.0)
    error = request_pb2.Result.FromString(completion.result).error
    assert completion.state is RequestState.FAILED
    assert (error.reason, error.message) == ("KV_CAPACITY_EXCEEDED", "too big")
    assert request_pb2.Result.FromString(failure_result("died")).error.reason == "ATTEMPTS_EXHAUSTED"


@pytest.mark.parametrize(
    ("slo", "first_token_s", "finished_s", "slack_s"),
    [
        (COMPLETION, 2.0, 15.0, 5.0),
        (COMPLETION, 2.0, 23.0, -3.0),
        (COMPLETION, None, 20.0, 0.0),
        (FIRST_TOKEN, 1.5, 23.0, 0.5),
        (FIRST_TOKEN, 7.5, 8.0, -5.5),
        (FIRST_TOKEN, None, 8.0, None),  # an earlier attempt made it
        (PRIORITY, 2.0, 3.0, None),
    ],
)
def test_the_event_says_how_much_of_the_objective_was_left(
    slo: request_pb2.Slo, first_token_s: float | None, finished_s: float, slack_s: float | None
) -> None:
    """Times are after the acceptance."""
    held = read(message(slo).SerializeToString())
    held.first_token_s = 0.0 if first_token_s is None else ACCEPTED_S + first_token_s
    item = CompleteItem(run_id=held.run_id, start=0, end=0, ending=Ending(finish=FinishReason.LENGTH))
    event = events_pb2.RequestEvent.FromString(completion_of(held, item, ACCEPTED_S + finished_s).event)
    assert event.finished_s == ACCEPTED_S + finished_s
    assert (event.slack_s if event.HasField("slack_s") else None) == slack_s


# Requests as the machine sees them --------------------------------------------------------------------------------------------


def test_a_run_as_the_machine_sees_it() -> None:
    run = pulled_run(read(message().SerializeToString()), 1)
    assert (run.run_id, run.stored, run.deadline_s, run.first_token, run.priority) == ("5-0/2", 1, 1020.0, False, None)
    assert (run.slo_class, run.resumable) == ("32s", True)
    assert run.displacements == 1  # its second attempt, and none failed


@pytest.mark.parametrize(
    ("slo", "deadline_s", "first_token", "priority"), [(PRIORITY, math.inf, False, -3), (FIRST_TOKEN, ACCEPTED_S + 2.0, True, None)]
)
def test_other_objectives_as_the_machine_sees_them(
    slo: request_pb2.Slo, deadline_s: float, first_token: bool, priority: int | None
) -> None:
    run = pulled_run(read(message(slo).SerializeToString()), 0)
    assert (run.deadline_s, run.first_token, run.priority) == (deadline_s, first_token, priority)


@pytest.mark.parametrize("sampling", [{"seed": 1}, {"presence_penalty": 0.5}, {"regex": "a+"}])
def test_of_one_that_cannot_be_continued_elsewhere(sampling: dict[str, object]) -> None:
    held = read(message(sampling=request_pb2.SamplingParams(**sampling)).SerializeToString())  # type: ignore[arg-type]
    assert not pulled_run(held, 0).resumable


def head_of(**meta: str) -> QueueHead:
    group = HeadGroup(group_id="g", model="m", waiting=3, waiting_prompt_tokens=60, first_deadline_s=9.0, meta=meta)
    found = read_head(group)
    assert found is not None
    return found


def test_the_head_as_the_machine_sees_it() -> None:
    assert read_head(None) is None
    head = head_of(slo_kind="completion", slo_class="8s", priority="0")
    assert head == QueueHead(group_id="g", model="m", waiting=3, waiting_prompt_tokens=60, first_deadline_s=9.0, slo_class="8s")
    assert head_of(slo_kind="first_token").first_token
    assert head_of(slo_kind="priority", priority="-2").priority == -2
    assert head_of(slo_kind="priority").priority is None  # a record of another version


@pytest.mark.parametrize("text_engine", [False, True])
def test_a_chat_of_a_text_server_is_not_evicted_after_its_first_output(text_engine: bool) -> None:
    chat, text = message(), message()
    chat.chat.messages.add(role="user", content="hi")
    text.text = "hi"
    for body, resumable in ((chat, not text_engine), (text, True)):
        held = read(body.SerializeToString(), text_output=text_engine)
        assert pulled_run(held, 0).resumable is resumable
