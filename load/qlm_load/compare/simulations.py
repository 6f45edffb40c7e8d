"""Simulated runs for the comparison, each a process of its own: they share the cores, and a run past its limit is ended."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from qlm_load.compare.comparison import PolicyRun

ERROR_BYTES_MAX = 1_000
"""Characters of a failed process's output that are reported, from its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A simulated run without a result: it failed, or (not `failed`) it was ended at its time limit."""

    why: str
    failed: bool


async def simulated_runs(policies: Sequence[str], arguments: Sequence[str], timeout_s: float) -> tuple[PolicyRun | FailedRun, ...]:
    """A run for each policy, by the options `arguments` of the command `simulate`, within `timeout_s` real seconds."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_run(policy, arguments, timeout_s)) for policy in policies]
    return tuple(task.result() for task in tasks)


async def _run(policy: str, arguments: Sequence[str], timeout_s: float) -> PolicyRun | FailedRun:
    command = [sys.executable, "-m", "qlm_load", "simulate", "--policy", policy, *arguments]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await process.communicate()
    except TimeoutError:
        return FailedRun(why=f"the simulated run of {policy} was ended after {timeout_s:g} s (load.simulation_timeout_s)", failed=False)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        said = errors.decode(errors="replace")[-ERROR_BYTES_MAX:].strip()
        return FailedRun(why=f"the simulated run of {policy} failed: {said}", failed=True)
    return PolicyRun(**json.loads(output))
