"""`python -m benchmarks.queue.span_sink`: the collector of a bench, in a process of its own.

It counts spans, by name. After `follow` it also keeps the times of the spans of each request. Its first line is its endpoint; each line on
stdin is answered by a JSON line.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from threading import Lock

from benchmarks.queue.otlp_sink import Export, attributes_of, served_collector

REQUEST_ID = "qlm.request_id"
Times = dict[str, tuple[float, float]]
"""By name of the span: first start and last end, in seconds since the epoch."""


class SpanCounts:
    """The received spans."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_name: Counter[str] = Counter()
        self._following = False
        self._times: dict[str, Times] = {}

    def take(self, export: Export) -> None:
        """One export; safe from several threads."""
        with self._lock:
            for resource_spans in export.resource_spans:
                for scope_spans in resource_spans.scope_spans:
                    for span in scope_spans.spans:
                        self._by_name[span.name] += 1
                        if self._following:
                            start_s, end_s = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
                            self._keep(span.name, attributes_of(span.attributes).get(REQUEST_ID), start_s, end_s)

    def _keep(self, name: str, request_id: object, start_s: float, end_s: float) -> None:
        if isinstance(request_id, str):
            times = self._times.setdefault(request_id, {})
            first_s, last_s = times.get(name, (start_s, end_s))
            times[name] = (min(first_s, start_s), max(last_s, end_s))

    def answer(self, command: str) -> dict[str, object]:
        """`command`: "follow" keeps the times of requests from now on, "times" returns them, "rest" forgets them; otherwise the counts."""
        with self._lock:
            if command == "follow":
                self._following, self._times = True, {}
            elif command == "times":
                return {"times": self._times}
            elif command == "rest":
                self._following, self._times = False, {}
            return {"by_name": dict(sorted(self._by_name.items()))}


def main() -> None:
    counts = SpanCounts()
    with served_collector(counts.take) as endpoint:
        _write({"endpoint": endpoint})
        for line in sys.stdin:  # ends with the starting process
            _write(counts.answer(line.strip()))


def _write(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
