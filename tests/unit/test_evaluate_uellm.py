"""The evaluation of UELLM: its engine against a step-by-step account, and its claims on two trials."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.__main__ import main
from benchmarks.evaluate import pipeline_stages
from benchmarks.evaluate.pipeline_stages import MeasuredMap, ordered_right
from benchmarks.evaluate.rows import Row
from benchmarks.evaluate.static_batches import Workload, alpaca_like, batch_s, first_come, serve_batches, serve_continuous, serve_s3
from click.testing import CliRunner

from qlm_core.operations.batching import BatchRequests
from qlm_core.profiles.hardware_prior import hardware_prior
from qlm_core.profiles.hardware_profile import HardwareProfile

HELD = (
    "UA over S3, accelerate: latency, %",
    "UA over Morphling, accelerate: latency, %",
    "UA over S3, accelerate: throughput, x",
    "UA over S3, accelerate: SLO violations, points",
    "ODBS, program: mean latency saved over FIFO, share",
    "SLO-ODBS over FIFO: mean latency, x",
    "SLO-ODBS over FIFO: SLO attainment, x",
    "HELR over even: tokens_per_s, x",
    "table 1: worst error, %",
    "deploy_plan_s, 64 devices",
)
"""Orders of the paper that are far from turning on two trials."""


@pytest.fixture(scope="module")
def profile() -> HardwareProfile:
    row = hardware_prior("RTX-3090", 1, "ChatGLM2-6B")
    assert row is not None
    return row


def workload(*outputs: int, predicted: list[int] | None = None) -> Workload:
    columns = BatchRequests(
        slo_s=np.full(len(outputs), 60.0),
        prompt_tokens=np.full(len(outputs), 20),
        output_tokens=np.array(predicted or outputs),
    )
    return Workload(requests=columns, output_tokens=np.array(outputs))


def test_a_static_batch_takes_its_padded_prefill_and_the_steps_of_its_longest_output(profile: HardwareProfile) -> None:
    found = batch_s(profile, np.array([10, 30]), np.array([5, 40]))
    steps = sum(profile.decode_step_s(2, 2 * (30 + step + 0.5)) for step in range(40))
    assert found == pytest.approx(profile.prefill_s(0) + 2 * profile.prefill_work_s(30, 900) + steps)


def test_requests_are_answered_when_their_batch_ends(profile: HardwareProfile) -> None:
    served = serve_batches(workload(5, 40, 7), first_come(workload(5, 40, 7).requests, 2), profile)
    assert served.ends_s[0] == served.ends_s[1] < served.ends_s[2] == served.makespan_s
    assert served.decoded == 2 * 40 + 7


def test_s3_requeues_a_run_beyond_its_prediction_with_twice_that(profile: HardwareProfile) -> None:
    served = serve_s3(workload(50, 300, predicted=[100, 100]), profile, capacity_tokens=1024, batch_max=20)
    assert served.requeued == 2  # at 100, and at 200
    assert served.decoded == 2 * 100 + 200 + 300
    assert served.ends_s[0] < served.ends_s[1]
    assert serve_s3(workload(50, 300), profile, 1024, 20).requeued == 0


def test_continuous_batching_of_one_seat_is_one_request_after_the_other(profile: HardwareProfile) -> None:
    """A prefill makes the first token."""
    found = workload(5, 40, 7)
    ends_s = serve_continuous(found, np.array([1, 0, 2]), profile, 1).ends_s
    assert ends_s == pytest.approx(serve_batches(workload(4, 39, 6), ((1,), (0,), (2,)), profile).ends_s, rel=1e-3)
    assert serve_continuous(found, np.arange(3), profile, 3).ends_s.mean() < serve_batches(found, ((0, 1, 2),), profile).ends_s.mean()


def test_predictions_are_right_as_often_as_stated() -> None:
    found = alpaca_like(seed=1, count=4_000)
    classes = -(-found.output_tokens // 102) * 102
    right = float((found.requests.output_tokens == classes).mean())
    assert right == pytest.approx(0.8 + 0.2 * 0.5 * float((classes == 102).mean()), abs=0.03)  # the lowest class has none below it
    assert 180 < found.output_tokens.mean() < 208


def test_the_command_reports_each_claim_and_orders_of_the_paper_hold(tmp_path: Path) -> None:
    arguments = ["evaluate", "--paper", "uellm", "--out", str(tmp_path), "--seed", "1", "--seed", "2", "--seed", "3", "--json"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "uellm.json").read_text())
    assert document["context"]["seeds"] == [1, 2, 3]
    assert json.loads(done.output.splitlines()[-1]) == document
    rows = document["rows"]
    assert [name for name in HELD if not rows[name]["order_held"]] == []
    assert rows["ODBS, line_7: mean latency saved over FIFO, share"]["order_held"] is False
    assert rows["accelerate: UA: violations"]["order_held"] is None


def test_a_part_of_another_paper_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["evaluate", "--paper", "uellm", "--only", "rates", "--out", str(tmp_path)])
    assert (done.exit_code, "rates: may be systems" in done.output) == (2, True)


def test_the_part_on_a_real_model_needs_its_folder_and_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_stages, "find_spec", lambda name: None)
    for options in (["--only", "pipeline"], ["--weights", str(tmp_path), "--quick"]):
        done = CliRunner().invoke(main, ["evaluate", "--paper", "uellm", "--out", str(tmp_path), *options])
        assert (done.exit_code, "needs PyTorch" in done.output) == (2, True)


def test_maps_are_ordered_right_where_both_times_rise() -> None:
    one, other = (MeasuredMap(layers=(), predicted_ms=predicted, measured_ms=measured) for predicted, measured in ((1.0, 3.0), (2.0, 4.0)))
    assert ordered_right(one, other)
    assert not ordered_right(one, replace(other, measured_ms=2.0))


def test_an_order_holds_with_its_whole_interval() -> None:
    row = Row(name="", claim=(1.0, None), ours=(0.9, 1.4), order=(1.0, None))
    assert (row.order_held, row.ratio) == (False, 1.0)
    assert replace(row, ours=(1.2, 1.21)).order_held is True
    assert replace(row, order=(None, None)).order_held is None
    assert replace(row, ours=(1.0, 2.0, 3.0)).interval == pytest.approx(2.484, abs=1e-3)  # 4.303 / sqrt(3)
