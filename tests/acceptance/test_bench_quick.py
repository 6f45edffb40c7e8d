"""The bench at sizes that mean nothing: real processes, and every figure of the parts that run is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.queue.load_loops import TRACED_EVERY

TIMEOUT_S = 240


def run_bench(out: Path, *arguments: str, bench: str = "queue") -> tuple[dict[str, Any], str]:
    """The JSON object of its last line, and what it said."""
    command = [sys.executable, "-m", "benchmarks", bench, "--json", "--quick", "--seed", "2", "--out", str(out), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("QLM_", "OTEL_"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    document = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(document, dict)
    return document, said


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_the_path_of_a_request_and_the_queue_by_itself_are_measured(tmp_path: Path) -> None:
    found, said = run_bench(tmp_path, "--only", "added", "--only", "pulls", "--only", "bytes")
    context = found["context"]
    assert context["failures"] == {}, said
    for key in ("added_p50_ms", "added_p99_ms", "bare_p50_ms", "bare_p99_ms", "added_p50_ratio", "added_p99_ratio"):
        assert set(found[key]) == {"at_200", "at_400"}
        assert all(value > 0 for value in found[key].values())
    # Every request that was due ended, and the spans of all that are traced arrived, each with the engine's part in it.
    added = context["added_200"]
    assert added["with_spans"] > 0
    assert added["with_spans"] == pytest.approx(added["requests"] / TRACED_EVERY, abs=1.0)
    assert 0 < added["engine_ms"]["p50"] < added["last_token_ms"]["p50"]
    assert context["spans"]["qlm.gateway.accept"] >= added["with_spans"]
    assert context["spans_counted"] == sum(context["spans"].values())
    assert found["pull_100_p99_ms"] > 0
    assert all(value > 0 for value in found["redis_bytes_per_request"].values())
    assert context["bytes"]["ended"] == 0.9 * context["bytes"]["queued"]
    # Figures that were not requested were not measured.
    assert found["lost"] is None
    assert found["accepts_per_s"] is None


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_a_gateway_over_http_is_measured(tmp_path: Path) -> None:
    found, said = run_bench(tmp_path, "--only", "added", bench="gateway")
    context = found["context"]
    assert context["failures"] == {}, said
    assert found["added_p50_ms"] > 0
    added = context["added"]
    assert added["ended"] == added["requests"]
    assert 0 < added["engine_ms"]["p50"] < added["last_token_ms"]["p50"]


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_streams_of_the_official_client_survive_kills_of_every_process(tmp_path: Path) -> None:
    found, said = run_bench(tmp_path, "--only", "kills", bench="gateway")
    kills = found["context"]["kills"]
    assert found["context"]["failures"] == {}, said
    assert found["streams_lost"] == 0, said
    assert kills["kills_by_process"].keys() == {*(f"{name}-{number}" for name in ("gateway", "planner", "h100") for number in (0, 1))} | {
        "estimator-0",
        "server",
    }
    assert kills["streams"] == 80
    assert kills["streams_broken"] > 0
