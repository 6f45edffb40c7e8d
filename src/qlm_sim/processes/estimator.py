"""An estimator process in virtual time: the live shell, whose loop awaits only the queue and the given sleep."""

from __future__ import annotations

from qlm_estimator.config import EstimatorSettings
from qlm_estimator.machine import EstimatorMachine
from qlm_estimator.metrics import EstimatorMetrics
from qlm_estimator.shell import EstimatorShell
from qlm_process.queue.clock import ServerClock, TimeSource
from qlm_queue.values import ESTIMATOR_ROLE
from qlm_sim.world.leases import election
from qlm_sim.world.process import Process
from qlm_sim.world.site import Site


class ProcessClock(ServerClock):
    """The process's own idea of the server's clock."""

    def __init__(self, process: Process, queue: TimeSource) -> None:
        super().__init__(queue)
        self._process = process

    def now_s(self) -> float:
        return self._process.now_s()


class QuietShell(EstimatorShell):
    """A shell whose metrics are unread."""

    def _report(self, machine: EstimatorMachine) -> None:
        """Skips most of its work."""


class SimEstimator:
    """One process over all its lives."""

    def __init__(self, site: Site, name: str) -> None:
        self.process = site.process(name)
        self._site = site

    def start(self) -> None:
        site, process = self._site, self.process
        process.begin()
        queue = site.link(process)
        shell = QuietShell(
            queue=queue,
            clock=ProcessClock(process, queue),
            settings=EstimatorSettings(publish_every_s=site.description.profiles_every_s),
            catalogue=site.catalogue,
            shipped=site.shipped,
            metrics=EstimatorMetrics(),
            sleep=process.sleep,
        )
        process.spawn(shell.run(election(site, process, queue, ESTIMATOR_ROLE)))
