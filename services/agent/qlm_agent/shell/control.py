"""Reading the control stream of an instance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from qlm_agent.decisions.events import ControlMessage, Event, Message
from qlm_agent.delivery.held_run import run_id_of
from qlm_core.vocabulary.errors import Unavailable
from qlm_process.queue.leases import Sleep
from qlm_queue.port import Queue
from qlm_queue.values import ControlKind

BLOCK_S = 5.0
RETRY_S = 0.2

MESSAGES = {
    ControlKind.WAKE: Message.WAKE,
    ControlKind.HEAD_CHANGED: Message.HEAD_CHANGED,
    ControlKind.CANCEL: Message.CANCEL,
    ControlKind.GATEWAY_REBOUND: Message.GATEWAY_REBOUND,
    ControlKind.DRAIN: Message.DRAIN,
}


async def control_events(queue: Queue, instance: str, after: str, step: Callable[[Event], None], *, sleep: Sleep = asyncio.sleep) -> None:
    """Steps with each message after an entry id, until it is cancelled. While the server is away it retries every RETRY_S."""
    while True:
        try:
            entries = await queue.read_control(instance, after, BLOCK_S)
        except Unavailable as error:
            structlog.get_logger().debug("control_not_read", error=str(error))
            await sleep(RETRY_S)
            continue
        for entry in entries:
            after = entry.entry_id
            step(ControlMessage(message=MESSAGES[entry.kind], run_id=run_id_of(entry.queue_id, entry.attempt) if entry.queue_id else ""))
