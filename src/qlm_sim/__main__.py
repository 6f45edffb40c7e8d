"""`python -m qlm_sim`: runs seeds, or replays one with its transcript."""

from __future__ import annotations

import sys
from collections import Counter

import click

from qlm_sim.storms.coverage import COMMON, RARE, missing
from qlm_sim.storms.seed_run import SeedReport, failure_text, met, run_seed, run_seeds

LINES_MAX = 10_000_000
PROGRESS_EVERY = 100
RARE_SEEDS = 1000
"""From this number of seeds on, rare meetings are expected too."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seed", type=int, help="Run this one seed.")
@click.option("--transcript", is_flag=True, help="Print the transcript, line by line.")
@click.option("--count", default=50, show_default=True, type=click.IntRange(min=1), help="How many seeds to run.")
@click.option("--start", default=1, show_default=True, help="The first of them.")
@click.option("--processes", default=1, show_default=True, type=click.IntRange(min=1), help="Processes to run them in.")
@click.option("--require", is_flag=True, help="Exit with 1, too, if an expected fault did not hit the work it is for.")
@click.option("--meetings", is_flag=True, help="Print how often each fault hit each kind of work.")
def main(seed: int | None, transcript: bool, count: int, start: int, processes: int, require: bool, meetings: bool) -> None:
    """Runs a cluster in virtual time through storms of faults, by seed. Exits with 1 if an invariant does not hold."""
    if seed is not None:
        report = run_seed(seed, lines_max=LINES_MAX if transcript else 0, hashed=True)
        for line in report.lines:
            click.echo(line)
        click.echo(summary(report))
        sys.exit(bool(report.problem))
    reports: list[SeedReport] = []
    for report in run_seeds(range(start, start + count), processes):
        reports.append(report)
        if report.problem:
            click.echo(failure_text(report))
            sys.exit(1)
        if len(reports) % PROGRESS_EVERY == 0:
            click.echo(f"{len(reports)} seeds, {sum(each.events for each in reports):,} events", err=True)
    if meetings:
        for (fault, work), times in sorted(met(reports).items()):
            click.echo(f"{times:8} {fault} x {work}")
        for effect, times in sorted(sum((each.effects for each in reports), Counter[str]()).items()):
            click.echo(f"{times:8} effect {effect}")
    if require:
        absent = missing(met(reports), (*COMMON, *(RARE if count >= RARE_SEEDS else ())))
        if absent:
            click.echo("these never met: " + ", ".join(absent))
            sys.exit(1)
    states = sum((each.states for each in reports), Counter[str]())
    ends = ", ".join(f"{number:,} {state.lower()}" for state, number in sorted(states.items()))
    click.echo(f"seeds {start} to {start + count - 1}: every invariant held over {sum(each.events for each in reports):,} events ({ends})")


def summary(report: SeedReport) -> str:
    kinds = ", ".join(report.weather.kinds) or "none"
    ends = ", ".join(f"{number} {state.lower()}" for state, number in sorted(report.states.items()))
    return (
        f"seed {report.seed}: {report.problem or 'every invariant held'}; {report.virtual_s:.1f} virtual s, {report.events:,} events; "
        f"{ends}; faults: {kinds} ({len(report.weather.strikes)} strikes); digest {report.digest}"
    )


if __name__ == "__main__":
    main()
