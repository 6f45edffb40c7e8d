"""CP-SAT as an oracle, run as a process of its own (ortools and highspy cannot be imported in one): the least cost of a deterministic
problem with one kind, no heads and no drains, where a request costs 1,000 late, 1 a second of tardiness and 0.3 a second until completion.

Reads a JSON object on stdin: `model`, `count`, `work_s`, `deadline_s` (whole seconds, by group), `swap_s` (by model), `active` (by queue),
`work_weight`; prints `{"cost": ...}`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ortools.sat.python import cp_model

POINTS_PER_GROUP = 4
SHARES_EIGHTHS = (1, 3, 5, 7)
SCALE = 80


def cheapest(problem: dict[str, Any]) -> float:
    """By circuits: one a queue, from a depot with its active model through its groups. In units of 1/SCALE."""
    model, count, work, deadline = problem["model"], problem["count"], problem["work_s"], problem["deadline_s"]
    groups, queues = len(model), len(problem["active"])
    horizon = sum(work) + sum(problem["swap_s"]) * (groups + 1)
    program = cp_model.CpModel()
    start = [program.new_int_var(0, horizon, f"start{group}") for group in range(groups)]
    served = [[program.new_bool_var(f"on{queue}_{group}") for group in range(groups)] for queue in range(queues)]
    cost = []
    for group in range(groups):
        program.add_exactly_one(served[queue][group] for queue in range(queues))
    for queue in range(queues):
        arcs: list[Any] = []
        empty = program.new_bool_var(f"empty{queue}")
        arcs.append((0, 0, empty))
        for group in range(groups):
            arcs.append((group + 1, group + 1, served[queue][group].negated()))
            first, last = program.new_bool_var(""), program.new_bool_var("")
            arcs += [(0, group + 1, first), (group + 1, 0, last)]
            swap = 0 if model[group] == problem["active"][queue] else problem["swap_s"][model[group]]
            program.add(start[group] >= swap).only_enforce_if(first)
            # The first load of an empty engine keeps nobody waiting.
            if problem["active"][queue] >= 0:
                cost.append(SCALE * problem["work_weight"] * swap * first)
            for behind in range(groups):
                if behind != group:
                    follows = program.new_bool_var("")
                    arcs.append((group + 1, behind + 1, follows))
                    swap = 0 if model[behind] == model[group] else problem["swap_s"][model[behind]]
                    program.add(start[behind] >= start[group] + work[group] + swap).only_enforce_if(follows)
                    cost.append(SCALE * problem["work_weight"] * swap * follows)
        program.add_circuit(arcs)
    for group in range(groups):
        cost.append(SCALE * 3 // 10 * count[group] * start[group] + SCALE * 3 // 20 * count[group] * work[group])
        for eighths in SHARES_EIGHTHS:
            over = program.new_int_var(0, 8 * 2 * horizon, "")
            late = program.new_bool_var("")
            gap = 8 * start[group] + eighths * work[group] - 8 * deadline[group]
            program.add(over >= gap)
            program.add(gap <= 0).only_enforce_if(late.negated())
            cost.append(SCALE * 1000 * count[group] // POINTS_PER_GROUP * late + SCALE * count[group] // POINTS_PER_GROUP // 8 * over)
    program.minimize(sum(cost))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.max_time_in_seconds = 60.0
    if solver.solve(program) != cp_model.OPTIMAL:
        raise SystemExit("CP-SAT has not proven it")
    return solver.objective_value / SCALE


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"cost": cheapest(json.load(sys.stdin))}))
