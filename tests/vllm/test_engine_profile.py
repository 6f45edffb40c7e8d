"""`qlm profile` on the vllm engine, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

COMMAND_TIMEOUT_S = 400.0


@pytest.mark.timeout(COMMAND_TIMEOUT_S + 20)
def test_an_engine_is_profiled(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    model = {"name": "tiny", "profile": "tiny", "context_tokens_max": 2048, "vocabulary_size": 2048, "weights": str(tiny_models[0])}
    facts = {"parameters_billion": 0.0013, "layers": 4, "hidden_size": 128, "kv_heads": 2, "head_size": 32}
    agent = {"name": "vllm-0", "gpu": "CPU", "engine": "vllm", "batch_max": 8, "vllm": {"kv_cache_gb": 0.1, "host_kv_gb": 0.05}}
    config = tmp_path / "qlm.yaml"
    config.write_text(yaml.safe_dump({"models": [{**model, "facts": facts}], "agent": agent}))
    done = subprocess.run(
        [sys.executable, "-m", "qlm_cli", "profile", "--config", str(config), "--limit", "20", "--json"],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb"},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (measured,) = json.loads(done.stdout)["models"]
    row = measured["row"]
    assert (row["gpu"], row["model"], row["origin"]) == ("CPU", "tiny", "measured")
    assert row["decode_a_ms"] > 0.0
    assert row["load_disk_to_cpu_s"] > row["load_cpu_to_gpu_s"] >= 0.0
    assert 45_000 < row["kv_capacity_tokens"] < 50_000
    assert row["kv_swap_us_per_token"] > 0.0
    assert row["recompute_us_per_token"] > 0.0, "no prefix cache has the KV that is computed again"
    (entry,) = yaml.safe_load((tmp_path / "qlm-profile.yaml").read_text("utf-8"))["profiles"]
    assert entry["decode_a_ms"] == row["decode_a_ms"]
