"""One rule for the errors of all RPCs: a QlmError becomes its canonical code with an ErrorInfo, anything else INTERNAL."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from qlm.wire_errors import MESSAGE_BYTES_MAX, STATUS_TRAILER, cut, to_status
from qlm_core.vocabulary.errors import InternalError, InvalidRequest, QlmError

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[..., Any]

if TYPE_CHECKING:
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    Interceptor = grpc.aio.ServerInterceptor  # generic in its stubs only


class ErrorInterceptor(Interceptor):
    """Ends failed calls with a code, a message and details. Errors that are not ours are logged with their traceback and reported to the
    client as INTERNAL without their text. For one server, whose methods do not change."""

    def __init__(self) -> None:
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        method = handler_call_details.method
        known = self._handlers.get(method)
        if known is None:
            handler = await continuation(handler_call_details)
            if handler is None:  # no such method: grpc answers UNIMPLEMENTED
                return handler
            known = self._handlers[method] = _guarded(handler, method)
        return known


def _guarded(handler: grpc.RpcMethodHandler[Any, Any], method: str) -> grpc.RpcMethodHandler[Any, Any]:
    if handler.unary_unary is not None:
        answering = _answering(_reading(handler.unary_unary, handler), method)
        return _rebuilt(grpc.unary_unary_rpc_method_handler, handler, answering, raw=True)
    if handler.stream_unary is not None:
        return _rebuilt(grpc.stream_unary_rpc_method_handler, handler, _answering(handler.stream_unary, method))
    if handler.unary_stream is not None:
        streaming = _streaming(_reading(handler.unary_stream, handler), method)
        return _rebuilt(grpc.unary_stream_rpc_method_handler, handler, streaming, raw=True)
    assert handler.stream_stream is not None
    return _rebuilt(grpc.stream_stream_rpc_method_handler, handler, _streaming(handler.stream_stream, method))


def _rebuilt(
    make: Callable[..., Any], handler: grpc.RpcMethodHandler[Any, Any], behaviour: Behaviour, *, raw: bool = False
) -> grpc.RpcMethodHandler[Any, Any]:
    """`raw`: the behaviour is given the bytes of the request."""
    rebuilt: grpc.RpcMethodHandler[Any, Any] = make(
        behaviour,
        request_deserializer=None if raw else handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return rebuilt


def _reading(behaviour: Behaviour, handler: grpc.RpcMethodHandler[Any, Any]) -> Behaviour:
    """Takes bytes and parses them itself: grpc answers UNKNOWN where its own deserializer fails. Raises InvalidRequest."""
    deserializer = handler.request_deserializer
    if deserializer is None:
        return behaviour

    def parsed(request: bytes) -> Any:
        try:
            return deserializer(request)
        except DecodeError as error:
            rule = "a well-formed message with UTF-8 strings"
            raise InvalidRequest(f"the request is not {rule}", details={"field": "message", "rule": rule}) from error

    if inspect.isasyncgenfunction(behaviour):

        async def stream(request: bytes, context: Context) -> AsyncIterator[Any]:
            async with aclosing(behaviour(parsed(request), context)) as responses:
                async for response in responses:
                    yield response

        return stream

    async def answer(request: bytes, context: Context) -> Any:
        return await behaviour(parsed(request), context)

    return answer


def _answering(behaviour: Behaviour, method: str) -> Behaviour:
    async def answer(request: Any, context: Context) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:
            await end_call(context, error, method)

    return answer


def _streaming(behaviour: Behaviour, method: str) -> Behaviour:
    if not inspect.isasyncgenfunction(behaviour):
        return _answering(behaviour, method)  # writes to the context itself

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await end_call(context, error, method)

    return stream


async def end_call(context: Context, error: Exception, method: str) -> NoReturn:
    if isinstance(error, (grpc.aio.AbortError, grpc.aio.BaseError)):
        raise error  # ended by the handler itself, or by grpc
    if isinstance(error, QlmError):
        known = error
    else:
        structlog.get_logger().error("rpc_failed", method=method, exc_info=error)
        known = InternalError(f"{method} failed; the process's log says why")
    code, details = to_status(known)
    await context.abort(code, cut(known.message, MESSAGE_BYTES_MAX), trailing_metadata=((STATUS_TRAILER, details),))
