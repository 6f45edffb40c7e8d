"""Builders of transcripts for the gateway's reader machine: request "r" of tenant "default", with queue id "1-0"."""

from __future__ import annotations

from qlm_core.vocabulary.request import RequestKey
from qlm_gateway.streams.events import (
    Accepted,
    AcceptSent,
    Effect,
    Event,
    FrameFacts,
    FramesRead,
    Located,
    Opened,
    ReaderKind,
)
from qlm_gateway.streams.machine import GatewayMachine
from qlm_gateway.streams.readers import StreamLimits

KEY = RequestKey("default", "r")
LIMITS = StreamLimits(buffer_tokens_max=10, stall_s=6.0, poll_s=0.5, recheck_s=3.0, patience_s=10.0)


def machine(limits: StreamLimits = LIMITS) -> GatewayMachine:
    return GatewayMachine("g", limits)


def frame(offset: int, count: int, *, last: bool = False, total: int = -1, queue_id: str = "1-0") -> FrameFacts:
    return FrameFacts(queue_id=queue_id, offset=offset, count=count, last=last, total=total)


def frames(*facts: FrameFacts) -> FramesRead:
    return FramesRead(frames=facts)


def run(gateway: GatewayMachine, *steps: tuple[float, Event]) -> list[Effect]:
    """All events; the effects of the last."""
    effects: list[Effect] = []
    for now_s, event in steps:
        effects = gateway.step(now_s, event)
    return effects


def streaming() -> GatewayMachine:
    """A machine with reader 1 on a request that this gateway accepted."""
    gateway = machine()
    run(gateway, (0.0, AcceptSent(reader=1)), (0.1, Accepted(reader=1, key=KEY, queue_id="1-0")))
    return gateway


def opened(offset: int = 0, *, kind: ReaderKind = ReaderKind.TOKENS) -> GatewayMachine:
    """A machine with reader 1 on an earlier request, which is being located."""
    gateway = machine()
    run(gateway, (0.0, Opened(reader=1, kind=kind, key=KEY, offset=offset)))
    return gateway


def located(*, produced: int = 0, ended: bool = False, gateway: str = "g", reader: int = 1) -> Located:
    return Located(reader=reader, queue_id="1-0", ended=ended, gateway=gateway, produced=produced)
