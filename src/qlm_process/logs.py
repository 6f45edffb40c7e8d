"""Structured logs on standard error: console lines or JSON, with the service, the instance and the current trace on each."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from opentelemetry import trace
from structlog.typing import EventDict, Processor, WrappedLogger

from qlm_core.vocabulary.masking import masked
from qlm_process.settings import TelemetrySettings


def configure_logging(settings: TelemetrySettings, service: str, instance: str) -> None:
    """Sets up structlog and, through it, the standard library's logging. Call once, in a process's main."""

    def add_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["service"] = service
        event.setdefault("instance", instance)  # the name of another instance stays
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_process,
        _add_trace,
    ]
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=_rendering(settings)))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)


def _rendering(settings: TelemetrySettings) -> list[Processor]:
    """Tracebacks without the locals of their frames, which hold prompts and settings; lines without secrets."""
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if settings.log_format == "json":
        tracebacks = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
        return [strip, tracebacks, structlog.processors.JSONRenderer(), _mask]
    plain = structlog.dev.plain_traceback
    return [strip, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain), _mask]


def _mask(_logger: WrappedLogger, _method: str, line: Any) -> str:
    return masked(str(line))


def _add_trace(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = trace.format_trace_id(span.trace_id)
    return event
