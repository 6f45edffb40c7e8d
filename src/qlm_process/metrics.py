"""Prometheus metrics: one registry a process, served over HTTP at /metrics."""

from __future__ import annotations

from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, start_http_server

from qlm_core.vocabulary.errors import ConfigError


class Metrics:
    """Base of a service's metrics: make them as attributes, on `self.registry`. Names begin with "qlm_" and end with their unit."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)


class MetricsServer:
    """A running endpoint."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server = server
        self._thread = thread
        self._stopped = False

    @property
    def port(self) -> int:
        return self._server.server_port

    def stop(self) -> None:
        """Closes the endpoint and waits for its thread. Safe twice."""
        if self._stopped:
            return
        self._stopped = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> MetricsServer:
    """Serves a registry on host:port (0: any free port; see `.port`). Raises ConfigError where that cannot be bound."""
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(f"telemetry.metrics_port: cannot listen on {host}:{port}: {error}") from error
    return MetricsServer(server, thread)
