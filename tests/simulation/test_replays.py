"""A run is a function of its seed: in one process again, in every other process, under every hash seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from qlm_sim.storms.seed_run import run_seed

SEEDS = (1, 2)
SCRIPT = """
import json, sys
from qlm_sim.storms.seed_run import run_seed
print(json.dumps({seed: run_seed(int(seed), hashed=True).digest for seed in sys.argv[1:]}))
"""


def digests_of(hash_seed: str) -> dict[str, str]:
    """Digests of whole transcripts, made in a process of its own."""
    command = [sys.executable, "-c", SCRIPT, *map(str, SEEDS)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=100)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_a_seed_gives_the_same_transcript_again_whether_or_not_it_is_recorded() -> None:
    first, second = (run_seed(2, lines_max=1_000_000, hashed=hashed) for hashed in (True, False))
    assert first.lines == second.lines
    silent = run_seed(2)
    assert (first.events, first.states, first.effects, first.meetings) == (silent.events, silent.states, silent.effects, silent.meetings)


def test_processes_agree_whatever_their_hash_seed() -> None:
    found = digests_of("0")
    assert len(set(found.values())) == len(SEEDS)
    assert digests_of("1234") == found


def test_a_replay_prints_what_happened() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qlm_sim", "--seed", "2", "--transcript"], capture_output=True, text=True, check=True, timeout=100
    )
    lines = done.stdout.splitlines()
    assert "seed 2: every invariant held" in lines[-1]
    assert any("agent-0" in line and "agent start -> register" in line for line in lines)
    assert any("server" in line and "accept acceptance" in line for line in lines)
    assert any("*** is over" in line for line in lines)
