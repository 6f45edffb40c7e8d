"""The figures of the benchmark `gateway`: keys, parts and targets."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.figures import Figure

FIGURES: Sequence[Figure] = (
    Figure(key="http_accepts_per_s", part="accepts", target=">= 2,000", least={"": 2_000}),
    Figure(key="cpu_us_per_request", part="accepts", target="stated"),
    Figure(key="added_p50_ms", part="added", target="at 200/s <= 5", most={"": 5.0}),
    Figure(key="added_p99_ms", part="added", target="at 200/s <= 15", most={"": 15.0}),
    Figure(key="sse_events_per_s", part="events", target=">= 20,000", least={"": 20_000}),
    Figure(key="cpu_us_per_chunk", part="events", target="<= 45", most={"": 45.0}),
    Figure(key="rss_mib", part="memory", target="10,000 open <= 600", points=("idle", "open"), most={"open": 600.0}),
    Figure(key="accepts_per_s_by_gateways", part="scale", target="stated", points=("1", "2", "4")),
    Figure(key="chats_per_s_by_agents", part="scale", target="stated", points=("1", "2", "4", "8")),
    Figure(key="accepts_per_s_by_queues", part="scale", target="stated", points=("1", "2", "4")),
    Figure(key="stream_kills", part="kills", target=">= 200", least={"": 200}),
    Figure(key="streams_lost", part="kills", target="0", most={"": 0}),
)
