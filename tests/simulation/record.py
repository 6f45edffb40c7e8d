"""Digests of whole transcripts, made in a process of its own; `python -m tests.simulation.record` writes digests.json."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

RECORDED_SEEDS = (1, 2, 7)
ROUNDS_ALIKE = {
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4",
}
"""OpenBLAS and numpy choose their kernels by the processor, which round differently in the last bit, and that may decide between two equal
places of a group. Machines with and without AVX-512 take the same ones so."""
SCRIPT = """
import json, sys
from qlm_sim.storms.seed_run import run_seed
print(json.dumps({seed: run_seed(int(seed), hashed=True).digest for seed in sys.argv[1:]}))
"""


def digests_of(seeds: tuple[int, ...], hash_seed: str = "0") -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, seeds)],
        env={**os.environ, **ROUNDS_ALIKE, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    (Path(__file__).parent / "digests.json").write_text(json.dumps(digests_of(RECORDED_SEEDS), indent=1) + "\n", encoding="utf-8")
