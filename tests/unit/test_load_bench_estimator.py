"""The bench of the estimator on traces that are made here: everything runs, and the truth is one that can be checked."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from benchmarks.__main__ import main
from benchmarks.estimator.families import FAMILIES, family_rows
from benchmarks.estimator.figures import BY_KEY, MULTIS, SHIFT_NAMES, SINGLES, details, p90_cells, r2_behind, runs_of, values_of
from benchmarks.estimator.lengths import measure_file, measure_lengths
from benchmarks.estimator.multi import predict_multi
from benchmarks.estimator.runs import Plan, measure_run, seeds_of
from benchmarks.estimator.scores import Judged, r2
from benchmarks.estimator.single import GPU, Shift, models, predict_run
from benchmarks.estimator.truth import Happened, Kind, TrueInstance, happenings
from benchmarks.estimator.workloads import MODEL, Arrival, arrivals, load_trace, stretched
from click.testing import CliRunner

from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_load.workload.azure_shape import input_tokens_at, output_tokens_at
from qlm_load.workload.trace import TraceRow


def azure_like(rows: int, seed: int = 1) -> tuple[Arrival, ...]:
    """Requests of the lengths of the Azure trace, in a Poisson stream."""
    rng = np.random.default_rng(seed)
    times_s = np.cumsum(rng.exponential(1.0, rows))
    made = []
    for at_s in times_s.tolist():
        prompt = input_tokens_at(float(rng.random()))
        output = output_tokens_at(float(rng.random()), prompt)
        made.append(TraceRow(arrival_s=at_s, input_tokens=prompt, output_tokens=output))
    return arrivals(made)


def write_trace(folder: Path, name: str, rows: int) -> None:
    lines = ["arrival_s,input_tokens,output_tokens"]
    lines += [f"{each.arrival_s},{each.prompt_tokens},{each.output_tokens}" for each in azure_like(rows)]
    with gzip.open(folder / f"{name}.csv.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def run(requests: tuple[Arrival, ...], seed: int = 1) -> tuple[list[Happened], TrueInstance]:
    facts = InstanceFacts(name="one", incarnation="one/1", gpu=GPU, n_gpu=1, engine="simulated", models=(MODEL,))
    instance = TrueInstance.of(facts, models(), seed)
    instance.load(0.0, MODEL)

    def assign(request: Arrival) -> str:
        instance.append(request)
        return "one"

    return list(happenings(requests, {"one": instance}, assign)), instance


def test_every_request_is_served_once_and_first_come_first_served() -> None:
    requests = stretched(azure_like(400), 20.0)
    seen, instance = run(requests)
    for kind in (Kind.ARRIVED, Kind.PULLED, Kind.STARTED, Kind.COMPLETED):
        assert sorted(each.number for each in seen if each.kind is kind) == list(range(400))
    pulled = [each.number for each in seen if each.kind is Kind.PULLED]
    assert pulled == sorted(pulled)
    assert instance.runs.running == 0
    assert instance.runs.kv_reserved == 0
    times = {kind: {each.number: each.at_s for each in seen if each.kind is kind} for kind in Kind}
    assert all(times[Kind.ARRIVED][n] <= times[Kind.PULLED][n] <= times[Kind.STARTED][n] < times[Kind.COMPLETED][n] for n in range(400))


def test_the_same_seed_gives_the_same_truth_and_another_another() -> None:
    requests = stretched(azure_like(100), 5.0)
    assert run(requests)[0] == run(requests)[0]
    assert run(requests, 1)[0] != run(requests, 2)[0]


def test_predictions_of_a_small_run_are_near_what_comes() -> None:
    judged, duration_s = predict_run(azure_like(1_500), 1, predicted_max=300)
    assert len(judged) == 300
    late = judged.where(judged.arrival_s > 0.4 * duration_s)
    assert r2(late.wait_s, late.actual_wait_s) > 0.5
    assert (judged.actual_completion_s > judged.actual_wait_s).all()


def test_a_shift_makes_waits_longer_and_is_learned() -> None:
    requests = azure_like(1_500)
    calm, _ = predict_run(requests, 1, predicted_max=200)
    slow, duration_s = predict_run(requests, 1, Shift(at_share=0.5, slowness=2.0), predicted_max=200)
    assert slow.actual_wait_s[-1] > 1.5 * calm.actual_wait_s[-1]
    late = slow.where(slow.arrival_s > 0.9 * duration_s)
    assert late.wait_s.mean() == pytest.approx(late.actual_wait_s.mean(), rel=0.25)


def test_three_models_on_two_kinds_of_gpu_are_swapped_and_predicted() -> None:
    judged, _ = predict_multi(azure_like(900), 1, 200)
    assert set(judged.model.tolist()) == {0, 1, 2}
    assert np.isfinite(judged.wait_s).all()
    assert np.abs(judged.wait_s - judged.actual_wait_s).mean() < 0.6 * judged.actual_wait_s.mean()


def test_scores_of_known_values() -> None:
    actual = np.linspace(1.0, 100.0, 100)
    judged = Judged(
        arrival_s=actual,
        model=np.repeat([0, 1], 50),
        depth=actual,
        wait_s=actual * 1.1,
        wait_p90_s=actual * 1.2,
        wait_p99_s=actual * 1.3,
        actual_wait_s=actual,
        completion_s=actual,
        completion_p90_s=actual,
        completion_p99_s=actual,
        actual_completion_s=actual,
    )
    assert r2(actual, actual) == 1.0
    assert judged.wait_within(0.5).all()
    assert judged.completion_within(0.9).all()
    assert p90_cells([judged]) == [], "too few ends"
    assert p90_cells([judged] * 40) == [100.0] * 20


def test_keys_name_the_runs_they_need() -> None:
    assert runs_of(["r2_wait_azure"]) == ("azure",)
    assert runs_of(["assess_ms"]) == ()
    assert runs_of(["p90_coverage_after_change"]) == SHIFT_NAMES
    assert runs_of(list(BY_KEY)) == (*SINGLES, *MULTIS, *SHIFT_NAMES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_the_same_for_a_seed_and_in_order(name: str) -> None:
    rows = family_rows(name, 1, 300)
    assert rows == family_rows(name, 1, 300) != family_rows(name, 2, 300)
    assert [row.arrival_s for row in rows] == sorted(row.arrival_s for row in rows)
    assert min(min(row.input_tokens, row.output_tokens) for row in rows) >= 1


def write_servegen(folder: Path, rows: int) -> None:
    """Answers of four tokens of one model beside answers of six hundred of two others."""
    lines = ["arrival_s,input_tokens,output_tokens,model,client"]
    for number in range(rows):
        model = ("m-small", "m-mid", "m-large")[number % 3]
        output = 4 if model == "m-small" else 500 + 7 * (number * 7919 % 31)
        lines.append(f"{0.5 * number},{50 + number * 31 % 200},{output},{model},c{number % 5}")
    (folder / "servegen_6h_day2.csv").write_text("\n".join(lines) + "\n")


def test_a_run_takes_one_model_of_a_trace_or_all_of_them(tmp_path: Path) -> None:
    write_servegen(tmp_path, 30)
    small, mid, mixed = (load_trace(tmp_path, f"servegen_{part}", seed=1) for part in ("small", "mid", "mixed"))
    assert [each.output_tokens for each in small] == [4] * 10
    assert min(each.output_tokens for each in mid) >= 500
    assert len(mixed) == 30
    assert [each.number for each in small] == list(range(10))
    assert small[0].arrival_s == mid[0].arrival_s == 0.0
    assert [each.tenant for each in small[:3]] == ["c0", "c3", "c1"]


def test_a_trace_without_requests_of_the_model_is_refused(tmp_path: Path) -> None:
    write_trace(tmp_path, "servegen_6h_day2", 10)
    with pytest.raises(ConfigError, match="m-mid"):
        load_trace(tmp_path, "servegen_mid", seed=1)
    assert len(load_trace(tmp_path, "servegen_mixed", seed=1)) == 10
    with pytest.raises(ConfigError, match="servegen_mid"):
        load_trace(tmp_path, "servegen", seed=1)


def test_seeds_are_ranges_or_lists() -> None:
    assert seeds_of("1-5") == (1, 2, 3, 4, 5)
    assert seeds_of("3,7") == (3, 7)
    for wrong in ("", "a", "2-1", "1,1"):
        with pytest.raises(ValueError, match=r"seeds|invalid"):
            seeds_of(wrong)


def test_the_arrivals_of_a_tick_are_spread_over_it(tmp_path: Path) -> None:
    (tmp_path / "mooncake_conversation.csv").write_text("arrival_s,input_tokens,output_tokens\n" + "0,10,10\n" * 50 + "3,10,10\n")
    requests = load_trace(tmp_path, "mooncake", seed=1)
    gaps = np.diff([each.arrival_s for each in requests])
    assert (gaps > 0.0).all()
    assert gaps.max() < 3.0


def test_the_command_prints_all_keys_and_draws(tmp_path: Path) -> None:
    write_trace(tmp_path, "azure_conv_2023", 250)
    out = tmp_path / "out"
    options = ["--traces", str(tmp_path), "--seeds", "1", "--only", "r2_wait_azure", "--predicted-max", "100", "--processes", "1"]
    result = CliRunner().invoke(main, ["estimator", "--json", "--plot", "--out", str(out), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert set(document) == {*BY_KEY, "context"}
    assert math.isfinite(document["r2_wait_azure"])
    assert document["r2_wait_mooncake"] is None
    assert {path.name for path in out.iterdir()} == {"wait.png", "completion.png", "reliability.png"}


def test_a_folder_without_the_trace_is_wrong_use(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["estimator", "--traces", str(tmp_path), "--only", "r2_wait_azure", "--processes", "1"])
    assert result.exit_code == 2
    assert "azure_conv_2023" in result.output


def test_a_mean_of_each_class_is_compared_with_the_oracle(tmp_path: Path) -> None:
    """Kinds of work that change while requests wait: who learns a length at its arrival knows it no better."""
    plan = Plan(traces=tmp_path, seeds=(1,), rows_max=600, predicted_max=100, processes=1)
    run = measure_run("abrupt", 2, plan)
    assert run.oracle is not None
    assert (run.oracle.actual_wait_s == run.judged.actual_wait_s).all(), "the same truth"
    behind = r2_behind(run)
    assert behind is not None
    assert details(run)["r2_wait_oracle"] - details(run)["r2_wait"] == pytest.approx(behind, abs=1e-4)
    values = values_of(["r2_behind_oracle"], {name: [run] for name in SINGLES})["r2_behind_oracle"]
    assert isinstance(values, dict)
    assert values["most"] == pytest.approx(behind, abs=1e-4)


# The measurement of output lengths: its counts, on traces that are made here ------------------------------------------


def write(path: Path, *, clients: bool, rows: int = 2_500) -> Path:
    """Two clients of one median, or none to distinguish; one request a second."""
    rng = np.random.default_rng(1)
    lines = ["arrival_s,input_tokens,output_tokens" + (",model,client" if clients else "")]
    for number in range(rows):
        client = int(rng.integers(2))
        center = (30.0, 300.0)[client] if clients else 100.0
        output = max(1, round(float(rng.lognormal(np.log(center), 0.4))))
        lines.append(f"{number},{rng.integers(100, 200)},{output}" + (f",m,c{client}" if clients else ""))
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return path


def test_clients_that_differ_are_a_gain(tmp_path: Path) -> None:
    errors = measure_file(write(tmp_path / "two.csv.gz", clients=True))
    assert errors.gain_percent > 40.0
    assert errors.used > 0.8
    assert errors.right_class > errors.largest_class + 0.1  # all short ones, and a third of the long ones


def test_where_nothing_can_be_gained_nothing_is_lost(tmp_path: Path) -> None:
    errors = measure_file(write(tmp_path / "one.csv.gz", clients=False))
    assert errors.gain_percent > -0.5
    assert errors.expected <= errors.model


def test_the_same_seed_gives_the_same_figures(tmp_path: Path) -> None:
    path = write(tmp_path / "two.csv.gz", clients=True, rows=600)
    assert measure_file(path, 3) == measure_file(path, 3)
    assert measure_file(path, 3) != measure_file(path, 4)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="azure_conv_2023"):
        measure_lengths(tmp_path, [1])
