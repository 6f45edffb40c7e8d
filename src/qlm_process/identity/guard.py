"""Access to planners, estimators and agents: the keys of services and operators."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from qlm_core.vocabulary.errors import PermissionDenied, QlmError
from qlm_process.errors_interceptor import end_call
from qlm_process.identity.key_ring import KeyRing
from qlm_process.identity.keys import Role, bearer_of

FREE = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Prefixes of methods that want no key."""
OF_SERVICES = frozenset({"/qlm.api.v1.Planner/RegisterInstance", "/qlm.api.v1.Planner/Heartbeat"})
OF_OPERATORS = frozenset(
    {
        "/qlm.api.v1.Planner/Replan",
        "/qlm.api.v1.Estimator/ImportProfiles",
        "/qlm.api.v1.Agent/Drain",
        "/qlm.api.v1.Agent/LoadModel",
        "/qlm.api.v1.Agent/UnloadModel",
    }
)
"""All other methods are for both."""

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    Handler, Interceptor = grpc.RpcMethodHandler, grpc.aio.ServerInterceptor  # generic in their stubs only


class Guard(Interceptor):
    """Refuses calls without a key that may make them, before their message is read."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        method = handler_call_details.method
        if not method.startswith(FREE):
            try:
                check_role(method, self._keys.find(bearer_of(handler_call_details.invocation_metadata)).role)
            except QlmError as error:
                return _refusing(error, method)
        return await continuation(handler_call_details)


def check_role(method: str, role: Role) -> None:
    """Raises PermissionDenied."""
    if method in OF_SERVICES:
        allowed: tuple[Role, ...] = (Role.SERVICE,)
    elif method in OF_OPERATORS:
        allowed = (Role.OPERATOR,)
    else:
        allowed = (Role.SERVICE, Role.OPERATOR)
    if role not in allowed:
        raise PermissionDenied(f"a {role} key may not call {method}", details={"method": method})


def _refusing(error: QlmError, method: str) -> Handler:
    async def refuse(_request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await end_call(context, error, method)

    return grpc.unary_unary_rpc_method_handler(refuse)
