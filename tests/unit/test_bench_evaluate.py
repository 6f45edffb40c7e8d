"""The evaluation of papers on the simulated engine: workloads, one server, and the search for a rate."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.__main__ import main
from benchmarks.evaluate.fastserve import Curve, Plan
from benchmarks.evaluate.rows import Row, print_rows
from benchmarks.evaluate.server import serve, server
from benchmarks.evaluate.workloads import Jobs, jobs, lengths
from click.testing import CliRunner
from rich.console import Console

FIGURE_8 = ["evaluate", "--paper", "fastserve", "--quick", "--only", "kv_peak", "--only", "order"]


def three_jobs() -> Jobs:
    return Jobs(arrived_s=np.array([0.0, 0.1, 0.1]), prompts=np.array([100, 100, 100]), outputs=np.array([10, 100, 10]))


def test_lengths_are_those_of_the_trace(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "lengths_alpaca.csv.gz", "wt") as file:
        file.write("input_tokens,output_tokens\n5,7\n0,9\n")
    found = lengths("alpaca", tmp_path)
    assert (found.prompts.tolist(), found.outputs.tolist()) == ([5, 1], [7, 9])


def test_lengths_without_a_trace_have_its_quantiles() -> None:
    found = lengths("sharegpt", None)
    assert np.median(found.prompts) == pytest.approx(20, rel=0.05)
    assert np.percentile(found.outputs, 90) == pytest.approx(409, rel=0.05)


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_arrivals_have_the_rate_and_the_spread(cv: float) -> None:
    arriving = jobs(lengths("alpaca", None), rate=20.0, duration_s=2_000.0, seed=1, cv=cv)
    gaps_s = np.diff(arriving.arrived_s)
    assert gaps_s.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.1)


def test_a_job_alone_takes_its_prefill_and_its_decodes() -> None:
    on = server("OPT-13B", 1, seats=4)
    expected_s = on.timing().expected_step_s
    served = serve(Jobs(arrived_s=np.array([2.0]), prompts=np.array([50]), outputs=np.array([3])), on, "fastserve")
    assert served.first_s[0] == pytest.approx(2.0 + expected_s(0, 0, ((0, 50),)))
    assert served.end_s[0] == pytest.approx(served.first_s[0] + expected_s(1, 51, ()) + expected_s(1, 52, ()))


def test_a_static_batch_returns_its_answers_at_its_end_and_nobody_joins() -> None:
    served = serve(three_jobs(), server("OPT-13B", 1, seats=4), "static")
    assert (served.first_s[1:] > served.end_s[0]).all()
    assert served.end_s[1] == served.end_s[2] > served.first_s[2] + 1.0


def test_the_rate_of_a_curve_is_where_the_figure_crosses() -> None:
    plan = Plan(traces=None, seeds=(1,), duration_s=10.0, models=("OPT-13B",), only=(), say=lambda line: None)
    source, on = plan.lengths("alpaca"), server("OPT-13B", 1, seats=4)
    rate = Curve(plan, source, on, "fcfs", 1).rate(lambda point: point.mean_s, 0.3)
    below, above = (serve(plan.jobs(source, times * rate, 1), on, "fcfs").token_latency_s.mean() for times in (0.8, 1.25))
    assert below < 0.3 < above


def test_a_row_has_its_interval_and_its_ratio_to_the_nearer_end() -> None:
    row = Row(name="r", claim=(2.0, 4.0), ours=(5.0, 7.0))
    assert row.document() | {"note": ""} == {
        "claim": [2.0, 4.0],
        "ours": 6.0,
        "interval": 12.7062,
        "ratio": 1.5,
        "order_held": None,
        "seeds": [5.0, 7.0],
        "note": "",
    }
    assert Row(name="r", claim=(2.0, 4.0), ours=(3.0,)).ratio == 1.0
    assert Row(name="r", claim=(None, 2.0), ours=(1.0,)).ratio == 1.0


def test_a_row_below_a_claim_of_nothing_lost_has_no_ratio() -> None:
    lost = Row(name="r", claim=(0.0, None), ours=(-0.4,))
    assert lost.document()["ratio"] is None
    print_rows(Console(), [lost], "lost")


def test_the_command_prints_one_json_object_last_and_keeps_it(tmp_path: Path) -> None:
    found = CliRunner().invoke(main, [*FIGURE_8, "--out", str(tmp_path), "--json"])
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "fastserve.json").read_text())
    assert report["rows"]["kv_peak_over_fcfs"]["ours"] > 1.0
    assert {"order_10k_ms_fcfs", "order_10k_ms_fastserve"} <= set(report["rows"])
