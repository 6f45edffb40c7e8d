"""`python -m qlm_load.bench.worker_main KIND`: one load generator (see `worker`)."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping

import uvloop

from qlm_load.bench.accept_worker import accepts
from qlm_load.bench.pull_worker import pulls
from qlm_load.bench.stream_worker import fanout, open_loop
from qlm_load.bench.worker import Report, Settings, tell

KINDS: Mapping[str, Callable[[Settings], Awaitable[Report]]] = {
    "accepts": accepts,
    "open_loop": open_loop,
    "fanout": fanout,
    "pulls": pulls,
}


async def main() -> None:
    report = await KINDS[sys.argv[1]](json.loads(sys.stdin.readline()))
    tell("report", **report, client_cpu_s=round(time.process_time(), 2))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
