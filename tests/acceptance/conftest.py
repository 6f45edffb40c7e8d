"""One cluster for all tests that need no more than a healthy one. They name the group `cluster`, so that one worker runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qlm_process.cluster.state import ClusterState
from running_cluster import RunningCluster

SETTINGS = {"agent.simulated.time_scale": "20", "estimator.publish_every_s": "0.2"}


class SharedCluster:
    """A cluster that starts on first use, and anew where the last test left it broken."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._running: RunningCluster | None = None

    def healthy(self) -> RunningCluster:
        if self._running is None:
            self._running = RunningCluster(self._folders.mktemp("cluster") / "state", SETTINGS)
            self._running.start(until_ready=False)
        try:
            self._running.wait_for(_all_serve)
        except AssertionError:
            self.stop()
            raise
        return self._running

    def stop(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running = None


def _all_serve(state: ClusterState) -> bool:
    return state.ready and all(process.serving and process.pid for process in state.processes)


_SHARED = pytest.StashKey[SharedCluster]()


@pytest.fixture(scope="session")
def shared_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    shared = request.session.stash[_SHARED] = SharedCluster(tmp_path_factory)
    yield shared
    shared.stop()


@pytest.fixture
def cluster(shared_cluster: SharedCluster) -> RunningCluster:
    """A running `qlm up` of the shipped configuration, twenty times as fast. A test may kill its processes, which restart, and leaves
    nothing paused or damaged."""
    return shared_cluster.healthy()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stops the cluster after the last test that uses it: an idle one takes a twentieth of a core."""
    shared = item.session.stash.get(_SHARED, None)
    if shared is not None and "shared_cluster" not in getattr(nextitem, "fixturenames", ()):
        shared.stop()
