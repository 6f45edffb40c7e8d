"""A run is a function of its seed: in every process, under every hash seed and Python, where numbers are rounded alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qlm_sim.storms.seed_run import run_seed

from .record import RECORDED_SEEDS, digests_of

DIGESTS: dict[str, str] = json.loads((Path(__file__).parent / "digests.json").read_text(encoding="utf-8"))
"""Digests of whole transcripts. `python -m tests.simulation.record` writes them anew where the behaviour of a service changed."""


@pytest.mark.parametrize("seed", [3, 8])
def test_a_seed_gives_the_same_transcript_again(seed: int) -> None:
    first, second = (run_seed(seed, lines_max=1_000_000, hashed=True) for _ in range(2))
    assert first.lines == second.lines
    assert first == second


def test_what_is_recorded_changes_nothing() -> None:
    told, silent = run_seed(5, lines_max=1_000, hashed=True), run_seed(5)
    assert (told.events, told.states, told.effects, told.meetings) == (silent.events, silent.states, silent.effects, silent.meetings)


@pytest.mark.parametrize("hash_seed", ["0", "1234"])
def test_other_processes_give_the_recorded_digests(hash_seed: str) -> None:
    """They were met under other Pythons and on other processors too. Where a service was changed on purpose, record them anew."""
    assert digests_of(RECORDED_SEEDS, hash_seed) == DIGESTS


def test_a_replay_prints_what_happened() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qlm_sim", "--seed", "4", "--transcript"], capture_output=True, text=True, check=True, timeout=100
    )
    lines = done.stdout.splitlines()
    assert "seed 4: every invariant held" in lines[-1]
    assert any("agent-0" in line and "agent start -> register" in line for line in lines)
    assert any("server" in line and "accept acceptance" in line for line in lines)
    assert any("*** is over" in line for line in lines)
