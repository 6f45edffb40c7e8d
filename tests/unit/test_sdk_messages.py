"""Requests as the SDK writes them, and its public names."""

from __future__ import annotations

import json
from typing import Any

import pytest

import qlm
from qlm.api.v1 import gateway_pb2, prediction_pb2, request_pb2
from qlm.errors import ConfigError, InternalError, InvalidRequest, RequestEnded
from qlm.messages import Prompt, accepted_value, chunk_value, outlook_value, queue_status_value, request_message, result_value
from qlm.token_stream import ended_error
from qlm.values import Outlook, Prediction, RequestState, Slo


def message(prompt: Prompt = "hi", sampling: dict[str, Any] | None = None, slo: Slo | None = None, **changes: Any) -> request_pb2.Request:
    fields: dict[str, Any] = {"tenant": "t", "application": "a", "request_id": "r", "expire_after_s": None, **changes}
    return request_message("m", prompt, sampling or {}, slo=slo, **fields)


def test_prompts() -> None:
    assert message("hi").text == "hi"
    assert list(message([1, 2]).tokens.ids) == [1, 2]
    assert [(turn.role, turn.content) for turn in message([{"role": "user", "content": "hi"}]).chat.messages] == [("user", "hi")]
    assert message([]).WhichOneof("prompt") == "tokens"


def test_unset_fields_are_absent() -> None:
    plain = message()
    assert not plain.HasField("sampling")
    assert not plain.HasField("slo")
    assert not plain.HasField("expire_after_s")
    greedy = message(sampling={"temperature": 0.0, "seed": 0, "json_schema": "{}"})
    assert greedy.sampling.HasField("temperature")
    assert greedy.sampling.HasField("seed")
    assert not greedy.sampling.HasField("top_p")
    assert greedy.sampling.WhichOneof("structure") == "json_schema"


def test_objectives() -> None:
    assert message(slo=Slo.completion(5.0)).slo == request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=5.0)
    assert message(slo=Slo.first_token(5.0)).slo.kind == request_pb2.SLO_KIND_FIRST_TOKEN
    assert message(slo=Slo.priority_of(-3)).slo == request_pb2.Slo(kind=request_pb2.SLO_KIND_PRIORITY, priority=-3)


@pytest.mark.parametrize("top", [0, 2])
def test_log_probabilities_are_one_a_token(top: int) -> None:
    said = request_pb2.Logprobs(of_token=[-1.0, -2.0, -3.0], top_token_ids=range(3 * top), of_top=[-float(n) for n in range(3 * top)])
    chunk = chunk_value(gateway_pb2.TokenChunk(offset=4, token_ids=[1, 2, 3], logprobs=said))
    assert [each.of_token for each in chunk.logprobs] == [-1.0, -2.0, -3.0]
    assert [each.top for each in chunk.logprobs] == [tuple((n, -float(n)) for n in range(at * top, (at + 1) * top)) for at in range(3)]
    result = result_value(request_pb2.Result(state=request_pb2.REQUEST_STATE_COMPLETED, logprobs=said))
    assert result.logprobs == chunk.logprobs
    assert chunk_value(gateway_pb2.TokenChunk(token_ids=[1])).logprobs == ()


def test_every_figure_of_a_prediction_is_read() -> None:
    figures: dict[str, Any] = {
        "wait_p50_s": 1.0, "wait_p90_s": 2.0, "completion_p50_s": 3.0, "completion_p90_s": 4.0, "requests_ahead": 5, "profile_version": 6,
        "probability_late": 0.0,
    }  # fmt: skip
    accepted = gateway_pb2.Accepted(state=request_pb2.REQUEST_STATE_ACCEPTED, prediction=prediction_pb2.Prediction(**figures))
    assert accepted_value(accepted).prediction == Prediction(**figures)
    accepted.prediction.ClearField("probability_late")
    assert accepted_value(accepted).prediction == Prediction(**{**figures, "probability_late": None})
    outlook = gateway_pb2.Outlook(state=request_pb2.REQUEST_STATE_PLACED, prediction=prediction_pb2.Prediction(**figures))
    assert outlook_value(outlook) == Outlook(state=RequestState.PLACED, prediction=Prediction(**figures))
    assert outlook_value(gateway_pb2.Outlook(state=request_pb2.REQUEST_STATE_PLACED)).prediction is None


def test_unreached_figures_are_none_and_no_zero() -> None:
    status = gateway_pb2.RequestStatus(state=request_pb2.REQUEST_STATE_PLACED, requests_ahead=0)
    seen = queue_status_value(gateway_pb2.QueueStatusResponse(request=status)).request
    assert seen is not None
    assert (seen.requests_ahead, seen.deadline_s, seen.finished_s) == (0, None, None)


def test_public_names_are_there() -> None:
    assert {name: getattr(qlm, name).__name__ for name in qlm.__all__ if name != "errors"} == {
        name: name for name in qlm.__all__ if name != "errors"
    }
    assert qlm.errors.RequestEnded is RequestEnded
    with pytest.raises(AttributeError):
        _ = qlm.nothing


async def test_a_client_with_wrong_settings_is_refused() -> None:
    wrong: list[dict[str, Any]] = [{"addresses": []}, {"addresses": ""}, {"addresses": "x:1", "call_timeout_s": 0.0}]
    for settings in wrong:
        with pytest.raises(ConfigError):
            qlm.AsyncClient(**settings)
    async with qlm.AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match="slo_s"):
            client.generate("m", "x", slo_s=1.0, slo=Slo.completion(1.0))
        with pytest.raises(InvalidRequest, match="timeout_s"):
            client.generate("m", "x", timeout_s=float("nan"))
        with pytest.raises(InternalError):
            await client.stream("r").wait_accepted()


