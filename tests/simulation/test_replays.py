"""A run is a function of its seed: recorded or not, in every process, under every hash seed."""

from __future__ import annotations

import os
import subprocess
import sys

from qlm_sim.storms.seed_run import run_seed

SEED = 2


def test_a_seed_gives_the_same_transcript_in_every_process() -> None:
    first = run_seed(SEED, hashed=True)
    silent = run_seed(SEED)
    assert (first.events, first.states, first.effects, first.meetings) == (silent.events, silent.states, silent.effects, silent.meetings)
    command = [sys.executable, "-m", "qlm_sim", "--seed", str(SEED), "--transcript"]
    environment = {**os.environ, "PYTHONHASHSEED": "1234"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=280)
    assert f"seed {SEED}: every invariant held" in done.stdout.splitlines()[-1]
    assert done.stdout.splitlines()[-1].endswith(f"digest {first.digest}")
    for words in ("agent start -> register", "accept acceptance", "*** is over"):
        assert words in done.stdout
