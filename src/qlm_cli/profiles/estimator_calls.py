"""Calls of commands to the estimator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
import grpc

from qlm.api.v1 import gateway_pb2
from qlm.api.v1.estimator_pb2_grpc import EstimatorStub
from qlm.api.v1.gateway_pb2_grpc import GatewayStub
from qlm.wire_errors import from_rpc_error
from qlm_cli.options import credentials
from qlm_core.vocabulary.errors import QlmError, Unavailable

CALL_TIMEOUT_S = 10.0
MESSAGE_BYTES_MAX = 64 << 20
Message = TypeVar("Message")
Answer = TypeVar("Answer")
Method = Callable[[EstimatorStub], "grpc.UnaryUnaryMultiCallable[Message, Answer]"]
F = TypeVar("F", bound=Callable[..., Any])


def estimator_option(command: F) -> F:
    return click.option(
        "--estimator", metavar="HOST:PORT", help="An estimator. Default: the leader, as the gateway at --address names it."
    )(command)


def call_estimator(estimator: str | None, addresses: tuple[str, ...], method: Method[Message, Answer], request: Message) -> Answer:
    """Calls the estimator; if a standby answers, the leader that it names. Raises QlmError."""
    address = estimator or _leader(addresses)
    try:
        return _call(address, method, request)
    except QlmError as error:
        leader = error.details.get("leader", "") if error.reason == "NOT_LEADER" else ""
        if not leader or leader == address:
            raise
        return _call(leader, method, request)


def _call(address: str, method: Method[Message, Answer], request: Message) -> Answer:
    options = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), ("grpc.max_send_message_length", MESSAGE_BYTES_MAX)]
    access = credentials()
    with access.channel(address, options) as channel:
        try:
            return method(EstimatorStub(channel))(request, timeout=CALL_TIMEOUT_S, metadata=access.metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


def _leader(addresses: tuple[str, ...]) -> str:
    """The leading estimator's address, as the first gateway that answers knows it."""
    failures: list[QlmError] = []
    access = credentials()
    for address in addresses:
        with access.channel(address) as channel:
            try:
                status = GatewayStub(channel).QueueStatus
                found = status(gateway_pb2.QueueStatusRequest(), timeout=CALL_TIMEOUT_S, metadata=access.metadata).estimator
            except grpc.RpcError as error:
                failures.append(from_rpc_error(error))
                continue
        if found:
            return found
        failures.append(Unavailable("no estimator leads"))
    raise failures[0]
