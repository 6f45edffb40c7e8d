"""The list of checks: command, needs and judgement of each. Each is a process of its own with a log and a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.gpu.host import Host

LOG_END_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`command`: after the interpreter. `needs`: the reason why it cannot run on this host, or "". `reports`: its last line on stdout is a
    JSON object. `judge`: the reason why that report is a failure, "" for none."""

    name: str
    command: tuple[str, ...]
    needs: Callable[[Host], str]
    limit_s: float
    reports: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    judge: Callable[[Any], str] = lambda report: ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOutcome:
    """`status`: passed, failed or skipped; `why`: the reason of the latter two."""

    name: str
    status: str
    why: str
    took_s: float
    report: Any = None


def checks(device: str, model: Path | None, *, small: bool) -> Sequence[Check]:
    """All checks; `model`: a folder for those that serve one, None for a tiny one of noise. `small`: a dry run."""
    quick = ("--quick",) if small else ()
    served = () if model is None else ("--model", str(model))
    judge = memory_given_back if device == "cuda" else lambda report: ""
    timing = ("--shape", "tiny", "--dtype", "float32", "--small") if small else ()
    tests = ("-m", "pytest", "-q", "-o", "timeout=600", "-p", "no:cacheprovider")
    return (
        Check(
            name="torch_timing",
            command=("-m", "benchmarks.gpu.torch_timing", "--device", device, *timing),
            needs=_torch,
            limit_s=900.0,
        ),
        Check(
            name="conformance",
            command=(*tests, "tests/conformance/engine"),
            needs=_vllm_and_pytest,
            limit_s=3_600.0,
            reports=False,
            environment={"QLM_TEST_VLLM": "1", "QLM_TEST_ENGINES": "vllm", "QLM_TEST_VLLM_DEVICE": device},
        ),
        Check(
            name="sleep_levels",
            command=("-m", "benchmarks.gpu.model_turns", "--device", device, *served),
            needs=_vllm,
            limit_s=1_200.0,
            judge=judge,
        ),
        Check(
            name="sleeping_servers",
            command=("-m", "benchmarks.gpu.model_turns", "--engine", "openai", "--device", device, *served),
            needs=_vllm,
            limit_s=1_800.0,
            judge=judge,
        ),
        Check(
            name="bench_agent",
            command=("-m", "benchmarks", "agent", "--json", "--device", device, *quick, *served),
            needs=_vllm,
            limit_s=3_600.0,
        ),
        Check(
            name="tensor_parallel",
            command=("-m", "benchmarks.gpu.model_turns", "--device", device, "--n-gpu", "2", *served),
            needs=_two_gpus,
            limit_s=1_200.0,
            judge=judge,
        ),
    )


def run(check: Check, host: Host, out: Path, python: str = sys.executable) -> CheckOutcome:
    """Runs it, unless it cannot, and keeps its log and report in `out`."""
    began_s = time.monotonic()
    why = check.needs(host)
    if why:
        return CheckOutcome(name=check.name, status="skipped", why=why, took_s=0.0)
    paths = [str(ROOT / each) for each in ("src", "load", "services/gateway", "services/planner", "services/estimator", "services/agent")]
    environment = {**os.environ, **check.environment, "PYTHONPATH": os.pathsep.join([*paths, str(ROOT / "tests/support")])}
    log = out / f"{check.name}.log"
    answer = out / f"{check.name}.out"
    with log.open("wb") as errors, answer.open("wb") as said:
        process = subprocess.Popen(
            [python, *check.command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=errors,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(check.limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:  # its remaining processes too, which would hold memory of the GPU
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    took_s = time.monotonic() - began_s
    report, why = _report(check, answer)
    if code is None:
        why = f"not done after {check.limit_s:g} s"
    elif code:
        why = f"exit code {code}: {_end(log) or _end(answer)}"
    elif not why:
        why = check.judge(report)
    if code != 0 and not isinstance(report, dict):
        report = None  # a bench with a failed part reports the others in an object; this was something else
    if report is not None:
        (out / f"{check.name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return CheckOutcome(name=check.name, status="failed" if why else "passed", why=why, took_s=took_s, report=report)


def memory_given_back(report: Mapping[str, Any]) -> str:
    """Two models of one size take turns: free memory with one of them active may not shrink from turn to turn, after both first turns."""
    stages: dict[str, list[int]] = {}
    for event in report["events"]:
        if event["settled"]:
            stages.setdefault(event["stage"], []).append(event["free_bytes"])
    for stage, free in stages.items():
        lost = max(free) - min(free)
        if lost > 0.1 * max(free):
            return f"{lost:,} bytes of device memory were lost from model swap to model swap ({stage})"
    return ""


def _report(check: Check, answer: Path) -> tuple[Any, str]:
    if not check.reports:
        return None, ""
    lines = answer.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    try:
        return json.loads(lines[-1]), ""
    except (IndexError, ValueError):
        return None, f"its last line is no JSON object: {lines[-1][:LOG_END_CHARACTERS] if lines else 'nothing'}"


def _end(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][-LOG_END_CHARACTERS:] if lines else ""


# Needs of a check -----------------------------------------------------------------------------------------------------


def _torch(host: Host) -> str:
    return "" if host.torch else "PyTorch is not installed"


def _vllm(host: Host) -> str:
    return _torch(host) or ("" if host.vllm else "vLLM is not installed (benchmarks/gpu_check.sh --install)")


def _vllm_and_pytest(host: Host) -> str:
    from importlib.util import find_spec

    missing = [name for name in ("pytest", "pytest_asyncio", "pytest_timeout", "hypothesis") if find_spec(name) is None]
    return _vllm(host) or (f"not installed: {', '.join(missing)}" if missing else "")


def _two_gpus(host: Host) -> str:
    return _vllm(host) or ("" if host.torch_gpus > 1 else f"needs two GPUs, there are {host.torch_gpus}")
