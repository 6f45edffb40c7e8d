"""`qlm tune`: a choice on one part of a workload, judged on the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from qlm_cli.root import root
from qlm_load.compare.comparison import PolicyRun
from qlm_load.tune import tuning
from qlm_load.tune.tuning import ENGINES, Settings, named, split, tune
from qlm_load.workload.workload import ModelShare, Workload, generate_rows, make_workload

WORKLOAD = make_workload(generate_rows(100, 1, 5.0), [ModelShare(name="mistral-7b", share=1.0)], 1, run_id="t")


def figures(settings: Settings, workload: Workload, *, later: float) -> PolicyRun:
    """Under LARRY of weight 10 all are in time in the first part, and the share `later` in the second; else 60%."""
    larry = settings.get("agent.engine_policy_options") == {"weight": 10.0}
    share = (1.0 if len(workload.requests) == 70 else later) if larry else 0.6
    classes = {request.slo_class: share for request in workload.requests}
    count = len(workload.requests)
    return PolicyRun(
        policy="p", simulated=True, requests=count, ended=count, attainment=classes, wait_p50_s=1.0, wait_p99_s=2.0, run_s=9.0, swaps=0
    )


@pytest.mark.parametrize(("later", "better"), [(0.8, True), (0.6, False), (0.4, False)])
def test_the_best_is_chosen_only_if_it_is_better_on_the_other_part(later: float, better: bool) -> None:
    said: list[str] = []
    tuned = tune(WORKLOAD, ("sal", "slo"), 0.3, lambda settings, part: figures(settings, part, later=later), said.append)
    assert len(tuned.trials) == len(said) == 1 + 2 * len(ENGINES)
    assert named(tuned.best.settings) == "sal larry weight=10.0"
    assert tuned.better is better
    document = tuned.document()
    assert f"{later:.1%} in time" in document
    written = yaml.safe_load(document)
    expected = {
        "planner": {"policy": "sal"},
        "agent": {"engine_policy": "larry", "engine_policy_options": {"weight": 10.0}, "lookahead_requests": 64},
    }
    assert written == (expected if better else None)
    assert json.loads(json.dumps(tuned.as_json()))["better"] is better


def test_parts_are_in_order_and_each_begins_at_its_first_request() -> None:
    first, second = split(WORKLOAD, 0.3)
    assert (len(first.requests), len(second.requests)) == (70, 30)
    assert first.requests == WORKLOAD.requests[:70]
    assert second.requests[0].arrival_s == 0.0
    gaps = [request.arrival_s - WORKLOAD.requests[70].arrival_s for request in WORKLOAD.requests[70:]]
    assert [request.arrival_s for request in second.requests] == pytest.approx(gaps)
    assert len(split(WORKLOAD, 0.999)[0].requests) == 1


@pytest.mark.parametrize("own", [False, True])
def test_the_command_writes_settings_and_evidence(own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`own`: a file of one model and one agent, without gateways."""
    monkeypatch.setattr(tuning, "ENGINES", ENGINES[4:5])
    arguments = ["tune", "--requests", "40", "--policy", "least_loaded", "--out", str(tmp_path)]
    if own:
        file = tmp_path / "own.yaml"
        agent = {"name": "gpu-0", "gpu": "A100-80GB", "engine": "simulated", "models": ["m"]}
        file.write_text(yaml.safe_dump({"models": [{"name": "m", "profile": "Mistral-7B"}], "agents": [agent]}))
        arguments += ["--config", str(file)]
    result = CliRunner().invoke(root, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "tuned.json").read_text())
    assert [trial["run"]["ended"] for trial in found["trials"]] == [28, 28]
    assert found["own"]["run"]["ended"] == found["best"]["run"]["ended"] == 12
    assert (tmp_path / "tuned.yaml").read_text().startswith("# ")
    settings = yaml.safe_load((tmp_path / "tuned.yaml").read_text())
    assert (settings is not None) == found["better"]
