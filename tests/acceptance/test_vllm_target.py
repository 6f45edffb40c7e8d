"""`make test-vllm` where vLLM cannot be had: it says loudly what it skips, and fails where it may not skip."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("QLM_", "MAKE", "MFLAGS", "PYTEST_"))}
    return subprocess.run(
        command, cwd=ROOT, env={**inherited, **environment}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def make_test_vllm(venv: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """With an interpreter that makes no virtual environment."""
    return run("make", "test-vllm", "PYTHON=false", f"VLLM_VENV={venv}", **environment)


def test_a_failed_installation_is_skipped_loudly(tmp_path: Path) -> None:
    done = make_test_vllm(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "SKIPPED: all tests on real vLLM" in done.stdout


def test_a_required_vllm_is_not_skipped(tmp_path: Path) -> None:
    done = make_test_vllm(tmp_path, QLM_TEST_VLLM="1")
    assert done.returncode != 0
    assert "SKIPPED" not in done.stdout


def test_an_installed_vllm_that_does_not_work_is_a_failure(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 0\n")  # pip shows the package
    python.chmod(0o755)
    done = make_test_vllm(tmp_path)
    assert done.returncode != 0
    assert "SKIPPED" not in done.stdout


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_the_tests_themselves_say_that_they_are_skipped() -> None:
    pytest_of_vllm = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/vllm")
    done = run(*pytest_of_vllm)
    assert "SKIPPED: tests/vllm, since vLLM is not installed" in done.stdout
    required = run(*pytest_of_vllm, QLM_TEST_VLLM="1")
    assert required.returncode == 1
    assert "QLM_TEST_VLLM=1, and vLLM is not installed" in required.stdout + required.stderr
