"""A group as an instance would serve it, and what an instance does now: what orders are worked out from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qlm_core.clearing import GivingWay
from qlm_core.instance import PREFILL_CHUNK_TOKENS
from qlm_core.prediction import Service
from qlm_core.profile import HardwareProfile
from qlm_core.queue_model import DECODE, PREFILL
from qlm_planner.items import Group

Sums = tuple[float, float, float, float, float, float]
"""What adds up along a queue, in the order of the rows of `qlm_core.queue_model`."""

Ends = tuple[float, float, float, float, float]
"""What ends a run, in the order of the rows of `qlm_core.run_lengths`."""

NOTHING: Sums = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A group as one instance would serve it; seconds of engine time, of a group of `count` requests. `each`: what one of them adds up to
    along a queue (the rows of `qlm_core.queue_model`), `ends`: what it adds to the end of its run (those of `qlm_core.run_lengths`).
    `own_s`, `own_variance`: from a request's start to what its SLO bounds. `drain_s`: from the group's last start to its last end.
    `cold_s`, `warm_s`: making its model the active one. `model_code`: stands for the model in arrays.
    `deadline_s`, `spread_s`: of the first request, and seconds from it to the last; the others have theirs evenly between.
    `band`: the rank of the group (its band and its tier there); of what runs the band alone, as agents know it. `weight`: of a late
    request and of a request-second of tardiness. `due_share`: of the requests, the share that can be late."""

    group_id: str
    model: str
    model_code: int
    band: int
    deadline_s: float
    slo_s: float
    count: int
    work_s: float
    each: Sums
    ends: Ends
    own_s: float
    own_variance: float
    drain_s: float
    cold_s: float
    warm_s: float
    spread_s: float = 0.0
    weight: float = 1.0
    due_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What an instance does now. `left`: sums over what is left of the requests that run (the rows of `qlm_core.queue_model`), and `left_s`
    the work in it; `drain_s`, `drain_variance`: until the last of them ends. `runners`: by group, as terms of what is left of them, with
    what giving way costs in their work; `way`: what that takes, None where nothing runs."""

    active_model: str
    model_code: int
    left: Sums = NOTHING
    drain_s: float = 0.0
    drain_variance: float = 0.0
    way: GivingWay | None = None
    runners: tuple[Term, ...] = ()

    @property
    def left_s(self) -> float:
        return self.left[PREFILL] + self.left[DECODE]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Most requests of a group: those that are not terminal, and those that wait."""

    live: int
    waiting: int


def each_of(served: Service, prefill_s: float) -> Sums:
    """What one request adds to a queue."""
    return (
        1.0,
        prefill_s,
        served.output.mean * served.token_s,
        served.output.variance * served.token_s**2,
        1.0 / served.batch,
        served.batch_left_s / served.batch,
    )


def ends_of(served: Service, output_tokens: float, longest_tokens: float, hardware: HardwareProfile) -> Ends:
    """What requests of so many tokens in the mean, and so many at the most, add to the end of their run."""
    return (
        output_tokens * (served.token_s - served.step_base_s / served.batch),
        served.step_base_s,
        served.step_s,
        max(hardware.prefill_work_s(PREFILL_CHUNK_TOKENS), 1e-12),
        longest_tokens,
    )


def left_of(running: Service, count: int) -> Sums:
    """What is left of requests that run."""
    share = count / running.batch
    return (
        count,
        0.0,
        count * running.left_tokens * running.token_s,
        count * running.output.variance * running.token_s**2,
        share,
        share * running.batch_left_s,
    )


def weightless(group: Group, model_code: int) -> Term:
    return Term(
        group_id=group.group_id,
        model=group.traits.key.model,
        model_code=model_code,
        band=group.rank,
        deadline_s=math.inf,
        slo_s=math.inf,
        count=0,
        work_s=0.0,
        each=(1.0, 0.0, 0.0, 0.0, 1.0, 0.0),
        ends=(0.0, 0.0, 1.0, 1.0, 0.0),
        own_s=0.0,
        own_variance=0.0,
        drain_s=0.0,
        cold_s=0.0,
        warm_s=0.0,
    )
