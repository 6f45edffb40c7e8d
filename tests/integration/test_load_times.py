"""Loads that take longer than the profile says, through real processes: they show in the profiles, and a file carries them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import qlm
from qlm_cli.root import root
from qlm_core.profile import ProfileSnapshot
from qlm_core.shipped_profiles import shipped_snapshot
from qlm_core.simulated_model import LENGTH_TOKEN_BASE
from qlm_process.profile_file import dump_profiles, parse_profiles
from running_cluster import RunningCluster

MODELS = ("mistral-7b", "mistral-7b-code")
SWAPS = 12
OFF = 3.0
"""So many times longer than the imported row says do the engine's loads take."""
PATIENCE_S = 60.0
SETTINGS = {
    "agents": "[{name: gpu, gpu: A100-80GB}]",
    "agent.simulated.time_scale": "4",
    "agent.simulated.bias_max": "0",
    "estimator.publish_every_s": "0.2",
}
A100 = next(row for row in shipped_snapshot().hardware if (row.gpu, row.model) == ("A100-80GB", "Mistral-7B"))
TOO_FAST = replace(
    A100,
    origin="measured",
    load_disk_to_cpu_s=A100.load_disk_to_cpu_s / OFF,
    load_cpu_to_gpu_s=A100.load_cpu_to_gpu_s / OFF,
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path / "state", SETTINGS) as cluster:
        yield cluster


def profiles(cluster: RunningCluster, *words: str, text: str | None = None) -> str:
    """What `qlm profiles` prints."""
    done = CliRunner().invoke(root, ["profiles", "--address", cluster.address, *words], input=text, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def operations(cluster: RunningCluster) -> dict[str, Any]:
    document = json.loads(profiles(cluster, "--json"))
    return next((row["operations"] for row in document["hardware"] if row["instance"] == "gpu"), {})


def test_slow_loads_show_in_the_profiles(cluster: RunningCluster) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    profiles(cluster, "import", "-", text=dump_profiles(ProfileSnapshot(version=0, made_s=0.0, hardware=(TOO_FAST,))))
    with qlm.Client(cluster.address) as client:
        for number in range(SWAPS):
            prompt = [number] * 9 + [LENGTH_TOKEN_BASE + 20]
            client.submit(MODELS[number % 2], prompt, slo_s=600.0, request_id=f"r{number}")
            assert client.result(f"r{number}", wait_s=PATIENCE_S) is not None
    while operations(cluster).get("swap_warm", {}).get("samples", 0) < SWAPS - 2:
        assert time.monotonic() < deadline_s, operations(cluster)
        time.sleep(0.1)
    told = operations(cluster)
    assert told["swap_warm"]["slowdown"] == pytest.approx(OFF, rel=0.4)
    assert told["swap_cold"]["slowdown"] > 1.1, "of one or two loads little is believed"
    assert "load, from host memory" in profiles(cluster)
    (row,) = (row for row in parse_profiles(profiles(cluster, "export")).hardware if row.instance)
    assert row.swap_s(warm=True) == pytest.approx(A100.swap_s(warm=True), rel=0.4)
    assert row.swap_warm.samples >= SWAPS - 2
