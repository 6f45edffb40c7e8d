"""Instruments that measure QLM, not part of the wheel: they may import everything, and nothing imports them.

`python -m benchmarks queue|gateway|agent|estimator|planner` from the root of the repository; `benchmarks/gpu_check.sh` on a GPU host.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Where processes of a benchmark start, so that they find this package."""
