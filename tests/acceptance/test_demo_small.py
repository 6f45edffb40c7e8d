"""The demo itself at a small size: real processes, real kills, and the client's account of every token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qlm_load.picture.recording import load as load_recording

REQUESTS = 200
HELD_MIN = 4
TIMEOUT_S = 280


def run_demo(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qlm_load", "demo", "--out", str(out), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("QLM_", "OTEL_"))}
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env={**environment, "COLUMNS": "160"}, check=False)


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_demo_loses_nothing_while_an_agent_the_planner_and_a_gateway_are_killed(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--requests", str(REQUESTS), "--seed", "3", "--time-scale", "4", "--set", f"load.held_min={HELD_MIN}")
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["completed"] == summary["sent"] == summary["accepted"] == summary["results_read_again"] == REQUESTS
    assert (summary["failed"], summary["lost"], summary["doubled"], summary["wrong"], summary["refused"]) == (0, 0, 0, 0, 0)
    assert summary["swaps"] > 0
    assert summary["evictions"] >= 0
    assert summary["recovered"] > 0
    assert set(summary["attainment"]) == {"interactive", "batch-1", "batch-2"}
    assert all(0.0 <= share <= 1.0 for share in summary["attainment"].values())
    assert summary["attainment"]["batch-2"] == 1.0
    assert 0 < summary["wait_p50_s"] <= summary["wait_p99_s"]
    assert summary["requests_per_s"] > 0
    kills = {kill["role"]: kill for kill in summary["kills"]}
    assert set(kills) == {"agent", "planner", "gateway"}
    for kill in kills.values():
        assert kill["held"] >= HELD_MIN
        assert 1 / 3 <= kill["ended_share"] <= 2 / 3
        assert kill["new_pid"] not in (None, kill["pid"])
        assert kill["seed"] == 3
        assert f"SIGKILL {kill['process']} (pid {kill['pid']})" in done.stdout
    # The same trace in virtual time, beside the live run; every request ends there too.
    live, simulated, fcfs = summary["compared"]
    assert [(run["policy"], run["simulated"]) for run in summary["compared"]] == [("slo", False), ("slo", True), ("fcfs", True)]
    assert [run["ended"] for run in summary["compared"]] == [REQUESTS] * 3
    assert live["attainment"] == pytest.approx(summary["attainment"], abs=1e-4)
    assert sum(simulated["attainment"].values()) > sum(fcfs["attainment"].values())
    for heading in ("QLM live", "QLM simulated", "FCFS simulated", "simulated: the same machines in virtual time"):
        assert heading in done.stdout
    # The picture: of both instances, with all the kills.
    recording = load_recording(tmp_path / "recording.json")
    assert recording.instances == ("a100-0", "h100-0")
    assert len(recording.ends) == REQUESTS
    assert {kill.process for kill in recording.kills} == {kill["process"] for kill in kills.values()}
    assert any(not seen.up for frame in recording.frames for seen in frame.instances.values())
    assert max(sum(part.waiting for part in seen.queue) for frame in recording.frames for seen in frame.instances.values()) > 0
    assert (tmp_path / "queues.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "queues.html").read_text()
    for name in ("queues.png", "queues.html"):
        assert str(tmp_path / name) in done.stdout.replace("\n", "")
    logs = tmp_path / "state" / "logs"
    assert {path.stem for path in logs.glob("*.log")} >= {"gateway-0", "gateway-1", "planner-0", "estimator-0", "a100-0", "h100-0"}
    # It cleaned up: no process of the run is left.
    for kill in kills.values():
        with pytest.raises(ProcessLookupError):
            os.kill(kill["new_pid"], 0)


def test_a_wrong_trace_or_setting_is_refused_before_anything_starts(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,1,1\nnan,1,1\n")
    out = tmp_path / "out"
    refused = run_demo(out, "--trace", str(trace))
    assert refused.returncode == 2
    assert "trace.csv, line 3: arrival_s must be finite" in refused.stderr
    refused = run_demo(out, "--rate", "-1")
    assert refused.returncode == 2
    assert "load.rate_per_s" in refused.stderr
    assert not out.exists()
