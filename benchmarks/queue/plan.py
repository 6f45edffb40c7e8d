"""Size of each part of the bench."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Counts of requests and seconds of measured time. The defaults are those of the figures; QUICK is for a test that all parts run."""

    warmup_s: float = 2.0
    accepts_s: float = 8.0
    added_s: float = 12.0
    fanout_s: float = 8.0
    open_streams: int = 10_000
    pull_queued: int = 400_000
    pull_seconds: float = 10.0
    bytes_queued: int = 100_000
    failover_queued: int = 100_000
    recover_kills: int = 6
    campaign_requests: int = 5_000
    campaign_kills: int = 30
    campaign_server_kills: int = 5
    scale_s: float = 6.0
    scale_points: int = 4
    stream_clients: int = 64
    stream_requests: int = 3_000
    stream_kills: int = 180
    stream_server_kills: int = 20


FULL = Sizes()
QUICK = Sizes(
    warmup_s=0.3,
    accepts_s=0.7,
    added_s=1.0,
    fanout_s=1.0,
    open_streams=100,
    pull_queued=6_000,
    pull_seconds=0.5,
    bytes_queued=2_000,
    failover_queued=1_200,
    recover_kills=1,
    campaign_requests=60,
    campaign_kills=2,
    campaign_server_kills=1,
    scale_s=3.0,
    scale_points=2,
    stream_clients=8,
    stream_requests=80,
    stream_kills=7,
    stream_server_kills=1,
)
