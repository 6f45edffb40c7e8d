"""A live planner with each exact solver in its settings: it plans, and says who answered; without the solver it continues, and says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qlm_planner.shell.solver_requests import Choice

from .cluster import MODELS, Cluster, until

WARM_UP_S = 300.0
"""Compiled code may not be cached yet."""


async def rule_of_a_replan(cluster: Cluster, choice: Choice) -> str:
    """The rule that made the orders, by the planner's span of a whole replan of six groups."""
    await cluster.join("a")
    async with cluster.planner(solver=choice) as shell:

        async def is_ready() -> bool:
            return shell.solver.ready and shell.term is not None and shell.term.caught_up.is_set()

        await until(is_ready, "it leads, with a solver", WARM_UP_S)
        for number in range(6):
            await cluster.submit(MODELS[number % 3], slo_s=40.0 * 4.0**number, count=3)
        await until(cluster.all_placed, "all placed")
        assert shell.term is not None
        await shell.term.replan()
        replans = [
            dict(span.attributes or {})
            for span in cluster.spans.get_finished_spans()
            if span.name == "planner.solve" and (span.attributes or {}).get("qlm.plan.cause") == "asked"
        ]
        assert [span["qlm.solve.groups"] for span in replans] == [6]
        assert replans[0]["qlm.solve.outcome"] in ("applied", "kept"), replans
        return str(replans[0]["qlm.solve.rule"])


@pytest.mark.parametrize("choice", [Choice.EXACT_HIGHS, Choice.EXACT_GLPK])
async def test_the_exact_solver_answers(cluster: Cluster, choice: Choice) -> None:
    rule = await rule_of_a_replan(cluster, choice)
    assert f"{choice}: " in rule
    assert rule.endswith(("optimal", "feasible")), rule


async def test_without_it_the_scalable_one_does(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that it needs cannot be imported in the solver's process."""
    (tmp_path / "highspy.py").write_text("raise ModuleNotFoundError('no highspy', name='highspy')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    rule = await rule_of_a_replan(cluster, Choice.EXACT_HIGHS)
    assert f"; {Choice.EXACT_HIGHS}: " in rule
    assert "not installed" in rule, rule
