"""CPU time that the demo's processes had and wanted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from qlm_load.cpu_time import CpuTime


def write(proc: Path, pid: int, *tasks: tuple[float, float]) -> None:
    for number, (had_s, waited_s) in enumerate(tasks):
        folder = proc / str(pid) / "task" / str(pid + number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"{had_s * 1e9:.0f} {waited_s * 1e9:.0f} 7\n")


def test_it_sums_threads_processes_and_lives(tmp_path: Path) -> None:
    cpu = CpuTime(tmp_path)
    write(tmp_path, 10, (2.0, 0.1), (1.0, 0.1))
    write(tmp_path, 20, (5.0, 0.8))
    cpu.sample([10, 20, 99])
    assert (cpu.had_s, cpu.wanted_s) == pytest.approx((8.0, 9.0))
    write(tmp_path, 30, (1.0, 1.5))
    cpu.sample([10, 30])  # 20 was killed, 30 takes its place
    assert (cpu.had_s, cpu.wanted_s) == pytest.approx((9.0, 11.5))


def test_without_figures_nothing_counts(tmp_path: Path) -> None:
    cpu = CpuTime(tmp_path)
    write(tmp_path, 10, (1.0, 9.0))
    (tmp_path / "10" / "task" / "10" / "schedstat").write_text("?\n")
    cpu.sample([10, 11])
    assert (cpu.had_s, cpu.wanted_s) == (0.0, 0.0)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux with CONFIG_SCHED_INFO only")
def test_of_this_process() -> None:
    cpu = CpuTime()
    began_s = time.process_time()
    while time.process_time() < began_s + 0.05:
        pass
    cpu.sample([os.getpid()])
    assert 0.05 < cpu.had_s <= cpu.wanted_s