def test_the_error_of_a_result_names_its_reason() -> None:
    result = request_pb2.Result(
        tenant="t",
        request_id="r",
        state=request_pb2.REQUEST_STATE_FAILED,
        error=request_pb2.ResultError(reason="KV_CAPACITY_EXCEEDED", message="too long"),
    )
    error = ended_error(result_value(result))
    assert (type(error), error.reason, error.message) == (RequestEnded, "KV_CAPACITY_EXCEEDED", "too long")
    assert error.details == {"state": RequestState.FAILED.value, "tenant": "t", "request_id": "r"}


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"prompt": b"hi"}, "prompt"),
        ({"prompt": bytearray(b"hi")}, "prompt"),
        ({"prompt": memoryview(b"hi")}, "prompt"),
        ({"prompt": {"role": "user", "content": "hi"}}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt.ids"),
        ({"prompt": [1.5]}, "prompt.ids"),
        ({"prompt": {1, 2}}, "prompt"),
        ({"prompt": [1 << 32]}, "prompt.ids"),
        ({"prompt": [-1]}, "prompt.ids"),
        ({"prompt": "\udc80"}, "text"),
        ({"request_id": "\udc80"}, "request_id"),
        ({"sampling": {"max_tokens": -1}}, "sampling.max_tokens"),
        ({"sampling": {"seed": 1 << 63}}, "sampling.seed"),
        ({"expected_output_tokens": -1}, "expected_output_tokens"),
        ({"expected_output_tokens": 2**32}, "expected_output_tokens"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, "prompt"),
        ({"prompt": [{"role": "user", "content": b"hi"}]}, "prompt"),
        ({"prompt": [{"content": "hi"}]}, "prompt"),
        ({"prompt": [{"role": "user", "content": "hi"}, "hi"]}, "prompt"),
        ({"prompt": [{"role": "user", "content": "\udc80"}]}, "prompt.content"),
        ({"prompt": [{"role": "user", "content": "hi", "more": object()}]}, "prompt"),
        ({"prompt": [{"role": "user", "content": "hi", "more": float("nan")}]}, "prompt"),
        ({"prompt": [{"role": "user", "content": "hi"}], "tools": [object()]}, "chat_variables, tools"),
        ({"sampling": {"stop": b"low"}}, "sampling.stop"),
        ({"sampling": {"stop": ["a", 1]}}, "sampling.stop"),
        ({"sampling": {"stop": 7}}, "sampling.stop"),
        ({"sampling": {"stop": "\udc80"}}, "sampling.stop"),
        ({"sampling": {"json_schema": {"type": "object"}}}, "sampling.json_schema"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature"),
        ({"sampling": {"max_tokens": 1.5}}, "sampling.max_tokens"),
        ({"sampling": {"json_schema": "{}", "regex": "a"}}, "sampling.regex"),
        ({"slo": Slo(kind="soon")}, "slo.kind"),
        ({"slo": Slo.completion("soon")}, "slo.seconds"),  # type: ignore[arg-type]
        ({"tenant": 7}, "tenant"),
        ({"expire_after_s": "soon"}, "expire_after_s"),
        ({"control_tokens_in_text": "yes"}, "control_tokens_in_text"),
    ],
)
def test_an_error_names_the_field_and_its_rule(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        message(**wrong)
    assert refused.value.details["field"] == field
    assert refused.value.message == f"{field}: must be {refused.value.details['rule']}"


def test_a_stop_string_is_one_and_not_its_letters() -> None:
    assert list(message(sampling={"stop": "low"}).sampling.stop) == ["low"]
    assert list(message(sampling={"stop": ("a", "b")}).sampling.stop) == ["a", "b"]
    assert list(message(sampling={"stop": (stop for stop in "a")}).sampling.stop) == ["a"]


def test_all_of_a_chat_is_sent() -> None:
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    turns: Prompt = [{"role": "user", "content": "hi"}, call]
    sent = message(turns, continue_final_message=True, tools=[{"name": "f"}], chat_variables={"a": 1})
    assert [(turn.role, turn.content, turn.more_json) for turn in sent.chat.messages] == [
        ("user", "hi", ""),
        ("assistant", "", '{"tool_calls": [{"name": "f"}]}'),
    ]
    assert sent.chat.continue_final_message
    assert json.loads(sent.chat.variables_json) == {"a": 1, "tools": [{"name": "f"}]}
    assert message(control_tokens_in_text=True).control_tokens_in_text


async def test_calls_with_wrong_arguments_are_refused_by_name() -> None:
    async with qlm.AsyncClient("127.0.0.1:1") as client:
        for call in (client.result("\udc80"), client.cancel("\udc80"), client.status("\udc80"), client.cancel(7)):  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match="request_id"):
                await call
        for seconds in (-1, float("nan"), "soon"):
            with pytest.raises(InvalidRequest, match="wait_s"):
                await client.result("r", seconds)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="request_id"):
            client.stream("\udc80")
        with pytest.raises(InvalidRequest, match="temprature"):
            client.generate("m", "x", temprature=1.0)  # type: ignore[call-arg]
