"""docs/reference/metrics.md, written from the metrics classes: `python -m qlm_cli.reference.metrics > docs/reference/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module

from qlm_process.metrics import Metrics

HEAD = """# Metrics

<!-- Written by `make docs` from the metrics classes. -->

Each process serves Prometheus metrics at `/metrics` on `telemetry.metrics_host` and `telemetry.metrics_port`. Port 0, the default, is any
free one: the table that `qlm up` prints and the log event `ready` (`metrics_port`) name it. Beside those below there are `process_*`
and `python_info` of the Prometheus client. Units are the last word of a name; a counter ends with `_total`. Counters begin at 0 with
each start of a process.

Routers and autoscalers that read vLLM read gateways: the `vllm:` metrics by `model_name` are those of the whole queue, the same at each
gateway, so take the maximum: `max(vllm:num_requests_waiting{model_name="mistral-7b"})`. Each scrape reads the queue, at most every half
second.

`gen_ai_server_*` are the metrics `gen_ai.server.*` of OpenTelemetry's [conventions for generative
AI](https://opentelemetry.io/docs/specs/semconv/gen-ai/), from the acceptance on, so with the wait in the queue. They are exported by OTLP,
too, where OTEL_EXPORTER_OTLP_ENDPOINT is set and OTEL_METRICS_EXPORTER is not `none`. `gen_ai_operation_name` is `chat` where the engine
gets the chat; one that gets tokens completes text. Requests that end without an agent (cancelled, expired) are not in them.
"""

SERVICES: tuple[tuple[str, str, str], ...] = (
    ("gateway", "qlm_gateway.metrics", "GatewayMetrics"),
    ("planner", "qlm_planner.shell.metrics", "PlannerMetrics"),
    ("estimator", "qlm_estimator.metrics", "EstimatorMetrics"),
    ("agent", "qlm_agent.telemetry.metrics", "AgentMetrics"),
)
"""Service, module and class."""


def documented(service: str) -> Iterator[tuple[str, str, str]]:
    """Name, kind and help of each metric of a service, by name."""
    ((module, attribute),) = [(module, attribute) for name, module, attribute in SERVICES if name == service]
    metrics = getattr(import_module(module), attribute)()
    assert isinstance(metrics, Metrics)
    for family in sorted(metrics.registry.collect(), key=lambda family: family.name):
        if family.name.startswith(("qlm_", "vllm:", "gen_ai_")):
            yield family.name + ("_total" if family.type == "counter" else ""), family.type, family.documentation


def reference() -> str:
    parts = [HEAD]
    for service, _, _ in SERVICES:
        rows = [f"| `{name}` | {kind} | {text} |" for name, kind, text in documented(service)]
        parts.append(f"## {service}\n\n| metric | kind | what |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(reference())
