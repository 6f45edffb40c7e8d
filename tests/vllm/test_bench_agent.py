"""The bench of the agent on real vLLM: its parts run, and evicted requests have the undisturbed answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from qlm_load.__main__ import main
from vllm_nursery import QuickTemplate

PARTS = ("throughput_ratio", "resume_equal", "swap_ms")


def test_a_quick_run(tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("qlm_agent.vllm.engine", "qlm_load.bench_agent.resuming", "qlm_load.bench_agent.model_swap"):
        monkeypatch.setattr(f"{module}.Template", lambda *arguments: QuickTemplate())
    only = [word for key in PARTS for word in ("--only", key)]
    ran = CliRunner().invoke(main, ["bench", "agent", "--engine", "vllm", "--model", str(tiny_models[0]), "--quick", "--json", *only])
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
