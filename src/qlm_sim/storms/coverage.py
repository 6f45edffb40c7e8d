"""Faults that must have hit work under way: the coverage of the seeds.

`COMMON` is met by the seeds of every test run, `RARE` also by a thousand. A change that makes one of them impossible changes this list.
"""

from __future__ import annotations

from collections.abc import Iterable

from qlm_sim.storms.storm import Meetings
from qlm_sim.storms.weather import Fault
from qlm_sim.world.network import MessageFault

_FREQUENT_CALLS = (
    *("accept", "attach", "emit", "complete", "pull", "place", "renew_lease", "acquire_lease", "overview"),
    *("read_arrivals", "read_control", "read_events", "read_frames", "read_profiles", "read_waits", "expire", "leader_address"),
)
_RARE_CALLS = (
    "apply_plan",
    "cancel",
    "describe",
    "owned",
    "publish_profiles",
    "publish_waits",
    "read_unplaced",
    "reclaim",
    "register",
    "requeue",
    "unpull",
)

_AGENT_WORK = ("agent Pull", "agent Emit", "agent model swap", "run running", "run ended")
_AGENT_SELDOM = ("agent Complete", "agent GiveBack", "agent ReadOwned", "agent Register", "agent paused", "run returning", "run offloaded")
_PLANNER_WORK = ("planner ReadArrivals", "planner ReadEvents", "planner leads", "planner stands by")
_PLANNER_SELDOM = ("planner Place", "planner ReadOverview", "planner Reclaim", "planner Expire")

COMMON: tuple[tuple[str, str], ...] = (
    *((fault, call) for fault in MessageFault for call in _FREQUENT_CALLS),
    *((fault, work) for fault in (Fault.KILL_AGENT, Fault.FREEZE_AGENT, Fault.CUT_AGENT, Fault.DRAIN_AGENT) for work in _AGENT_WORK),
    *((Fault.DOUBLE_AGENT, work) for work in ("agent model swap", "run running")),
    *((fault, work) for fault in (Fault.KILL_SERVER, Fault.SLOW_SERVER) for work in (*_AGENT_WORK, *_PLANNER_WORK)),
    *((Fault.STALL_SERVER, work) for work in (*_AGENT_WORK[:-1], *_PLANNER_WORK)),
    *((fault, work) for fault in (Fault.KILL_PLANNER, Fault.FREEZE_PLANNER, Fault.CUT_PLANNER) for work in _PLANNER_WORK),
    *((fault, "gateway generate") for fault in (Fault.KILL_GATEWAY, Fault.FREEZE_GATEWAY, Fault.CUT_GATEWAY, Fault.KILL_SERVER)),
    *((fault, "gateway stream") for fault in (Fault.KILL_GATEWAY, Fault.FREEZE_GATEWAY, Fault.CUT_GATEWAY)),
    *((fault, "estimator") for fault in (Fault.KILL_ESTIMATOR, Fault.FREEZE_ESTIMATOR, Fault.CUT_ESTIMATOR, Fault.KILL_SERVER)),
    *((fault, "run running") for fault in (Fault.SLOW_ENGINE, Fault.BREAK_RUNS)),
)

RARE: tuple[tuple[str, str], ...] = (
    (Fault.STALL_SERVER, _AGENT_WORK[-1]),
    *((fault, call) for fault in MessageFault for call in _RARE_CALLS),
    *((fault, work) for fault in (Fault.KILL_AGENT, Fault.FREEZE_AGENT, Fault.CUT_AGENT, Fault.KILL_SERVER) for work in _AGENT_SELDOM),
    *((fault, work) for fault in (Fault.KILL_PLANNER, Fault.FREEZE_PLANNER, Fault.KILL_SERVER) for work in _PLANNER_SELDOM),
    *((fault, work) for fault in (Fault.KILL_GATEWAY, Fault.CUT_GATEWAY) for work in ("gateway submit", "gateway cancel")),
)

EFFECTS = (
    *("AbortRuns", "ApplyChunk", "Complete", "Deregister", "Describe", "Emit", "Expire", "LoadModel active", "LoadModel warm"),
    *("ForgetRun written", "ForgetRun given_back", "ForgetRun not owned"),
    *("GiveBack displaced", "GiveBack drained", "GiveBack evicted", "GiveBack failed", "GiveBack unstarted", "OffloadRuns", "RestoreRuns"),
    *("PauseEngine", "ResumeEngine", "Place", "Pull", "ReadOwned", "ReadUnplaced", "Reclaim", "Register", "StartRun", "Stop"),
)
"""Effects that agents and planners must have had at least once over the seeds of every test run."""


def missing(meetings: Meetings, expected: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{fault} x {work}" for fault, work in expected if not meetings[(fault, work)]]
