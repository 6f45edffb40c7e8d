"""Advice worked out in a process of its own: forecasts for a fleet of 100 instances take a core for tens of seconds, and a thread of the
planner would take that from every decision meanwhile, a turn of the interpreter's lock at a time.

One process for each piece of advice, of the lowest priority. It starts in a second of a core, is asked every ten at the most (`watch`),
and leaves nothing behind. Where others leave it next to no time, another takes its place that is only nice: advice is needed most where
all is busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pickle
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import structlog

from qlm_planner.advice.advising import Worked, advise
from qlm_planner.advice.question import Question

TIMEOUT_S = 300.0
"""Of one piece of advice; longer ones are of no use."""

NICENESS = 5
"""Where the idle class starves: a quarter of a core beside one that wants all of it; of the lowest it would be a seventieth."""

LOOK_S = 5.0
STARVED_SHARE = 0.1
"""Of a core, from one look to the next: with less, advice of two seconds' work takes longer than anybody waits for it."""


class AdviceGoneError(Exception):
    """The process died or took too long; the message says which."""


class _StarvedError(Exception):
    """The process is hardly ever let to a core. `core_s`: how long it was."""

    def __init__(self, core_s: float) -> None:
        super().__init__()
        self.core_s = core_s


async def advise_apart(question: Question) -> Worked:
    """`advise`, elsewhere. Raises AdviceGoneError; no process is left in any case, also where this is cancelled."""
    body = pickle.dumps(question, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            try:
                return await _advised(body, idle=sys.platform == "linux")
            except _StarvedError as starved:
                # An unprivileged process cannot be taken out of the idle class again.
                structlog.get_logger().info("advice_starved", look_s=LOOK_S)
                worked = await _advised(body, idle=False)
                return replace(worked, core_s=starved.core_s + worked.core_s)
    except TimeoutError:
        raise AdviceGoneError(f"no advice within {TIMEOUT_S:g} s") from None


async def _advised(body: bytes, *, idle: bool) -> Worked:
    """By one process, which has ended when this ends. `idle`: of the idle class; raises _StarvedError where that is not enough."""
    pipe = asyncio.subprocess.PIPE
    # Nothing of the planner's own output is inherited: who reads that would wait for this process where the planner is killed.
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "qlm_planner.advice.apart", stdin=pipe, stdout=pipe, stderr=pipe)
    _behind_all(process.pid, idle=idle)
    talk = asyncio.create_task(process.communicate(body), name="planner-advice")
    try:
        if idle:
            await _kept_going(process.pid, talk)
        answer, said = await talk
    finally:
        talk.cancel()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = said.decode(errors="replace").splitlines()
        raise AdviceGoneError(f"the process ended with {process.returncode}: {lines[-1] if lines else 'it said nothing'}")
    worked = pickle.loads(answer)
    assert isinstance(worked, Worked), "it answers what it was asked"
    return worked


async def _kept_going(pid: int, talk: asyncio.Task[tuple[bytes, bytes]]) -> None:
    """Until the process has said all. Raises _StarvedError."""
    spent_s = 0.0
    while not (await asyncio.wait([talk], timeout=LOOK_S))[0]:
        before_s, spent_s = spent_s, _core_s(pid)
        if spent_s - before_s < STARVED_SHARE * LOOK_S:
            raise _StarvedError(spent_s)


def _behind_all(pid: int, *, idle: bool) -> None:
    """From its first import on. Where others wait for a core, a nice process still keeps it to the end of its slice, some milliseconds each
    time; an idle one (Linux) gives it up at once."""
    with contextlib.suppress(OSError):  # it is gone already, which is said elsewhere, or the system does not let us
        os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
        if idle:
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def _core_s(pid: int) -> float:
    """The time that the process has had on a core, by Linux."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:  # it ended just now
        return math.inf
    user, system = 11, 12  # of what is behind the name
    return (int(fields[user]) + int(fields[system])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the planner, which is told too, ends it
    sink = sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever prints does not print into the answer
    advice = advise(pickle.load(sys.stdin.buffer))
    sink.write(pickle.dumps(Worked(advice=advice, core_s=time.process_time()), protocol=pickle.HIGHEST_PROTOCOL))
    sink.flush()


if __name__ == "__main__":
    main()
