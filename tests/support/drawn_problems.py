"""Planning problems for tests: by hypothesis, and small ones by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from benchmarks.planner.generator import Shape, drawn
from hypothesis import strategies as st

from qlm_planner.overload.advice_question import Member, Question
from qlm_planner.search import Orders, Problem


@st.composite
def problems(draw: st.DrawFn, groups_max: int = 12, queues_max: int = 4, noisy: bool = True) -> Problem:
    """All possible problems: instances that cannot serve a model, models that none can, bands, no deadlines, deadlines long over."""
    shape = Shape(
        groups=draw(st.integers(1, groups_max)),
        queues=draw(st.integers(1, queues_max)),
        models=draw(st.integers(1, 5)),
        tightness=draw(st.sampled_from([0.3, 1.0, 5.0])),
        kinds=draw(st.integers(1, 2)),
        partial=draw(st.sampled_from([0.0, 0.4])),
        bands=draw(st.integers(1, 3)),
        noise=draw(st.sampled_from([0.0, 0.2])) if noisy else 0.0,
        requests=draw(st.sampled_from([(1, 3), (40, 400)])),
    )
    problem = drawn(draw(st.integers(0, 10_000)), shape)
    chance = np.random.default_rng(draw(st.integers(0, 10_000)))
    never = chance.random(problem.groups) < draw(st.sampled_from([0.0, 0.3]))
    lost = chance.random(problem.groups) < draw(st.sampled_from([0.0, 0.3]))
    return replace(
        problem,
        deadline_s=np.where(never, math.inf, np.where(lost, problem.deadline_s - 1e4, problem.deadline_s)),
        slo_s=np.where(never, math.inf, problem.slo_s),
        work_s=np.where(never & lost, math.inf, problem.work_s),
    )


def certain(problem: Problem) -> Problem:
    """Nothing is uncertain, and swaps take their full time: what a linear program has exactly."""
    none = np.zeros
    return replace(
        problem,
        cold_s=problem.warm_s,
        work_variance=none(problem.work_s.shape),
        own_variance=none(problem.work_s.shape),
        lead_variance=none(problem.queues),
        drain_lead_variance=none(problem.queues),
    )


def by_hand(
    *,
    model: list[int],
    work_s: list[list[float]],
    deadline_s: list[float],
    kind: list[int],
    active: list[int],
    swap_s: float = 30.0,
    models: int = 0,
    count: float = 10.0,
) -> Problem:
    """Deterministic; every swap takes as long."""
    groups, queues, kinds = len(model), len(kind), len(work_s)
    models = models or max(model) + 1
    zeros = np.zeros((kinds, groups))
    return Problem(
        model=np.array(model, dtype=np.int32),
        band=np.zeros(groups, dtype=np.int32),
        count=np.full(groups, count),
        deadline_s=np.array(deadline_s),
        spread_s=np.zeros(groups),
        slo_s=np.maximum(np.array(deadline_s), 1.0),
        weight=np.ones(groups),
        work_s=np.array(work_s),
        work_variance=zeros,
        own_s=zeros,
        own_variance=zeros,
        drain_s=zeros,
        cold_s=np.full((kinds, models), swap_s),
        warm_s=np.full((kinds, models), swap_s),
        kind=np.array(kind, dtype=np.int32),
        active=np.array(active, dtype=np.int32),
        lead_s=np.zeros(queues),
        lead_variance=np.zeros(queues),
        drain_lead_s=np.zeros(queues),
        drain_lead_variance=np.zeros(queues),
        warm=np.zeros((queues, models), dtype=np.bool_),
        head=np.full(queues, -1, dtype=np.int32),
        clear_cost=np.full(queues, math.inf),
        leave_cost=np.zeros(queues),
    )


def question_by_hand(
    problem: Problem, size: int, *, gpus: tuple[str, ...] = ("big", "other"), n_gpu: tuple[int, ...] = (1, 1), unserved: int = 0
) -> Question:
    """About a problem whose first `size` queues are instances a, b, ... and whose others are empty ones of kinds that are tried. Models are
    "alpha", "beta", ...; a kind serves those that it can load. All requests that are due count."""
    names = ("alpha", "beta", "gamma")[: problem.models]
    able = [tuple(name for name, swap_s in zip(names, row, strict=True) if swap_s < math.inf) for row in problem.cold_s]
    members = [
        Member(name=chr(ord("a") + at) if at < size else "", gpu=gpus[kind], n_gpu=n_gpu[kind], models=able[kind])
        for at, kind in enumerate(problem.kind.tolist())
    ]
    return Question(
        made_s=0.0,
        problem=problem,
        orders=Orders.of([[] for _ in members]),
        members=tuple(members),
        size=size,
        models=names,
        waiting=(),
        liable=np.zeros(0),
        due=np.where(np.isfinite(problem.deadline_s), problem.count, 0.0),
        alone_s=problem.own_s,
        horizon_s=300.0,
        unserved=unserved,
        idle=1,
    )
