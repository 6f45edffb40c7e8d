"""The bench of the planner: problems by seed and from traces; the parts run and the document has all keys."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.__main__ import main
from benchmarks.planner import exactness, gaps, rivals
from benchmarks.planner.figures import BY_KEY
from benchmarks.planner.generator import Shape, drawn
from benchmarks.planner.live import p99
from benchmarks.planner.parts import Plan
from benchmarks.planner.snapshots import GROUP_REQUESTS, snapshots
from click.testing import CliRunner

from qlm_core.vocabulary.errors import ConfigError


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    chance = np.random.default_rng(1)
    lines = ["arrival_s,input_tokens,output_tokens"]
    lines += [f"{number * 0.1:.1f},{chance.integers(1, 4000)},{chance.integers(1, 800)}" for number in range(8_000)]
    with gzip.open(tmp_path / "some.csv.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    return tmp_path


def test_a_seed_gives_the_same_problem_and_the_range_is_wide() -> None:
    shape = Shape(groups=30, queues=4, models=6, partial=0.5, bands=2)
    one, same, other = drawn(1, shape), drawn(1, shape), drawn(2, shape)
    assert np.array_equal(one.deadline_s, same.deadline_s)
    assert np.array_equal(one.work_s, same.work_s)
    assert not np.array_equal(one.deadline_s, other.deadline_s)
    assert np.isinf(one.work_s).any() or np.isinf(other.work_s).any()
    assert np.isfinite(one.work_s).any(axis=0).all()
    shapes = [exactness.shape_of(seed) for seed in range(50)]
    assert {shape.queues for shape in shapes} == {1, 2, 3}
    assert max(shape.groups for shape in shapes) == 10


def test_tighter_problems_have_earlier_deadlines() -> None:
    loose, tight = (drawn(1, Shape(groups=30, queues=4, models=6, tightness=tightness)) for tightness in (0.5, 2.0))
    assert tight.deadline_s.mean() < loose.deadline_s.mean()


def test_a_snapshot_is_a_queue_of_the_trace(traces: Path) -> None:
    problem = snapshots(traces, 1)
    assert 20 <= problem.groups <= 200
    assert problem.count.max() <= GROUP_REQUESTS
    assert (problem.deadline_s > 0.0).all()
    assert np.array_equal(problem.work_s, snapshots(traces, 1).work_s)
    with pytest.raises(ConfigError, match="no trace"):
        snapshots(traces / "..", 1)


def test_the_parts_measure(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process and with next to no moves: the figures mean nothing."""
    plan = Plan(traces=traces, seed=1, scale=0.02, processes=0, say=lambda text: None)
    monkeypatch.setattr(gaps, "REFERENCE_MOVES", 100_000)
    monkeypatch.setattr(rivals, "PROVEN", ((4, 2), (5, 3)))
    exact = exactness.measure(plan)
    assert 0.0 < exact.values["exact_hit_rate"] <= 1.0  # type: ignore[operator]
    assert exact.details["worst_above_pct"] < 10.0  # type: ignore[operator]
    gap = gaps.measure(plan)
    assert gap.values["gap_late"].keys() == {"share", "mean"}  # type: ignore[union-attr]
    edf = rivals.measure_edf(plan)
    assert 0.0 <= edf.values["late_vs_edf"] < 1.0  # type: ignore[operator]
    assert "traces" in edf.details
    eq13 = rivals.measure_eq13(plan)
    assert 0.0 <= eq13.values["late_vs_eq13"] <= 1.05  # type: ignore[operator]


def test_the_document_has_all_keys_and_only_requested_ones_are_measured() -> None:
    ran = CliRunner().invoke(main, ["planner", "--json", "--quick", "--processes", "1", "--only", "late_vs_edf"])
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.stdout.splitlines()[-1])
    assert document.keys() == {*BY_KEY, "context"}
    assert document["late_vs_edf"] < 1.0
    assert document["exact_hit_rate"] is None
    assert document["gap_pct"] == {"mean": None, "p95": None}
    assert document["context"]["failures"] == {}


def test_a_percentile_is_of_the_nearest_rank() -> None:
    assert p99([*range(1, 301)]) == 297
    assert p99([*range(100, 0, -1)]) == 99
    assert p99([3.0, 1.0, 2.0]) == 3.0
    assert p99([7.0]) == 7.0


def test_a_wrong_key_is_wrong_use() -> None:
    assert CliRunner().invoke(main, ["planner", "--only", "nothing"]).exit_code == 2
