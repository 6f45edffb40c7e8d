"""The spans of the processes under test."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from threading import Lock

from benchmarks.queue.otlp_sink import Export, attributes_of

REQUEST_ID = "qlm.request_id"
POLL_S = 0.5

Times = dict[str, tuple[float, float]]
"""By name of the span: first start and last end, in seconds since the epoch."""


@dataclass(slots=True, kw_only=True)
class Collector:
    """Counts the received spans by name; while it is `following`, it keeps their times by request. `endpoint`: where they are sent."""

    endpoint: str = ""
    _lock: Lock = field(default_factory=Lock)
    _by_name: Counter[str] = field(default_factory=Counter)
    _times: dict[str, Times] | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """For traced processes: a trace is sampled where its parent is, and exported within half a second."""
        return {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": self.endpoint,
            "OTEL_TRACES_SAMPLER": "parentbased_always_off",
            "OTEL_BSP_SCHEDULE_DELAY": "500",
        }

    def take(self, export: Export) -> None:
        """One export; safe from several threads."""
        spans = [span for each in export.resource_spans for scope in each.scope_spans for span in scope.spans]
        with self._lock:
            self._by_name.update(span.name for span in spans)
            if self._times is None:
                return
            for span in spans:
                request_id = attributes_of(span.attributes).get(REQUEST_ID)
                if isinstance(request_id, str):
                    start_s, end_s = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
                    times = self._times.setdefault(request_id, {})
                    first_s, last_s = times.get(span.name, (start_s, end_s))
                    times[span.name] = (min(first_s, start_s), max(last_s, end_s))

    def counts(self) -> dict[str, int]:
        """Spans so far, by name."""
        with self._lock:
            return dict(sorted(self._by_name.items()))

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Keeps the times of requests while the context is open."""
        with self._lock:
            self._times = {}
        try:
            yield
        finally:
            with self._lock:
                self._times = None

    async def times(self, request_ids: Collection[str], names: Collection[str], timeout_s: float) -> dict[str, Times]:
        """The spans of these requests, by request id. Exports lag: waits until those of all `names` arrived, or for `timeout_s`; returns
        the complete ones."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                kept = self._times or {}
                found = {each: dict(kept[each]) for each in request_ids if each in kept and kept[each].keys() >= set(names)}
            if len(found) == len(request_ids) or time.monotonic() > deadline_s:
                return found
            await asyncio.sleep(POLL_S)
