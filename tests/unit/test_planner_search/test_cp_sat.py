"""CP-SAT as an oracle of deterministic problems: another formulation, by another solver, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from drawn_problems import by_hand
from qlm_planner.search import solve

ORACLE = Path(__file__).parents[2] / "support" / "cp_sat_oracle.py"

if importlib.util.find_spec("ortools") is None:
    pytest.skip("ortools is not installed (the extra dev)", allow_module_level=True)


@pytest.mark.parametrize(("seed", "groups", "queues"), [(1, 7, 1), (2, 7, 2), (3, 8, 3)])
def test_the_cheapest_orders_cost_what_cp_sat_proves(seed: int, groups: int, queues: int) -> None:
    chance = np.random.default_rng(seed)
    models = 3
    model = chance.integers(0, models, groups).tolist()
    work_s = chance.integers(5, 60, groups).tolist()
    deadline_s = chance.integers(10, 200, groups).tolist()
    count = [int(each) * 32 for each in chance.integers(1, 5, groups)]
    active = chance.integers(-1, models, queues).tolist()
    swap_s = 25
    problem = by_hand(model=model, work_s=[work_s], deadline_s=deadline_s, kind=[0] * queues, active=active, swap_s=swap_s, models=models)
    problem = replace(problem, count=np.array(count, dtype=np.float64))
    told = {
        "model": model,
        "count": count,
        "work_s": work_s,
        "deadline_s": deadline_s,
        "swap_s": [swap_s] * models,
        "active": active,
        "work_weight": 10,
    }
    ran = subprocess.run([sys.executable, ORACLE], input=json.dumps(told), capture_output=True, text=True, timeout=100, check=True)
    assert solve(problem, moves=40_000, seed=seed).cost.total == pytest.approx(json.loads(ran.stdout)["cost"], rel=1e-6, abs=1.0)
