"""The command `tune`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from qlm_core.vocabulary.errors import ConfigError
from qlm_load.compare.comparison import POLICY_METAVAR, PolicyRun, check_policy
from qlm_load.tune.tuning import Settings, tune
from qlm_load.workload.options import Choice, workload_options
from qlm_load.workload.workload import Workload


@click.command(name="tune")
@click.option(
    "--policy",
    "policies",
    metavar=POLICY_METAVAR,
    callback=lambda ctx, param, names: tuple(map(check_policy, names)),
    multiple=True,
    default=("slo", "least_loaded", "sal"),
    show_default=True,
    help="A policy of the planner to try; may be repeated.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0.05, 0.95),
    default=0.3,
    show_default=True,
    help="Share of the requests, the last ones, that judge the choice.",
)
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/tune"), show_default=True, help="Folder of the results."
)
@workload_options
def tune_command(choice: Choice, policies: tuple[str, ...], held_out: float, out: Path) -> None:
    """Choose policies of planner and engines for the traffic of a trace, in virtual time.

    Tries them on the first part of the trace, judges the best on the rest, and writes OUT/tuned.yaml (settings to add to the
    configuration, with the evidence; none where the present ones are as good) and OUT/tuned.json (all figures). Waits are trace seconds. A
    trial takes 5 ms or more a request.

    Exit codes: 0 done, 1 failed, 2 wrong use or configuration.
    """
    from qlm_load.compare.virtual_run import ClusterFile, simulated_run  # late: it loads all services
    from qlm_sim.from_config import policy_of

    config = choice.config
    present = policy_of(choice.path, choice.overrides).order

    def run(settings: Settings, workload: Workload) -> PolicyRun:
        file = ClusterFile(
            path=choice.path,
            overrides={**choice.overrides, **settings},
            agents=[agent.name for agent in config.agents],
            gateways=len(config.gateways),
            planners=len(config.planners),
        )
        return simulated_run(str(settings.get("planner.policy", present)), workload, config.load.time_scale, file, ())

    try:
        tuned = tune(choice.workload, policies, held_out, run, lambda text: click.echo(text, err=True))
    except ConfigError as error:
        raise click.UsageError(error.message) from error
    out.mkdir(parents=True, exist_ok=True)
    (out / "tuned.yaml").write_text(tuned.document())
    (out / "tuned.json").write_text(json.dumps(tuned.as_json(), indent=1))
    click.echo(tuned.document(), nl=False)
