"""Many seeds, in one process or several; and what a failing one prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from qlm_sim.storms.seed_run import LINES_KEPT, SeedReport, run_seed
from qlm_sim.storms.storm import Meetings


def run_seeds(seeds: Sequence[int], processes: int = 1) -> Iterator[SeedReport]:
    """The reports in the order of the seeds, as they come."""
    if processes <= 1:
        yield from map(run_seed, seeds)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_seed, seeds, chunksize=4)


def met(reports: Iterable[SeedReport]) -> Meetings:
    """Which fault met which work under way, over all runs."""
    total: Meetings = Counter()
    for report in reports:
        total.update(report.meetings)
    return total


def failure_text(report: SeedReport) -> str:
    """A failing seed for people: the end of its transcript, and how to see all of it."""
    again = run_seed(report.seed, lines_max=LINES_KEPT)
    header = f"seed {report.seed}: {report.problem}"
    if again.problem != report.problem:
        header += f"\nRUN AGAIN IT GIVES: {again.problem or 'no problem'} (something depends on more than the seed)"
    how = f"python -m qlm_sim --seed {report.seed} --transcript"
    return "\n".join((header, *again.lines, header, f"all of it: {how}"))
