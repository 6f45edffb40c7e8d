"""Histograms and attributes by OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.metrics.export import Histogram, InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE

from qlm.api.v1 import request_pb2
from qlm_agent.decisions.effects import CompleteItem
from qlm_agent.decisions.runs import Ending
from qlm_agent.delivery.held_run import HeldRun
from qlm_agent.delivery.requests import read_pulled
from qlm_agent.engines.port import FinishReason
from qlm_agent.telemetry.metrics import AgentMetrics, AgentTelemetry
from qlm_core.vocabulary.request import RequestKey
from qlm_process import gen_ai
from qlm_queue.values import Pulled

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LABELS = {"gen_ai_operation_name": "text_completion", "gen_ai_provider_name": "qlm", "gen_ai_request_model": "m"}


class World:
    """An agent's telemetry, with all that it exports at hand."""

    def __init__(self) -> None:
        self.metrics, self.spans, self.reader = AgentMetrics(), InMemorySpanExporter(), InMemoryMetricReader()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.metering = gen_ai.meter_provider("agent", "a", self.reader)
        self.metrics.gen_ai.export_to(self.metering)
        self.telemetry = AgentTelemetry("a", self.metrics, provider)

    def ended(self, held: HeldRun, ending: Ending, tokens: int) -> dict[str, object]:
        """Attributes of the span of its end, at 30 s."""
        item = CompleteItem(run_id=held.run_id, start=0, end=tokens, ending=ending)
        self.telemetry.record_completion(held, item, 29.0, 30.0)
        (span,) = self.spans.get_finished_spans()
        return dict(span.attributes or {})

    def exported(self) -> dict[str, tuple[float, tuple[float, ...], dict[str, object]]]:
        """Sum, buckets and attributes of each histogram that was recorded once, by name."""
        data = self.reader.get_metrics_data()
        found: dict[str, tuple[float, tuple[float, ...], dict[str, object]]] = {}
        for metric in (
            [metric for resource in data.resource_metrics for scope in resource.scope_metrics for metric in scope.metrics] if data else ()
        ):
            assert metric.unit == "s"
            assert isinstance(metric.data, Histogram)
            (point,) = metric.data.data_points
            assert point.count == 1
            found[metric.name] = (point.sum, tuple(point.explicit_bounds), {**(point.attributes or {})})
        return found

    def scraped(self, name: str, **more: str) -> float | None:
        """Sum of a histogram."""
        return self.metrics.registry.get_sample_value(f"gen_ai_server_{name}_seconds_sum", {**LABELS, **more})


@pytest.fixture
def world() -> World:
    return World()


def held_run(*, chat: bool = False) -> HeldRun:
    """Accepted at 5 s, first token at 8 s, last one at 28 s."""
    slo = request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=60.0)
    body = request_pb2.Request(
        model="m",
        trace=request_pb2.TraceContext(traceparent=PARENT),
        admission=request_pb2.Admission(prompt_tokens=50, output_tokens_max=100, slo=slo),
    )
    if chat:
        body.chat.messages.add(role="user", content="Why?")
    else:
        body.tokens.ids.extend([1] * 50)
    pulled = Pulled(
        queue_id="1-0", key=RequestKey("t", "r"), group_id="g", acceptance_number=1, accepted_s=5.0, attempt=1, failed_attempts=0,
        gateway="", body=body.SerializeToString(), progress=b"",
    )  # fmt: skip
    held = read_pulled(pulled, text_output=False, pulled_s=6.0, engine_clock_s=0.0)
    held.started_s, held.first_token_s, held.last_token_s = 7.0, 8.0, 28.0
    return held


def test_names_are_those_of_the_conventions() -> None:
    assert set(gen_ai.BUCKETS_S) == {
        gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION,
        gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
        gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
    }
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")} | {ERROR_TYPE}
    names = {value for name, value in vars(gen_ai).items() if isinstance(value, str) and value.startswith(("gen_ai.", "error."))}
    assert len(names - set(gen_ai.BUCKETS_S)) == 10
    assert names - set(gen_ai.BUCKETS_S) <= known
    operations = {each.value for each in gen_ai_attributes.GenAiOperationNameValues}
    assert {gen_ai.CHAT, gen_ai.COMPLETION} <= operations


def test_an_answer_is_reported_to_prometheus_and_otlp_alike(world: World) -> None:
    attributes = world.ended(held_run(), Ending(finish=FinishReason.STOP), 11)
    request = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "qlm", "gen_ai.request.model": "m"}
    answer = {
        "gen_ai.response.id": "r",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 50,
        "gen_ai.usage.output_tokens": 11,
    }
    assert {name: value for name, value in attributes.items() if name.startswith("gen_ai.")} == request | answer
    assert (attributes["qlm.request_id"], attributes["qlm.model"]) == ("r", "m")
    took_s = {gen_ai.REQUEST_DURATION: 25.0, gen_ai.TIME_TO_FIRST_TOKEN: 3.0, gen_ai.TIME_PER_OUTPUT_TOKEN: 2.0}
    assert world.exported() == {name: (seconds, gen_ai.BUCKETS_S[name], request) for name, seconds in took_s.items()}
    assert world.scraped("request_duration", error_type="") == 25.0
    assert (world.scraped("time_to_first_token"), world.scraped("time_per_output_token")) == (3.0, 2.0)


def test_a_chat_that_an_engine_gets_as_such_is_one(world: World) -> None:
    assert world.ended(held_run(chat=True), Ending(finish=FinishReason.LENGTH), 11)["gen_ai.operation.name"] == "chat"


def test_a_failure_has_its_reason_and_no_times_of_tokens(world: World) -> None:
    attributes = world.ended(held_run(), Ending(reason="ENGINE_FAILURE", message="it broke"), 11)
    assert attributes["error.type"] == "ENGINE_FAILURE"
    assert "gen_ai.response.finish_reasons" not in attributes
    assert list(world.exported()) == [gen_ai.REQUEST_DURATION]
    assert world.scraped("request_duration", error_type="ENGINE_FAILURE") == 25.0


def test_a_first_token_of_an_earlier_attempt_is_not_reported(world: World) -> None:
    held = held_run()
    held.first_token_s = 0.0
    world.ended(held, Ending(finish=FinishReason.STOP), 11)
    assert list(world.exported()) == [gen_ai.REQUEST_DURATION]


def test_metrics_are_exported_only_where_an_endpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in gen_ai.ENDPOINT_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert gen_ai.configure_metering("agent", "a") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    assert gen_ai.configure_metering("agent", "a") is None
