"""A write wakes the reads of the streams that it wrote, and no run can tell that from a server that tries all of them."""

from __future__ import annotations

import pytest

from qlm_sim.storms.seed_run import run_seed
from qlm_sim.world.server import SimServer

SEED = 17


def try_all(server: SimServer) -> None:
    """After every command, written or not."""
    server.queue.state.written.clear()
    server._blocked = [blocked for blocked in server._blocked if blocked[0].heard and not server._read(blocked[0], last=False)]


def test_no_reader_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = run_seed(SEED, hashed=True).digest
    monkeypatch.setattr(SimServer, "_wake_readers", try_all)
    assert run_seed(SEED, hashed=True).digest == keyed
