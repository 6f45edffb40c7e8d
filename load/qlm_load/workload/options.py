"""The options for a workload and its cluster: the same for `demo` and `simulate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from qlm_core.vocabulary.errors import ConfigError
from qlm_load.demo.settings import DemoConfig, demo_config_path
from qlm_load.workload.trace import read_trace
from qlm_load.workload.workload import REQUESTS_MAX, Workload, generate_rows, make_workload
from qlm_process.config import load_config, parse_override

_OPTIONS = (
    click.option(
        "--trace", metavar="FILE", help="Replay this CSV or CSV.GZ instead of the generated workload; its first rows, at the rate set."
    ),
    click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Of the trace, only its first so many minutes."),
    click.option("--requests", type=click.IntRange(1, REQUESTS_MAX), help="Requests to replay (load.requests)."),
    click.option("--rate", "rate_per_s", type=float, help="Mean arrivals per trace second (load.rate_per_s)."),
    click.option("--time-scale", type=float, help="Trace seconds in a real second (load.time_scale)."),
    click.option("--seed", type=click.IntRange(min=0), help="Of the workload and the kill plan (load.seed)."),
    click.option("--config", "config_path", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Another YAML file."),
    click.option("--set", "settings", multiple=True, metavar="SECTION.NAME=VALUE", help="Override one setting; may be repeated."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Values of the options. `overrides`: settings for the cluster, the simulated engines' time scale and seed among them; `arguments`: the
    same options again, for another command."""

    config: DemoConfig
    workload: Workload
    path: str
    overrides: dict[str, object]
    trace: str | None
    arguments: tuple[str, ...]


def workload_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options; the command is called with `choice`. Wrong ones end it with exit code 2."""

    @wraps(command)
    def called(
        trace: str | None,
        minutes: float | None,
        requests: int | None,
        rate_per_s: float | None,
        time_scale: float | None,
        seed: int | None,
        config_path: str | None,
        settings: tuple[str, ...],
        **others: Any,
    ) -> None:
        path = str(Path(config_path or demo_config_path()).resolve())
        given = {"load.requests": requests, "load.rate_per_s": rate_per_s, "load.time_scale": time_scale, "load.seed": seed}
        try:
            overrides: dict[str, object] = dict(parse_override(text) for text in settings)
            overrides |= {name: value for name, value in given.items() if value is not None}
            config = load_config(DemoConfig, path, overrides=overrides)
            workload = demo_workload(config, trace, minutes)
        except ConfigError as error:
            raise click.UsageError(error.message) from error
        load = config.load
        overrides |= {"agent.simulated.time_scale": load.time_scale, "agent.simulated.seed": load.seed}
        arguments = ["--config", path]
        arguments += [part for name, value in overrides.items() for part in ("--set", f"{name}={value}")]
        arguments += ["--trace", trace] if trace is not None else []
        arguments += ["--minutes", str(minutes)] if minutes is not None else []
        command(
            choice=Choice(config=config, workload=workload, path=path, overrides=overrides, trace=trace, arguments=tuple(arguments)),
            **others,
        )

    for option in reversed(_OPTIONS):
        called = option(called)
    return called


def demo_workload(config: DemoConfig, trace_path: str | None, minutes: float | None) -> Workload:
    """Generated, or the first rows of a trace at the rate of the settings."""
    load = config.load
    run_id = f"demo-{load.seed}"
    if trace_path is None:
        rows = generate_rows(load.requests, load.seed, load.rate_per_s)
        return make_workload(rows, config.shares(), load.seed, run_id=run_id)
    rows = read_trace(trace_path).head(load.requests, None if minutes is None else minutes * 60)
    return make_workload(rows, config.shares(), load.seed, rate_per_s=load.rate_per_s, run_id=run_id)
