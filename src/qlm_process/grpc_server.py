"""The gRPC server of a process: bounded, with health, reflection and one rule for errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from qlm.credentials import read_pem
from qlm_core.vocabulary.errors import ConfigError
from qlm_process.errors_interceptor import ErrorInterceptor
from qlm_process.identity.guard import Guard
from qlm_process.identity.key_ring import open_key_ring
from qlm_process.settings import GrpcSettings, SecuritySettings

AddServicer = Callable[[grpc.aio.Server], None]
"""Adds one servicer: `lambda server: add_GatewayServicer_to_server(gateway, server)`."""

MIN_PING_INTERVAL_MS = 5_000
"""Clients that ping more often get ENHANCE_YOUR_CALM."""


class HealthPort(Protocol):
    """The part of grpc_health's asyncio servicer that is used here (its stubs leave that class out)."""

    async def set(self, service: str, status: int) -> None: ...

    async def enter_graceful_shutdown(self) -> None: ...


class GrpcServer:
    """Serves some services on one address. Health says NOT_SERVING, overall ("") and per service, until `set_serving(True)`.

    `service_names`: full names ("qlm.api.v1.Gateway"), for health and reflection. `guarded`: its calls want keys of services and operators
    where there is a key file; else the services check keys themselves. Raises ConfigError for an address that may not be listened on. One
    start and one stop.
    """

    def __init__(
        self,
        listen: str,
        services: Sequence[AddServicer],
        service_names: Sequence[str],
        options: GrpcSettings | None = None,
        security: SecuritySettings | None = None,
        *,
        guarded: bool = True,
    ) -> None:
        self._security = security or SecuritySettings()
        self._security.check_listen("listen", listen)
        self._keys = open_key_ring(self._security) if guarded else None
        self._following: asyncio.Task[None] | None = None
        self._listen = listen
        self._services = services
        self._names = tuple(service_names)
        self._options = options or GrpcSettings()
        self._server: grpc.aio.Server | None = None
        self._health: HealthPort | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """The bound port; 0 before the start and on a unix socket."""
        return self._port

    @property
    def address(self) -> str:
        """Address for clients: the host as configured with the bound port, or the unix socket."""
        if self._listen.startswith("unix:"):
            return self._listen
        return f"{self._listen.rpartition(':')[0]}:{self._port}"

    async def start(self) -> int:
        """Binds and serves; returns the bound port. Raises ConfigError where the address cannot be bound. Safe twice."""
        if self._server is not None:
            return self._port
        server = grpc.aio.server(
            interceptors=[*([] if self._keys is None else [Guard(self._keys)]), ErrorInterceptor()],
            options=_channel_options(self._options),
            maximum_concurrent_rpcs=self._options.concurrent_rpcs_max,
        )
        servicer = cast(Any, health).aio.HealthServicer()
        methods = cast(grpc.aio.Server, _GenericMethods(server))
        health_pb2_grpc.add_HealthServicer_to_server(servicer, methods)
        for add in self._services:
            add(methods)
        reflection.enable_server_reflection((*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        self._health = servicer
        await self.set_serving(False)
        try:
            tls = tls_of(self._security)
            port = server.add_insecure_port(self._listen) if tls is None else server.add_secure_port(self._listen, tls)
        except RuntimeError as error:
            raise ConfigError(f"listen: cannot bind {self._listen}: {error}") from error
        await server.start()
        self._server = server
        if self._keys is not None:
            self._following = asyncio.create_task(self._keys.run(), name="keys")
        self._port = 0 if self._listen.startswith("unix:") else port
        return self._port

    async def set_serving(self, serving: bool) -> None:
        """Sets the answer of health from now on. Without effect before the start or after the stop."""
        if self._health is None:
            return
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if serving else statuses.NOT_SERVING
        for name in (health.OVERALL_HEALTH, *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float | None = None) -> None:
        """Says NOT_SERVING, takes no new calls, gives those in progress `grace_s`, then ends them. Safe unstarted and twice."""
        server, self._server = self._server, None
        if server is None:
            return
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        if self._health is not None:
            await self._health.enter_graceful_shutdown()
        await server.stop(self._options.stop_grace_s if grace_s is None else grace_s)


class _GenericMethods:
    """Gives a server its methods without registering them: with each call, grpc.aio wakes a task for every registered method."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
        """Leaves them to the generic handlers."""


def tls_of(security: SecuritySettings) -> grpc.ServerCredentials | None:
    """None without TLS. Raises ConfigError for files that cannot be read."""
    if not security.tls_cert_file:
        return None
    own = (read_pem("security.tls_key_file", security.tls_key_file), read_pem("security.tls_cert_file", security.tls_cert_file))
    authorities = security.tls_client_ca_file
    roots = read_pem("security.tls_client_ca_file", authorities) if authorities else None
    return grpc.ssl_server_credentials([own], root_certificates=roots, require_client_auth=roots is not None)


def _channel_options(settings: GrpcSettings) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", settings.message_bytes_max),
        ("grpc.max_send_message_length", settings.message_bytes_max),
        ("grpc.keepalive_time_ms", round(settings.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        # In a burst grpc cancels calls at random above 1,000 that no handler has picked up yet: here the limit on calls in progress holds.
        ("grpc.server.max_pending_requests", settings.concurrent_rpcs_max),
        ("grpc.server.max_pending_requests_hard_limit", settings.concurrent_rpcs_max),
        # Two processes must not share a port in silence.
        ("grpc.so_reuseport", 0),
    ]
