"""Queues as they stand on a cluster that is fed with the arrivals of a public trace: problems with the traces' own bursts and lengths."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from benchmarks.planner.generator import SLOS_S
from qlm_core.vocabulary.errors import ConfigError
from qlm_load.workload.trace import TraceRow, read_trace
from qlm_planner.search import Problem

ROWS_MAX = 60_000
MODELS = 12
INSTANCES = 8
GROUPS_MAX = 100
GROUP_REQUESTS = 64
PREFILL_TOKENS_PER_S = 6_000.0
STEP_S = 0.03
BATCH = 48.0
COLD_S, WARM_S = 30.0, 6.0
SERVED = (0.4, 0.9)
"""Share of what arrived before that has been served when the snapshot is taken, drawn."""


def snapshots(folder: Path, seed: int) -> Problem:
    """The queue of a moment of one of the folder's traces, both drawn by the seed. Models are those of the trace, or drawn for each request
    by a power law; SLOs are drawn. Raises ConfigError where the folder has no trace."""
    files = sorted(path for path in folder.glob("*.csv*") if not path.name.startswith("lengths"))
    if not files:
        raise ConfigError(f"{folder}: has no trace")
    chance = np.random.default_rng((seed, 41))
    rows = read_trace(files[int(chance.integers(len(files)))], ROWS_MAX).rows
    waiting = min(len(rows), int(chance.integers(20, GROUPS_MAX + 1)) * GROUP_REQUESTS)
    last = int(chance.integers(waiting, len(rows) + 1))
    return _problem(rows[last - waiting : last], chance)


def _problem(rows: tuple[TraceRow, ...], chance: np.random.Generator) -> Problem:
    popularity = 1.0 / np.arange(1, MODELS + 1)
    drawn_model = chance.choice(MODELS, size=len(rows), p=popularity / popularity.sum())
    names = {name: number % MODELS for number, name in enumerate(sorted({row.model for row in rows if row.model is not None}))}
    slo = chance.integers(0, len(SLOS_S), len(rows))
    now_s = rows[-1].arrival_s
    members: dict[tuple[int, int], list[list[int]]] = {}
    for number, row in enumerate(rows):
        of_model = int(drawn_model[number]) if row.model is None else names[row.model]
        groups = members.setdefault((of_model, int(slo[number])), [[]])
        if len(groups[-1]) >= GROUP_REQUESTS:
            groups.append([])
        groups[-1].append(number)
    chosen = [(key, group) for key, groups in sorted(members.items()) for group in groups][: 2 * GROUPS_MAX]
    size = np.exp(chance.normal(0.0, 0.6, MODELS))
    speed = np.array([1.0, 2.0])
    given = np.array([sum(rows[number].input_tokens for number in group) for _, group in chosen], dtype=np.float64)
    made = np.array([sum(rows[number].output_tokens for number in group) for _, group in chosen], dtype=np.float64)
    squares = np.array([sum(rows[number].output_tokens ** 2 for number in group) for _, group in chosen], dtype=np.float64)
    count = np.array([len(group) for _, group in chosen], dtype=np.float64)
    model = np.array([key[0] for key, _ in chosen], dtype=np.int32)
    factor = size[model] / speed[:, None]
    slo_s = np.array([SLOS_S[key[1]] for key, _ in chosen])
    first_s = np.array([rows[group[0]].arrival_s for _, group in chosen])
    last_s = np.array([rows[group[-1]].arrival_s for _, group in chosen])
    own_s = made / count * STEP_S * factor
    # Backlogs of an hour of a slow trace were not waited for that long: ages are as on a cluster that keeps up with a part of it.
    pace = chance.uniform(*SERVED)
    age_s = (now_s - first_s) * (1.0 - pace)
    queues = INSTANCES
    return Problem(
        model=model,
        band=np.zeros(len(chosen), dtype=np.int32),
        count=count,
        deadline_s=slo_s - np.minimum(age_s, 0.8 * slo_s),
        spread_s=np.minimum((last_s - first_s) * (1.0 - pace), 0.5 * slo_s),
        slo_s=slo_s,
        weight=np.ones(len(chosen)),
        work_s=(given / PREFILL_TOKENS_PER_S + made * STEP_S / BATCH) * factor,
        work_variance=np.maximum(squares - made * made / count, 0.0) * (STEP_S / BATCH * factor) ** 2,
        own_s=own_s,
        own_variance=(0.6 * own_s) ** 2,
        drain_s=1.5 * own_s,
        cold_s=COLD_S * np.sqrt(size) * np.ones((2, 1)),
        warm_s=WARM_S * np.sqrt(size) * np.ones((2, 1)),
        kind=(np.arange(queues) % 2).astype(np.int32),
        active=chance.integers(0, MODELS, queues).astype(np.int32),
        lead_s=np.full(queues, 1.0),
        lead_variance=np.zeros(queues),
        drain_lead_s=chance.uniform(1.0, 20.0, queues),
        drain_lead_variance=np.ones(queues),
        warm=chance.random((queues, MODELS)) < 0.3,
        head=np.full(queues, -1, dtype=np.int32),
        clear_cost=np.full(queues, math.inf),
        leave_cost=np.zeros(queues),
    )
