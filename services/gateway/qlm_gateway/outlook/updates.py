"""Predictions for streams whose requests wait: the newest, at the pace that a client chose, within what a gateway can afford to find."""

from __future__ import annotations

from collections.abc import Callable

from qlm.api.v1.gateway_pb2 import Outlook as OutlookMessage
from qlm_core.vocabulary.errors import NotFound, Unavailable, invalid_field
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_gateway.front.status import predict_live, produced_tokens, shape_of
from qlm_gateway.outlook.watch import QueueWatch
from qlm_gateway.wire import STATES
from qlm_queue.port import Queue
from qlm_queue.values import TerminalRecord

EVERY_MIN_S = 1.0
EVERY_MAX_S = 3_600.0
FINDS_PER_S_MAX = 50.0
"""Outlooks per second for all streams of a gateway together, two calls to the queue each, three of a request that ran before; a stream
beyond it has its turn the next time."""


class OutlookUpdates:
    """`monotonic`: seconds of a clock that never goes back."""

    def __init__(self, queue: Queue, watch: QueueWatch, monotonic: Callable[[], float]) -> None:
        self._queue = queue
        self._watch = watch
        self._monotonic = monotonic
        self._finds = FINDS_PER_S_MAX
        self._counted_s = monotonic()

    async def of(self, key: RequestKey) -> OutlookMessage | None:
        """A request that waits now; None for one that does not, and where the gateway has too many to find."""
        outlook = self._watch.recent
        if outlook is None or not self._may_find():
            return None
        try:
            found = await self._queue.find(key)
            if isinstance(found, TerminalRecord) or found.state is RequestState.RUNNING:
                return None
            place = await self._queue.requests_ahead(key) if found.state is RequestState.PLACED else None
            produced = await produced_tokens(self._queue, found)
        except (NotFound, Unavailable):  # the stream itself notices, and says so
            return None
        request = shape_of(found)
        prediction = predict_live(found, request, outlook, self._watch.now_s(), place=place, produced_tokens=produced)
        return OutlookMessage(state=STATES[found.state], prediction=prediction, paused=outlook.is_paused(request))

    def _may_find(self) -> bool:
        now_s = self._monotonic()
        self._finds = min(FINDS_PER_S_MAX, self._finds + (now_s - self._counted_s) * FINDS_PER_S_MAX)
        self._counted_s = now_s
        if self._finds < 1.0:
            return False
        self._finds -= 1.0
        return True


def checked_every_s(every_s: float) -> float:
    """Seconds between two updates; 0: none. Raises InvalidRequest."""
    if every_s != 0.0 and not EVERY_MIN_S <= every_s <= EVERY_MAX_S:
        raise invalid_field("outlook_every_s", f"0, or from {EVERY_MIN_S:g} to {EVERY_MAX_S:g}", every_s)
    return every_s
