"""The checks of GPUs on a machine without one: their verdicts, their skips, and the report of a check that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.gpu import checks, host
from benchmarks.gpu.against_profiles import compare_with_row
from benchmarks.gpu.checks import Check, CheckOutcome, memory_given_back, run
from benchmarks.gpu.host import Host, gpu_of
from benchmarks.gpu.summary import table, transfer_share

from qlm_cli.serve.gpus import profile_name
from running_cluster import gone, wait_until

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.sh"
NOTHING = Host(gpus=(), memory_mib=(), driver="", torch="", cuda="", torch_gpus=0, vllm="", problem="none")
ONE_GPU = Host(
    gpus=("NVIDIA H100 80GB HBM3",), memory_mib=(81559,), driver="570", torch="2.13", cuda="13", torch_gpus=1, vllm="0.32.0", problem=""
)


def smi(folder: Path, text: str) -> None:
    """An nvidia-smi that says `text`, first on the path."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    program.chmod(0o755)


def test_the_script_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    ran = subprocess.run([SCRIPT, "--out", tmp_path / "out"], capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert ran.returncode == 3, ran.stderr
    assert ran.stderr.startswith("no GPU: there is no nvidia-smi")
    assert not (tmp_path / "out").exists()
    ran = subprocess.run([SCRIPT, "--what"], capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert ran.returncode == 2


def test_gpus_are_read_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(host, "_torch", lambda: ("2.13.0+cpu", "", 0, ""))
    smi(tmp_path, "NVIDIA H100 80GB HBM3, 81559 MiB, 570.1\nNVIDIA H100 80GB HBM3, 81559 MiB, 570.1")
    found = host.read_host()
    assert (found.gpus, found.memory_mib, found.driver) == (("NVIDIA H100 80GB HBM3",) * 2, (81559, 81559), "570.1")
    assert found.problem == "PyTorch 2.13.0+cpu sees no GPU: it was built for CPUs"
    smi(tmp_path, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    assert host.read_host().problem.startswith("nvidia-smi reports no GPU: NVIDIA-SMI has failed")
    smi(tmp_path, "NVIDIA GB10, [N/A], 580.95")  # shares the memory of its host
    assert (host.read_host().gpus, host.read_host().memory_mib) == (("NVIDIA GB10",), (0,))


@pytest.mark.parametrize("error", ["OSError", "ImportError"])
def test_the_script_says_why_pytorch_cannot_be_loaded(tmp_path: Path, error: str) -> None:
    smi(tmp_path, "NVIDIA H100 80GB HBM3, 81559 MiB, 570.1")
    (tmp_path / "torch.py").write_text(f"raise {error}('libcudart.so.13: cannot open shared object file')")
    python = tmp_path / "python"  # the script sets PYTHONPATH anew
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    ran = subprocess.run([SCRIPT, "--out", tmp_path / "out"], capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert ran.returncode == 3, ran.stderr
    assert ran.stderr.startswith(f"no GPU: PyTorch cannot be loaded: {error}: libcudart.so.13")


def test_an_agent_under_test_is_named_after_what_it_computes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(host, "_torch", lambda: ("2.13.0", "13", 1, ""))
    smi(tmp_path, "NVIDIA H100 80GB HBM3, 81559 MiB, 570.1")
    assert [gpu_of(device) for device in ("cpu", "cuda")] == ["CPU", "H100-80GB"]


@pytest.mark.parametrize(
    ("driver", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-80GB-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("Some card", "Some card"),
    ],
)
def test_names_of_the_driver_and_of_the_profiles(driver: str, profile: str) -> None:
    assert profile_name(driver) == profile


def test_what_cannot_run_is_skipped_with_its_reason(tmp_path: Path) -> None:
    outcomes = {check.name: run(check, NOTHING, tmp_path) for check in checks.checks("cuda", None, small=False)}
    assert {outcome.status for outcome in outcomes.values()} == {"skipped"}
    assert outcomes["torch_timing"].why == "PyTorch is not installed"
    parallel = next(check for check in checks.checks("cuda", None, small=False) if check.name == "tensor_parallel")
    assert run(parallel, ONE_GPU, tmp_path).why == "needs two GPUs, there are 1"


def check_of(code: str, limit_s: float = 30.0) -> Check:
    return Check(name="c", command=("-c", code), needs=lambda found: "", limit_s=limit_s, judge=lambda last: "bad" if last == [2] else "")


@pytest.mark.parametrize(
    ("code", "status", "why"),
    [
        ("print('noise'); print([1])", "passed", ""),
        ("print([2])", "failed", "bad"),
        ("import sys; sys.exit('broke')", "failed", "exit code 1: broke"),
        ("print('words')", "failed", "its last line is no JSON object: words"),
        ("pass", "failed", "its last line is no JSON object: nothing"),
    ],
)
def test_how_a_check_is_judged(tmp_path: Path, code: str, status: str, why: str) -> None:
    outcome = run(check_of(code), ONE_GPU, tmp_path)
    assert (outcome.status, outcome.why) == (status, why)
    assert (tmp_path / "c.json").exists() == (outcome.report is not None)


def test_the_report_of_a_check_that_failed_is_kept(tmp_path: Path) -> None:
    """A bench reports the parts that were measured, and ends with 1 where one was not."""
    outcome = run(check_of("print('{\"ratio\": 0.98}'); raise SystemExit('simulator FAILED')"), ONE_GPU, tmp_path)
    assert (outcome.status, outcome.why, outcome.report) == ("failed", "exit code 1: simulator FAILED", {"ratio": 0.98})
    assert (tmp_path / "c.json").exists()


def test_a_check_that_hangs_is_ended(tmp_path: Path) -> None:
    outcome = run(check_of("import time; time.sleep(60)", 0.5), ONE_GPU, tmp_path)
    assert (outcome.status, outcome.why) == ("failed", "not done after 0.5 s")


def test_what_a_check_leaves_behind_is_ended(tmp_path: Path) -> None:
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    outcome = run(check_of(code), ONE_GPU, tmp_path)
    assert outcome.status == "passed", outcome.why
    wait_until(lambda: gone(outcome.report), 10.0, "the process that it left ends")


def test_memory_that_shrinks_from_swap_to_swap_is_a_failure() -> None:
    def stage_events(stage: str, *free: int) -> list[dict[str, object]]:
        return [{"stage": stage, "settled": number > 1, "free_bytes": each} for number, each in enumerate(free)]

    assert memory_given_back({"events": stage_events("one", 80, 70, 40, 40, 40) + stage_events("two", 80, 70, 60, 60)}) == ""
    lost = {"events": stage_events("one", 80, 70, 40, 40, 40) + stage_events("two", 80, 70, 60, 40)}
    assert memory_given_back(lost) == "20 bytes of device memory were lost from model swap to model swap (two)"


def test_timed_figures_beside_the_row_of_the_gpu() -> None:
    figures = {
        "decode_a_ms": 6.0,
        "decode_b_ms_per_seq": 0.04,
        "decode_c_ms_per_context_token": 0.00005,
        "prefill_base_ms": 5.0,
        "prefill_ms_per_token": 0.02,
        "prefill_ms_per_token_squared": 1e-6,
        "kv_swap_us_per_token": 2.5,
        "load_cpu_to_gpu_s": 100.0,
        "kv_bytes_per_token": 131072,
    }
    against = compare_with_row({"device": "NVIDIA H100 80GB HBM3", "model": "Mistral-7B", "figures": figures})
    assert against["origin"] == "shipped"
    assert against["table"]["KV bytes of a token"]["ratio"] == 1.0
    assert "weights from host memory, s" in against["off"]
    assert compare_with_row({"device": "NVIDIA H200", "model": "Mistral-7B", "figures": figures})["origin"] == "facts"
    assert "why" in compare_with_row({"device": "CPU", "model": "tiny", "figures": figures})
    text = table(ONE_GPU, [CheckOutcome(name="torch_timing", status="passed", why="", took_s=3.0)], against)
    assert "passed   torch_timing" in text
    assert "weights from host memory, s" in text


def test_a_swap_beside_what_the_link_can_do() -> None:
    def outcome(name: str, report: object) -> CheckOutcome:
        return CheckOutcome(name=name, status="passed", why="", took_s=1.0, report=report)

    timed = outcome("torch_timing", {"transfers": {"host_to_device_gb_s": 50.0}})
    bench = outcome("bench_agent", {"swap_ms": {"active_from_warm": 500.0}, "context": {"parts": {"model_swap": {"weights_mb": 15_000}}}})
    assert transfer_share([timed, bench]) == {"weights_gb": 15.0, "swap_gb_s": 30.0, "limit_gb_s": 50.0, "share": 0.6}
    assert "15 GB from host memory: 30 GB/s, 60% of a long copy" in table(ONE_GPU, [timed, bench], {})
    unmeasured = outcome("bench_agent", {"swap_ms": None, "context": {"parts": {}}})
    assert transfer_share([timed, unmeasured]) == transfer_share([bench]) == {}
