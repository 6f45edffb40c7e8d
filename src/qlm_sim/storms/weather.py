"""The faults of a run, by seed. Each run leaves some kinds of fault off, so that the others go deep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from qlm_sim.world.chance import Chance
from qlm_sim.world.network import NetworkSettings


class Fault(StrEnum):
    """Kinds of fault that begin at a time and end at another; those of messages are `MessageFault`."""

    KILL_AGENT = "kill agent"
    FREEZE_AGENT = "freeze agent"
    CUT_AGENT = "cut agent"
    DRAIN_AGENT = "drain agent"
    DOUBLE_AGENT = "double agent"  # a second process of its name runs beside it
    SLOW_ENGINE = "slow engine"
    BREAK_RUNS = "break runs"
    KILL_PLANNER = "kill planner"
    FREEZE_PLANNER = "freeze planner"
    CUT_PLANNER = "cut planner"
    KILL_ESTIMATOR = "kill estimator"
    FREEZE_ESTIMATOR = "freeze estimator"
    CUT_ESTIMATOR = "cut estimator"
    KILL_GATEWAY = "kill gateway"
    FREEZE_GATEWAY = "freeze gateway"
    CUT_GATEWAY = "cut gateway"
    STALL_SERVER = "stall server"
    SLOW_SERVER = "slow server"
    KILL_SERVER = "kill server"


_AGENT_CALLS = ("GiveBack", "GiveBack", "Complete", "ReadOwned", "Register")
_PLANNER_CALLS = ("Reclaim", "Reclaim", "Place", "ReadOverview")

AMBUSHED: Mapping[Fault, tuple[str, ...]] = {
    **dict.fromkeys((Fault.KILL_AGENT, Fault.FREEZE_AGENT, Fault.CUT_AGENT), _AGENT_CALLS),
    **dict.fromkeys((Fault.KILL_PLANNER, Fault.FREEZE_PLANNER), _PLANNER_CALLS),
}
"""Calls so short or so rare that a fault at a random time hardly hits them. A call named twice is chosen twice as often."""

AMBUSH_RUNS = 0.25
"""Share of the runs with ambushes; there, every second of these faults is one."""

AMBUSH_S = 10.0
"""A fault that waited so long for a call strikes without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault: at `at_s` after the start, for `for_s`. `victim`: index of the process among its kind, counted round. `severity`: 0 up
    to 1. `ambush`: the kind of call that it waits for, at most `AMBUSH_S`, "" for none."""

    at_s: float
    fault: Fault
    for_s: float
    victim: int
    severity: float
    ambush: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """`trouble_s`: until then faults begin; then all of them end."""

    kinds: tuple[Fault, ...]
    strikes: tuple[Strike, ...]
    network: NetworkSettings
    trouble_s: float


def weather_of(chance: Chance, lease_ttl_s: float) -> Weather:
    kinds = tuple(chance.some(tuple(Fault), chance.pick((0.15, 0.3, 0.6))))
    trouble_s = chance.between(10.0, 45.0)
    mean_gap_s = chance.pick((0.5, 1.5, 5.0))
    strikes: list[Strike] = []
    at_s = chance.wait_s(mean_gap_s)
    while kinds and at_s < trouble_s:
        for_s = chance.wait_s(0.5) if chance.happens(0.5) else chance.between(0.5, 2.0) * lease_ttl_s
        strikes.append(Strike(at_s=at_s, fault=chance.pick(kinds), for_s=for_s, victim=chance.below(1000), severity=chance.level()))
        at_s += chance.wait_s(mean_gap_s)
    return Weather(kinds=kinds, strikes=_ambushes(chance.part("ambush"), strikes), network=_network(chance), trouble_s=trouble_s)


def _ambushes(chance: Chance, strikes: Sequence[Strike]) -> tuple[Strike, ...]:
    """In some runs a part of the faults of agents and planners waits for calls. From a source of its own: the other runs stay unchanged."""
    if not chance.happens(AMBUSH_RUNS):
        return tuple(strikes)
    return tuple(
        replace(strike, ambush=chance.pick(AMBUSHED[strike.fault])) if strike.fault in AMBUSHED and chance.happens(0.5) else strike
        for strike in strikes
    )


def _network(chance: Chance) -> NetworkSettings:
    """Each kind of message fault is off in half of the runs."""

    def perhaps(most: float) -> float:
        return chance.between(0.0, most) if chance.happens(0.5) else 0.0

    return NetworkSettings(
        delay_mean_s=chance.pick((0.0003, 0.002, 0.02)),
        request_lost=perhaps(0.05),
        answer_lost=perhaps(0.05),
        repeated=perhaps(0.08),
        delayed=perhaps(0.03),
    )
