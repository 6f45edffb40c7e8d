"""The policy matrix: cells by seed, requests that all policies share, margins, and the command from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from qlm_load.__main__ import main
from qlm_load.matrix import cells as cells_module
from qlm_load.matrix.cells import BATCH_MAX, CELLS, CELLS_SEED, REQUESTS_MAX, REQUESTS_MIN, Cell, cells, drawn_cells, named_cells
from qlm_load.matrix.figures import BEST, EVERY, INTERACTIVE, CellRuns, document
from qlm_load.matrix.lengths import mean_tokens
from qlm_load.matrix.runs import CellTask, Measures, requests_of, run
from qlm_load.workload.output_bounds import OUTPUT_BOUND_MARGIN, OUTPUT_BOUNDS


def small(requests: int = 60) -> Cell:
    return replace(named_cells()[0], key="small", requests=requests)


def measures(interactive: float, every: float) -> Measures:
    return Measures(
        interactive=interactive,
        every=every,
        classes={},
        makespan_s=100.0,
        backlog=0,
        backlog_s=1.0,
        tokens_per_s=10.0 * every,
        in_time_tokens_per_s=every,
        swaps=0,
        gave_way=0,
        ended=1,
        real_s=1.0,
    )


def test_the_published_cells_are_as_they_are_described() -> None:
    drawn = drawn_cells(CELLS_SEED, CELLS)
    assert drawn == drawn_cells(CELLS_SEED, CELLS)
    assert {cell.key for cell in drawn} != {cell.key for cell in drawn_cells(CELLS_SEED + 1, CELLS)}
    assert len({cell.key for cell in cells()}) == CELLS + len(named_cells())
    assert sum(len(cell.models) == 1 for cell in drawn) == CELLS // 2
    assert sum(cell.inside for cell in drawn) >= CELLS // 3
    assert all(REQUESTS_MIN <= cell.requests <= REQUESTS_MAX for cell in drawn)
    assert {len(cell.gpus) for cell in drawn} == {1, 2, 4, 8}
    assert len({cell.lengths for cell in drawn}) == 5
    assert min(cell.load for cell in drawn) < 0.5
    assert max(cell.load for cell in drawn) > 1.2
    assert cells()[:5] == named_cells()


def test_requests_are_the_same_for_all_and_no_client_knows_its_answer() -> None:
    cell = small(2_000)
    requests, traffic = requests_of(cell, 1)
    assert requests == requests_of(cell, 1)[0]
    assert requests != requests_of(cell, 2)[0]
    assert all(each.output_tokens_max >= OUTPUT_BOUND_MARGIN * each.output_tokens for each in requests)
    assert {each.output_tokens_max for each in requests} == set(OUTPUT_BOUNDS)
    assert 0.45 < sum(each.slo_class == cell.urgent for each in traffic) / len(traffic) < 0.55
    for arrivals in ("poisson", "bursty", "traced"):
        times_s = [each.arrival_s for each in requests_of(replace(cell, arrivals=arrivals), 1)[0]]
        assert times_s == sorted(times_s)
        assert times_s[-1] == pytest.approx(cell.span_s, rel=0.25)
    assert mean_tokens("azure", 8_192) == pytest.approx((1_160, 215), rel=0.05)


def test_a_margin_is_over_the_best_of_the_others_paired_by_seed() -> None:
    found = CellRuns(cell=small())
    points = {("slo", 256): (90, 91, 89), ("edf", 256): (95, 97, 93), ("fcfs", 256): (10, 99, 12), ("edf", 48): (96, 98, 97)}
    for (variant, batch_max), values in points.items():
        for seed, value in enumerate(values, start=1):
            found.add(CellTask(cell=found.cell, variant=variant, batch_max=batch_max, seed=seed), measures(value, value))
    shipped, best = found.margin(EVERY), found.margin(INTERACTIVE, BEST)
    assert shipped is not None
    assert (shipped.points, shipped.rival) == (-5.0, ("edf", 256))
    assert (shipped.low, shipped.high) == pytest.approx((-7.48, -2.52), abs=0.01), "t of 2 degrees of freedom"
    assert best is not None
    assert (best.points, best.rival) == (-7.0, ("edf", 48))
    assert found.failures() == ["shipped", "best"]
    figures = document([found], {"seeds": [1, 2, 3]})
    assert figures["least_margin"] == {"shipped": -5.0, "best": -7.0}
    assert figures["one_model_two_gpus"] is None


def test_a_variant_has_settings_of_its_own() -> None:
    task = CellTask(cell=small(), variant="slo@agent.evict=false;planner.delta=2", batch_max=48, seed=3, settings=(("planner.delta", "3"),))
    assert task.overrides() == {
        "planner.policy": "slo",
        "agent.batch_max": 48,
        "agent.simulated.seed": 3,
        "agent.evict": "false",
        "planner.delta": "2",
    }


def test_a_run_serves_all_and_is_the_same_again() -> None:
    task = CellTask(cell=small(30), variant="least_loaded", batch_max=BATCH_MAX, seed=1)
    first = run(task)
    assert first.ended == 30
    assert first.every > 90.0
    assert replace(first, real_s=0.0) == replace(run(task), real_s=0.0)


def test_the_command_from_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cells_module, "cells", lambda seed, *, quick: (small(20),))
    json_path, picture_path = tmp_path / "matrix.json", tmp_path / "matrix.png"
    options = [
        "--policies",
        "slo,least_loaded",
        "--seeds",
        "1-2",
        "--json",
        str(json_path),
        "--picture",
        str(picture_path),
    ]
    result = CliRunner().invoke(main, ["matrix", *options])
    assert result.exit_code == 0, result.output
    whole = json.loads(json_path.read_text())
    assert whole["policies"] == ["slo", "least_loaded"]
    [cell] = whole["cells"]
    assert len(cell["runs"]) == 4
    assert whole["least_margin"]["best"] is None
    assert picture_path.stat().st_size > 1_000
    assert "small: 20 requests" in CliRunner().invoke(main, ["matrix", "--list"]).output


@pytest.mark.parametrize("options", [["--only", "nothing"], ["--policies", "best"], ["--seeds", "x"], ["--set", "nothing"]])
def test_wrong_options_are_named(options: list[str]) -> None:
    result = CliRunner().invoke(main, ["matrix", *options])
    assert result.exit_code == 2
    assert options[0] in result.output
