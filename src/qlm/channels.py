"""Connections to the gateways: one channel an address, and which one is used now."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc.aio

from qlm.api.v1.gateway_pb2_grpc import GatewayStub
from qlm.credentials import Credentials
from qlm.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from qlm.api.v1.gateway_pb2_grpc import GatewayAsyncStub  # known to the type stubs alone

MESSAGE_BYTES_MAX = 64 << 20
KEEPALIVE_S = 10.0
KEEPALIVE_TIMEOUT_S = 5.0
RECONNECT_MAX_S = 1.0


class Channels:
    """Round robin over the addresses, moved on by failures."""

    def __init__(self, addresses: Sequence[str], credentials: Credentials) -> None:
        if not addresses or not all(addresses):
            raise ConfigError('addresses: at least one "host:port"')
        self._addresses = tuple(addresses)
        self._credentials = credentials
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._current = 0
        self._closed = False
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def address(self) -> str:
        """The address that the next call goes to."""
        return self._addresses[self._current]

    def stub(self) -> GatewayAsyncStub:
        """The gateway at `address`; connects when it is used. Raises InternalError after `close`, and in a forked child."""
        check_process(self._pid)
        if self._closed:
            raise client_closed()
        channel = self._channels.get(self.address)
        if channel is None:
            channel = self._credentials.aio_channel(self.address, _OPTIONS)
            self._channels[self.address] = channel
        return GatewayStub(channel)

    def move_on(self, failed_address: str) -> None:
        """The gateway there did not answer: the next call goes to another. Nothing where somebody has moved on already."""
        if self.address == failed_address:
            self._current = (self._current + 1) % len(self._addresses)

    async def close(self) -> None:
        """Safe twice."""
        self._closed = True
        if os.getpid() != self._pid:
            return
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)


def check_process(pid: int) -> None:
    """Raises InternalError in a child of the process where a client was made: neither its thread nor its connections live there."""
    if os.getpid() != pid:
        raise InternalError("the client was made in another process: make one in each process, after the fork")


def client_closed() -> InternalError:
    """Somebody uses a client after its `close`."""
    return InternalError("the client is closed")


_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A stream may be silent for as long as its request waits: probes distinguish a dead gateway from a silent one.
    ("grpc.keepalive_time_ms", round(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", round(RECONNECT_MAX_S * 1000)),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
