"""The bench of the agent on real vLLM: its parts run, and evicted requests have the undisturbed answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.__main__ import main
from benchmarks.agent import measured_cluster
from click.testing import CliRunner

from vllm_nursery import QuickTemplate

PARTS = ("throughput_ratio", "resume_equal", "swap_ms")


def test_a_quick_run(tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("qlm_agent.engines.vllm.engine", "benchmarks.agent.resuming", "benchmarks.agent.model_swap"):
        monkeypatch.setattr(f"{module}.Template", lambda *arguments: QuickTemplate())
    only = [word for key in PARTS for word in ("--only", key)]
    ran = CliRunner().invoke(main, ["agent", "--engine", "vllm", "--model", str(tiny_models[0]), "--quick", "--json", *only])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout.splitlines()[-1])
    throughput = found["throughput_ratio"]
    assert 0.0 < throughput["low"] <= throughput["ratio"] <= throughput["high"]
    assert found["resume_equal"] == found["context"]["parts"]["resume"]["evictions"] == 20
    assert found["context"]["parts"]["resume"]["answers_that_differ_from_each_other"] == 20
    swaps = found["swap_ms"]
    assert 0.0 < swaps["active_from_warm"] < swaps["active_from_cold"]
    assert 0.0 <= swaps.pop("warm_hidden_share") <= 1.0
    assert all(swaps.values())
    assert found["context"]["parts"]["model_swap"]["planned_swaps"] == 2


@pytest.mark.timeout(600)
def test_waits_on_a_cluster_whose_row_was_measured_as_it_serves(tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """`sim_*` start from the same row."""
    monkeypatch.setattr("qlm_agent.engines.vllm.engine.Template", lambda *arguments: QuickTemplate())
    monkeypatch.setattr(measured_cluster, "PROFILE_LIMIT_LEAST_S", 8.0)
    monkeypatch.setattr(measured_cluster, "LOAD_LEAST_S", 6.0)
    only = ("--only", "r2_wait")
    ran = CliRunner().invoke(main, ["agent", "--engine", "vllm", "--model", str(tiny_models[0]), "--quick", "--json", *only])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout.splitlines()[-1])
    wait = found["context"]["parts"]["wait"]
    assert wait["requests"] == 30
    assert 0.0 <= wait["actual_s"]["median"] <= wait["actual_s"]["max"]
    assert found["r2_wait"] <= 1.0
    # The row is the engine's own, made as slow or as quick as the runs in the cluster were.
    factor = wait["serving"]["times_as_slow_as_by_itself"]
    assert wait["serving"]["runs"] >= 20
    for figure in ("decode_a_ms", "decode_b_ms_per_seq", "prefill_base_ms"):
        assert wait["profile"][figure] == pytest.approx(factor * wait["by_itself"][figure], rel=1e-3)
