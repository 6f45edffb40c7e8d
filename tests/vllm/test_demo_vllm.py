"""The demo on real models at a small size: two instances of vLLM, chats, kills, and the client's account of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REQUESTS = 160
TIMEOUT_S = 900.0


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_real_models_answer_chats_while_processes_are_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "qlm_load", "demo-vllm", "--made-up-only", "--seed", "4", "--requests", str(REQUESTS)]
    command += ["--out", str(tmp_path / "out"), "--models", str(tmp_path / "models"), "--set", "load.drain_timeout_s=300"]
    command += ["--set", "load.rate_per_s=80", "--set", "load.held_min=1"]  # models of noise are quick, and have to be killed at work
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("QLM_", "OTEL_"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env={**environment, "COLUMNS": "160"}, check=False)
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["completed"] == summary["sent"] == summary["results_read_again"] == REQUESTS
    assert (summary["failed"], summary["lost"], summary["doubled"], summary["wrong"], summary["refused"]) == (0, 0, 0, 0, 0)
    assert summary["swaps"] > 0
    assert summary["recovered"] > 0
    assert {kill["role"] for kill in summary["kills"]} == {"agent", "planner", "gateway"}
    assert all(kill["new_pid"] not in (None, kill["pid"]) for kill in summary["kills"])
    assert set(summary["attainment"]) == {"interactive", "batch"}
    assert [(run["policy"], run["simulated"], run["ended"]) for run in summary["compared"]] == [
        ("slo", False, REQUESTS),
        ("fcfs", False, REQUESTS),
    ]
    for heading in ("QLM live", "FCFS live"):
        assert heading in done.stdout
    answers = json.loads((tmp_path / "out" / "answers.json").read_text())
    assert len(answers) == REQUESTS
    assert {answer["model"] for answer in answers} == {"nonsense-a", "nonsense-b"}
    assert all(answer["prompt"] and answer["answer"] for answer in answers)
    for answer in answers[:1]:
        assert f"{answer['class']}> {answer['prompt']}" in done.stdout
    for kill in summary["kills"]:
        with pytest.raises(ProcessLookupError):
            os.kill(kill["new_pid"], 0)
