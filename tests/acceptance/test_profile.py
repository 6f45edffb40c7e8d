"""`qlm profile` and `qlm profiles` as a user runs them: a real cluster, a real signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from running_cluster import RunningCluster, qlm_command

COMMAND_TIMEOUT_S = 90.0
FAST = ("--set", "agent.simulated.time_scale=50")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files are written there unless a command names another place."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.xdist_group("cluster")
def test_an_engine_is_profiled_and_its_rows_reach_a_running_queue(cluster: RunningCluster, folder: Path) -> None:
    done = qlm_command("profile", "--name", "h100-0", "--model", "mistral-7b", *FAST)
    assert done.exit_code == 0, done.stderr
    for word in ("decode_a_ms", "95% interval", "Theta", "qlm-profile.yaml"):
        assert word in done.stdout
    (entry,) = yaml.safe_load((folder / "qlm-profile.yaml").read_text("utf-8"))["profiles"]
    assert (entry["gpu"], entry["n_gpu"], entry["model"]) == ("H100-80GB", 1, "Mistral-7B")
    assert 7.2 * 0.8 < entry["decode_a_ms"] < 7.2 * 1.2

    where = ("profiles", "--address", cluster.address)
    taken = qlm_command(*where, "import", "qlm-profile.yaml")
    assert (taken.exit_code, taken.stdout.startswith("1 hardware and 0 workload rows are in version")) == (0, True), taken.stderr
    shown = json.loads(qlm_command(*where, "--json").stdout)
    assert [row["gpu"] for row in shown["hardware"] if row["origin"] == "measured"] == ["H100-80GB"]
    exported = qlm_command(*where, "export")
    assert entry["decode_a_ms"] in [row["decode_a_ms"] for row in yaml.safe_load(exported.stdout)["hardware"]]


def test_json_holds_the_row_its_intervals_and_its_errors(folder: Path) -> None:
    done = qlm_command("profile", "--model", "vicuna-13b", "--json", "-o", "rows.yaml", *FAST)
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    (model,) = document["models"]
    low, high = model["intervals"]["decode_a_ms"]
    assert low <= model["row"]["decode_a_ms"] <= high
    assert 0.0 < model["decode_error"] < 0.1
    assert (document["file"], (folder / "rows.yaml").exists()) == ("rows.yaml", True)


def test_an_interrupt_leaves_nothing_behind(folder: Path) -> None:
    command = [sys.executable, "-m", "qlm_cli", "profile", "--model", "mistral-7b"]
    environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        assert "mistral-7b (Mistral-7B) on 1 x A100-80GB" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=COMMAND_TIMEOUT_S)
        assert process.returncode == 1
    assert "nothing was written" in said
    assert "Traceback" not in said
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "agent.gpu=B300"), "no model of models has a profile on 1 x B300"),
        (("--name", "h100-0", "--set", "agent.gpu=B300"), "the GPU 'B300' is not known, but"),
        (("--model", "gpt"), "--model gpt: not a model of this agent; may be mistral-7b"),
        (("--limit", "0"), "--limit"),
        (("--set", "agent.simulated.bias_max=9"), "agent.simulated.bias_max"),
    ],
)
def test_wrong_use_is_named(folder: Path, words: tuple[str, ...], said: str) -> None:
    done = qlm_command("profile", *words)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert list(folder.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named() -> None:
    done = qlm_command("profile", "--model", "mistral-7b", "-o", "nowhere/rows.yaml", *FAST)
    assert done.exit_code == 1
    assert "nowhere/rows.yaml" in done.stderr
