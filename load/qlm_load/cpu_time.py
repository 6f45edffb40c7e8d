"""CPU time that processes had, and that they waited for a core (Linux: `/proc/PID/task/TID/schedstat`, in nanoseconds)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class CpuTime:
    """Sums over processes and their lives. A process that ends between two samples keeps its last one; without /proc all is 0."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._of: dict[int, tuple[float, float]] = {}

    def sample(self, pids: Iterable[int]) -> None:
        """Reads each process's CPU and waiting time so far."""
        for pid in pids:
            found = [self._read(task) for task in self._proc.glob(f"{pid}/task/*/schedstat")]
            if found:
                had_s, waited_s = self._of.get(pid, (0.0, 0.0))
                self._of[pid] = (max(had_s, sum(had for had, _ in found)), max(waited_s, sum(waited for _, waited in found)))

    @property
    def had_s(self) -> float:
        return sum(had for had, _ in self._of.values())

    @property
    def wanted_s(self) -> float:
        """CPU time and waiting time together."""
        return self.had_s + sum(waited for _, waited in self._of.values())

    def _read(self, task: Path) -> tuple[float, float]:
        try:
            had, waited, _ = task.read_text(encoding="ascii").split()
        except (OSError, ValueError):
            return 0.0, 0.0  # it ended meanwhile
        return 1e-9 * int(had), 1e-9 * int(waited)
