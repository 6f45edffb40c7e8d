"""QLM with an engine policy against each one alone: the load of a trace, the choice, and the rows."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from benchmarks.evaluate.fastserve import Plan
from benchmarks.evaluate.together import ALONE, ENGINES, INSTANCES, LOAD, Compared, alone, inside, sustained_per_s, together, workload_of

from qlm_core.vocabulary.errors import ConfigError


def folder_with(tmp_path: Path, *names: str, rows: int = 40) -> Path:
    for name in names:
        with gzip.open(tmp_path / f"{name}.csv.gz", "wt") as file:
            lines = (f"{number * 3.0},{200 + 37 * number % 900},{20 + 13 * number % 60}" for number in range(rows))
            file.write("arrival_s,input_tokens,output_tokens\n" + "\n".join(lines) + "\n")
    return tmp_path


def plan_of(traces: Path | None) -> Plan:
    return Plan(traces=traces, seeds=(1,), duration_s=0.6, models=(), only=(), say=lambda line: None)


def test_a_trace_is_scaled_to_the_load(tmp_path: Path) -> None:
    workload = workload_of(folder_with(tmp_path, "a") / "a.csv.gz", 30, 1)
    assert len(workload.requests) == 30
    assert workload.rate_per_s == pytest.approx(LOAD * INSTANCES * sustained_per_s(workload), rel=0.05)


def test_alone_is_every_policy_and_the_plan_by_itself() -> None:
    found = alone()
    assert {f"{balancer} {engine}" for balancer, engine in ALONE} | {"qlm"} == set(found)
    assert {engine for _, engine in ALONE} == set(ENGINES)
    assert inside("larry")["planner.policy"] == "slo"


def test_the_gain_is_over_the_best_alone() -> None:
    assert Compared(engine="larry", together=0.9, alone={"qlm": 0.8, "sal larry": 0.85}).gain == pytest.approx(5.0)


def test_all_traces_with_arrivals_have_a_row_and_their_mean_is_the_last(tmp_path: Path) -> None:
    row, mean = together(plan_of(folder_with(tmp_path, "a", "lengths_b")))
    assert row.name == "together, a: points over the best alone"
    assert mean.mean == pytest.approx(row.mean)
    assert -100.0 <= row.mean <= 100.0
    with pytest.raises(ConfigError, match="traces"):
        next(together(plan_of(None)))
