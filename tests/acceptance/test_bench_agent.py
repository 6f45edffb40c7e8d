"""The parts of `benchmarks agent` that run a whole cluster: here with the simulated engine in vLLM's place, and its row as shipped.

`tests/vllm/test_bench_agent.py` measures a row on vLLM.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from benchmarks.__main__ import main
from benchmarks.agent import command, simulating, waiting
from benchmarks.agent.measured_cluster import MODEL, SEATS, MeasuredAgent
from benchmarks.agent.model_config import INSTANCE, QUEUE
from benchmarks.agent.parts import Plan
from click.testing import CliRunner

from qlm_agent.config import AgentConfig
from qlm_core.profiles.hardware_profile import ORIGIN_MEASURED
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.shipped_profiles import shipped_snapshot

GPU, PROFILE = "A100-80GB", "Mistral-7B"
REQUESTS = 30
KEYS = ("r2_wait", "sim_attainment_gap", "sim_wait_p50_err", "sim_wait_p99_err")


async def shipped_agent(plan: Plan, folder: Path) -> MeasuredAgent:
    """In the place of one that was measured; its decode is a hundredth slower with each seed."""
    shipped = next(row for row in shipped_snapshot().hardware if (row.gpu, row.n_gpu, row.model) == (GPU, 1, PROFILE))
    decode_a_ms = shipped.decode_a_ms * (1.0 + plan.seed / 100.0)
    row = replace(shipped, origin=ORIGIN_MEASURED, decode_a_ms=decode_a_ms)  # shipped rows are not imported
    model = {"name": MODEL, "profile": PROFILE, "context_tokens_max": 1024}
    agent = {"name": INSTANCE, "gpu": GPU, "engine": "simulated", "batch_max": SEATS}
    config = AgentConfig.model_validate({"queue": {"name": QUEUE}, "models": [model], "agent": agent})
    return MeasuredAgent(config=config, row=row, profiles=ProfileSnapshot(version=0, made_s=0.0, hardware=(row,)))


@pytest.mark.timeout(150)
def test_a_cluster_is_held_against_what_clients_were_told_and_against_virtual_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    monkeypatch.setattr(simulating, "SEEDS", 2)
    for part in (simulating, waiting):
        monkeypatch.setattr(part, "measured_agent", shipped_agent)
        monkeypatch.setattr(part, "vocabulary_of", lambda folder: 32_000)
    only = [word for key in KEYS for word in ("--only", key)]
    ran = CliRunner().invoke(main, ["agent", "--json", "--quick", "--model", str(tmp_path), *only])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout.splitlines()[-1])
    parts = found["context"]["parts"]

    told = parts["wait"]
    assert told["requests"] == REQUESTS, "each client was told of its wait"
    assert 0.0 < told["actual_s"]["median"] < told["actual_s"]["max"]
    assert abs(told["bias_s"]) < told["actual_s"]["max"]
    assert told["decode_a_ms_of_real_runs"] > 0.0
    assert found["r2_wait"] <= told["r2_with_one_factor"] + 1e-9 < 1.0 + 1e-9

    simulated = parts["simulator"]
    assert simulated["requests"] == REQUESTS
    first, second = (row["profile"]["decode_a_ms"] for row in simulated["rows"])
    assert second == pytest.approx(first * 1.02 / 1.01), "each seed is simulated with a row of its own"
    sides = simulated["seeds"]
    for each in [*(side for pair in sides for side in pair.values()), *simulated["simulated_afterwards"]]:
        assert 0.0 <= each["attainment"] <= 1.0
        assert 0.0 < each["wait_p50_s"] <= each["wait_p99_s"]
    assert len(simulated["shifted"][0]) >= 2
    assert all(side["wait_p99_s"] > 0.0 for side in simulated["shifted"][0])
    gaps = [100 * abs(pair["real"]["attainment"] - pair["simulated"]["attainment"]) for pair in sides]
    assert found["sim_attainment_gap"] == pytest.approx(fmean(gaps))
    # The same requests, and an engine that is up to 15% off its row: waits are of one size, and its runs show how far it is off.
    assert 0.0 < found["sim_wait_p50_err"] < 1.0
    assert math.isfinite(found["sim_wait_p99_err"])
    for said, ran_ms in zip((first, second), simulated["decode_a_ms_of_real_runs"], strict=True):
        assert ran_ms != said
        assert ran_ms == pytest.approx(said, rel=0.5)
