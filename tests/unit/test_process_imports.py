"""What the processes do not import at their start: SciPy alone would be a third of it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["qlm_gateway", "qlm_agent", "qlm_estimator"])
def test_starts_without_scipy(package: str) -> None:
    code = f"import sys, {package}.__main__; print(*sorted(name for name in sys.modules if name.split('.')[0] == 'scipy'))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == ""
