"""A write wakes the reads of the streams that it wrote, and no run can tell that from a server that tries all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.simulation.test_comparison import CLUSTER, workload

from qlm_sim.comparison import PlannedKill, simulate
from qlm_sim.storms.seed_run import run_seed
from qlm_sim.world.server import SimServer


def try_all(server: SimServer) -> None:
    """After every command, written or not."""
    server.queue.state.written.clear()
    server._blocked = [blocked for blocked in server._blocked if blocked[0].heard and not server._read(blocked[0], last=False)]


KILLS = (PlannedKill(process="planner", at_s=5.0, down_s=2.0), PlannedKill(process="a100-1", at_s=8.0, down_s=3.0))


@pytest.mark.parametrize(
    "run",
    [
        lambda: simulate(CLUSTER, workload(40), kills=KILLS),
        lambda: run_seed(17, hashed=True).digest,
    ],
    ids=["comparison", "storm"],
)
def test_no_reader_is_missed(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = run()
    monkeypatch.setattr(SimServer, "_wake_readers", try_all)
    assert run() == keyed
