"""Advice worked out in a process of its own: forecasts for a fleet of 100 instances take a core for tens of seconds, and a thread of the
planner would take that from every decision meanwhile, a turn of the interpreter's lock at a time.

One process for each piece of advice, of the lowest priority. It starts in a second, is asked every ten at the most (`watch`), and leaves
nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys

from qlm_planner.advice.advising import Advice, advise
from qlm_planner.advice.question import Question

TIMEOUT_S = 300.0
"""Of one piece of advice; longer ones are of no use."""

NICENESS = 19


class AdviceGoneError(Exception):
    """The process died or took too long; the message says which."""


async def advise_apart(question: Question) -> Advice:
    """`advise`, elsewhere. Raises AdviceGoneError; the process has ended in any case, also where this is cancelled."""
    pipe = asyncio.subprocess.PIPE
    # Nothing of the planner's own output is inherited: who reads that would wait for this process where the planner is killed.
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "qlm_planner.advice.apart", stdin=pipe, stdout=pipe, stderr=pipe)
    _behind_all(process.pid)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            answer, said = await process.communicate(pickle.dumps(question, protocol=pickle.HIGHEST_PROTOCOL))
    except TimeoutError:
        raise AdviceGoneError(f"no advice within {TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = said.decode(errors="replace").splitlines()
        raise AdviceGoneError(f"the process ended with {process.returncode}: {lines[-1] if lines else 'it said nothing'}")
    advice = pickle.loads(answer)
    assert isinstance(advice, Advice), "it answers what it was asked"
    return advice


def _behind_all(pid: int) -> None:
    """From its first import on. Where others wait for a core, a nice process still keeps it to the end of its slice, some milliseconds each
    time; an idle one (Linux) gives it up at once."""
    with contextlib.suppress(OSError):  # it is gone already, which is said elsewhere, or the system does not let us
        os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
        if sys.platform == "linux":
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the planner, which is told too, ends it
    sink = sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever prints does not print into the answer
    sink.write(pickle.dumps(advise(pickle.load(sys.stdin.buffer)), protocol=pickle.HIGHEST_PROTOCOL))
    sink.flush()


if __name__ == "__main__":
    main()
