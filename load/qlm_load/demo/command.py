"""The command `demo`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from qlm_cli.console import plain_console
from qlm_core.vocabulary.errors import QlmError
from qlm_load.campaign.chaos import Role
from qlm_load.compare.comparison import CAPTION, NOTE, PolicyRun, live_run, print_comparison
from qlm_load.compare.simulations import FailedRun, simulated_runs
from qlm_load.demo.demo import DemoOutcome, draw_outcome, print_outcome, run_demo, write_summary
from qlm_load.interruptible import run_interruptible
from qlm_load.picture.command import RECORDING
from qlm_load.picture.recording import save
from qlm_load.workload.options import Choice, workload_options

EXIT_FAILED = 1
COMPARED = ("slo", "fcfs")


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/demo"), show_default=True, help="Output folder.")
@click.option(
    "--compare/--no-compare",
    default=True,
    show_default=True,
    help="Afterwards simulate the same trace under QLM and first come first served.",
)
@workload_options
def demo(choice: Choice, out: Path, compare: bool) -> None:
    """Start a cluster, replay a workload on it, kill an agent, the planner and a gateway half way, and account for every token; draw the
    virtual queues over time, and compare with first come first served.

    Exit codes: 0 nothing was lost or doubled, and there were model swaps and recovered requests; 1 otherwise; 2 wrong use or configuration.
    """
    console = plain_console()
    load, workload = choice.config.load, choice.workload
    out.mkdir(parents=True, exist_ok=True)
    for note in workload.notes:
        console.print(f"workload: {note}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"replaying {len(workload.requests):,} requests at {workload.rate_per_s:.2f} per trace second, {load.time_scale:g} trace seconds a "
        f"real second ({workload.duration_s:,.0f} s of trace in {workload.duration_s / load.time_scale:,.0f} s); seed {load.seed}",
        highlight=False,
        soft_wrap=True,
    )
    try:
        outcome = run_interruptible(run_demo(console, choice.config, workload, choice.path, choice.overrides, out))
        print_outcome(console, outcome, choice.config)
        save(outcome.recording, out / RECORDING)
        runs, problems = _compared(console, choice, outcome) if compare else ((), ())
    except QlmError as error:
        raise click.ClickException(error.message) from error
    setting = {**load.model_dump(mode="json"), "trace": choice.trace, "notes": list(workload.notes)}
    write_summary(out / "summary.json", outcome, runs, setting)
    console.print(f"{out / 'summary.json'}", highlight=False)
    draw_outcome(console, outcome, runs, out, f"{CAPTION}; {NOTE}")
    if outcome.failures or problems:
        sys.exit(EXIT_FAILED)


def _compared(console: Console, choice: Choice, outcome: DemoOutcome) -> tuple[tuple[PolicyRun, ...], tuple[str, ...]]:
    """The live run beside the simulated ones, and why simulated ones failed. A run past its time limit is left out, with a note."""
    load = choice.config.load
    console.print("simulating the same trace under QLM and first come first served ...", highlight=False)
    # A gateway's clients continue at another one, so its kill changes nothing in the comparison. The leading planner may differ.
    killed = [kill for kill in outcome.chaos.log if kill.role is not Role.GATEWAY and kill.restarted_s is not None]
    names = ["planner" if kill.role is Role.PLANNER else kill.process for kill in killed]
    kills = [
        part for name, kill in zip(names, killed, strict=True) for part in ("--kill", f"{name}@{kill.at_s:.2f}+{kill.restarted_s:.2f}")
    ]
    tried = run_interruptible(simulated_runs(COMPARED, [*choice.arguments, *kills], load.simulation_timeout_s))
    simulated = [run for run in tried if not isinstance(run, FailedRun)]
    runs = (live_run("slo", outcome.report, load.time_scale, outcome.counts), *simulated)
    print_comparison(console, runs)
    missing = [run for run in tried if isinstance(run, FailedRun)]
    for run in missing:
        console.print(f"{'FAILED: ' if run.failed else ''}{run.why}", markup=False, highlight=False, style="bold red" if run.failed else "")
    return runs, tuple(run.why for run in missing if run.failed)
