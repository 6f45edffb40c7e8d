"""Load generators as processes of their own, so that they share no interpreter with the measured system or each other.

A worker reads its settings as one JSON line from stdin and writes JSON lines to stdout: `{"event": "begin"}` and `"end"` where its measured
window begins and ends, and last `{"event": "report", ...}`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import ROOT
from qlm_core.vocabulary.errors import Unavailable

Settings = dict[str, Any]
"""Settings of a worker, by name; see each worker's docstring."""
Report = dict[str, Any]

REPORT_BYTES_MAX = 64 << 20
WORKER_TIMEOUT_S = 90.0


def report_event(event: str, **fields: object) -> None:
    """Writes one line to the starting process."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


async def run_worker(
    kind: str,
    settings: Settings,
    on_event: Callable[[str], None] = lambda event: None,
    *,
    timeout_s: float = WORKER_TIMEOUT_S,
) -> Report:
    """Runs a worker to its end and returns its report; `on_event` is called with "begin" and "end" as they happen. It is killed if this is
    cancelled. Raises Unavailable if it fails or takes longer than `timeout_s`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.queue.worker_main", kind),
        stdin=asyncio.subprocess.PIPE,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        limit=REPORT_BYTES_MAX,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    report: Report | None = None
    try:
        async with asyncio.timeout(timeout_s):
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            await process.stdin.drain()
            while line := await process.stdout.readline():
                message: Report = json.loads(line)
                event = message.pop("event")
                if event == "report":
                    report = message
                else:
                    on_event(event)
            code = await process.wait()
    except TimeoutError:
        raise Unavailable(f"the load generator {kind} was not done within {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code != 0 or report is None:
        raise Unavailable(f"the load generator {kind} ended with {code}")
    return report
