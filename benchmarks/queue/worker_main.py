"""`python -m benchmarks.queue.worker_main KIND`: one load generator (see `worker`)."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping

import uvloop

from benchmarks.gateway import http_load
from benchmarks.queue import bare_chain, grpc_load
from benchmarks.queue.pull_worker import pulls
from benchmarks.queue.worker import Report, Settings, report_event

KINDS: Mapping[str, Callable[[Settings], Awaitable[Report]]] = {
    "accepts": grpc_load.accepts,
    "open_loop": grpc_load.streams,
    "fanout": grpc_load.fanout,
    "pulls": pulls,
    "http_accepts": http_load.accepts,
    "http_answers": http_load.answers,
    "http_open_loop": http_load.open_loop,
    "http_events": http_load.events,
    "http_held": http_load.held,
    "bare_gateway": bare_chain.gateway,
    "bare_planner": bare_chain.planner,
    "bare_agent": bare_chain.agent,
}


async def main() -> None:
    report = await KINDS[sys.argv[1]](json.loads(sys.stdin.readline()))
    report_event("report", **report, client_cpu_s=round(time.process_time(), 2))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
