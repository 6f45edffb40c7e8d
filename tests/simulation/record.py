"""Writes digests.json: `python -m tests.simulation.record`."""

from __future__ import annotations

import json
from pathlib import Path

from qlm_sim.seed_run import run_seed

RECORDED_SEEDS = (1, 2, 7)

if __name__ == "__main__":
    digests = {str(seed): run_seed(seed, hashed=True).digest for seed in RECORDED_SEEDS}
    (Path(__file__).parent / "digests.json").write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
