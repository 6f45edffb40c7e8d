"""Names of OpenTelemetry's semantic conventions for generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/), as QLM uses them:
attributes of a request's spans, and histograms of the server, which Prometheus reads under the same names with underscores and units."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.metrics import MeterProvider, NoOpMeterProvider
from prometheus_client import CollectorRegistry, Histogram

if TYPE_CHECKING:  # only a process that exports pays for loading them
    from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROVIDER = "qlm"
CHAT, COMPLETION = "chat", "text_completion"
"""Values of `gen_ai.operation.name`."""

OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ERROR_TYPE = "error.type"

REQUEST_DURATION = "gen_ai.server.request.duration"
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"
BUCKETS_S = {
    REQUEST_DURATION: (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    TIME_TO_FIRST_TOKEN: (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    TIME_PER_OUTPUT_TOKEN: (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
}
"""As the conventions advise; what is longer is in the last bucket, which has no bound."""
_TEXTS = {
    REQUEST_DURATION: "From a request's acceptance to its end by an agent.",
    TIME_TO_FIRST_TOKEN: "From the acceptance of a completed request to its first token, if the attempt that ended it made that.",
    TIME_PER_OUTPUT_TOKEN: "Time of one output token behind the first, of those requests.",
}
_LABELS = {
    REQUEST_DURATION: (OPERATION_NAME, PROVIDER_NAME, REQUEST_MODEL, ERROR_TYPE),
    TIME_TO_FIRST_TOKEN: (OPERATION_NAME, PROVIDER_NAME, REQUEST_MODEL),
    TIME_PER_OUTPUT_TOKEN: (OPERATION_NAME, PROVIDER_NAME, REQUEST_MODEL),
}


class ServerHistograms:
    """The three histograms in a process's registry; `export_to` has a meter provider record them as well."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._prometheus = {
            name: Histogram(
                f"{name.replace('.', '_')}_seconds",
                _TEXTS[name],
                [label.replace(".", "_") for label in labels],
                buckets=BUCKETS_S[name],
                registry=registry,
            )
            for name, labels in _LABELS.items()
        }
        self.export_to(NoOpMeterProvider())

    def export_to(self, provider: MeterProvider) -> None:
        meter = provider.get_meter("qlm")
        self._exported = {name: meter.create_histogram(name, unit="s", description=text) for name, text in _TEXTS.items()}

    def record(self, name: str, seconds: float, attributes: Mapping[str, str]) -> None:
        """`attributes`: those of the conventions, by name; one that is not there is empty for Prometheus."""
        kept = {label: attributes[label] for label in _LABELS[name] if label in attributes}
        self._prometheus[name].labels(*(kept.get(label, "") for label in _LABELS[name])).observe(max(0.0, seconds))
        self._exported[name].record(max(0.0, seconds), kept)


def meter_provider(service: str, instance: str, reader: MetricReader) -> SdkMeterProvider:
    """Gives `reader` what is recorded, with the buckets of the conventions. Shut it down at the end: that exports the rest."""
    from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
    from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
    from opentelemetry.sdk.resources import Resource

    views = [
        View(instrument_name=name, aggregation=ExplicitBucketHistogramAggregation(boundaries=bounds)) for name, bounds in BUCKETS_S.items()
    ]
    resource = Resource.create({"service.name": f"qlm-{service}", "service.instance.id": instance})
    return SdkMeterProvider([reader], resource, views=views, shutdown_on_exit=False)


def configure_metering(service: str, instance: str) -> SdkMeterProvider | None:
    """A provider that exports by OTLP over gRPC, where one of ENDPOINT_VARIABLES is set and OTEL_METRICS_EXPORTER is not "none"; else
    None."""
    if os.environ.get("OTEL_METRICS_EXPORTER") == "none" or not any(os.environ.get(variable) for variable in ENDPOINT_VARIABLES):
        return None
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    return meter_provider(service, instance, PeriodicExportingMetricReader(OTLPMetricExporter()))
