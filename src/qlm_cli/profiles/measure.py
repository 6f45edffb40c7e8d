"""The command `qlm profile`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from qlm_cli.console import plain_console
from qlm_cli.options import config_option, default_config_path, set_option
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.errors import QlmError
from qlm_process.config import load_config
from qlm_process.logs import configure_logging
from qlm_process.runner import EXIT_FAILED, run_service

if TYPE_CHECKING:
    from qlm_agent.profiling.fitting import Figure
    from qlm_agent.profiling.rows import ProfiledModel

OUTPUT = "qlm-profile.yaml"
LIMIT_S = 300.0


@click.command()
@config_option
@set_option
@click.option("--name", metavar="NAME", help="Which of the agents of the file; without it, an agent as the section agent has it.")
@click.option("--model", "-m", "models", multiple=True, metavar="NAME", help="Which model; may be repeated. Default: one of each profile.")
@click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(min=1, max=3600),
    default=LIMIT_S,
    show_default=True,
    metavar="SECONDS",
    help="Of the engine's time for one model; what is not begun by then is left out.",
)
@click.option(
    "--output",
    "-o",
    default=OUTPUT,
    show_default=True,
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help='The rows, as YAML; "-": on standard output, instead of tables.',
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def profile(
    config_path: str | None,
    overrides: Mapping[str, str],
    name: str | None,
    models: tuple[str, ...],
    limit_s: float,
    output: str,
    as_json: bool,
) -> None:
    """Measure how fast an engine is: run batches of known sizes on it and fit its hardware profile.

    The engine is that of an agent of the configuration, by itself: no queue is needed, and none of its requests are served meanwhile. Takes
    half a minute of an A100 with a 7B model, longer for larger ones. `qlm profiles import FILE` gives the rows to a running queue.

    An engine that shares its cores with the services is slower than its row; the estimator learns by how much as it serves.

    Exit codes: 0 done; 1 the engine failed or the run was interrupted, and nothing was written; 2 wrong use or configuration.
    """
    from qlm_agent.config import AgentConfig
    from qlm_agent.profiling.rows import table_text
    from qlm_agent.profiling.session import until_stopped

    config = load_config(AgentConfig, config_path or default_config_path(), "agents" if name else None, name, overrides)
    configure_logging(config.telemetry, "profile", config.agent.name)
    found: list[ProfiledModel] = []
    failed: list[QlmError] = []

    async def session(stop: asyncio.Event) -> None:
        try:
            found.extend(await until_stopped(config, shipped_snapshot(), models, limit_s=limit_s, say=_say, stop=stop))
        except QlmError as error:
            failed.append(error)

    code = run_service(session)
    if failed:
        raise failed[0]
    if not found:
        click.echo("stopped before the end: nothing was written", err=True)
        sys.exit(code or EXIT_FAILED)
    if output != "-":
        write_rows(Path(output), table_text(found))
    if as_json:
        click.echo(json.dumps({"file": output, "models": [_document(model) for model in found]}))
    elif output == "-":
        click.echo(table_text(found), nl=False)
    else:
        console = plain_console()
        for model in found:
            console.print(_table(model))
        console.print(f"{len(found)} rows in {output}; `qlm profiles import {output}` gives them to a running queue", soft_wrap=True)


def _say(text: str) -> None:
    click.echo(text, err=True)


def write_rows(path: Path, text: str) -> None:
    """Whole or not at all. Raises click.FileError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise click.FileError(str(path), error.strerror) from error


def _document(model: ProfiledModel) -> dict[str, object]:
    fitted, measured = model.fitted, model.measured
    return {
        "model": measured.model,
        "row": asdict(model.row),
        "intervals": {name: [figure.low, figure.high] for name, figure in fitted.figures.items() if figure.low is not None},
        "decode_error": fitted.decode_error,
        "prefill_error": fitted.prefill_error,
        "theta_tokens_per_s": fitted.theta_tokens_per_s,
        "theta_sequences": fitted.theta_sequences,
        "engine_s": measured.engine_s,
        "notes": measured.notes,
    }


def _table(model: ProfiledModel) -> Table:
    fitted, measured, row = model.fitted, model.measured, model.row
    before = {None: "", "": "shipped", "facts": "from facts", "measured": "before"}[model.before.origin if model.before else None]
    lines = [
        f"decode {fitted.decode_error:.1%} and prefill {fitted.prefill_error:.1%} off (root mean square); took {measured.engine_s:.0f} s",
        f"Theta {fitted.theta_tokens_per_s:,.0f} tokens/s with {fitted.theta_sequences} sequences",
    ]
    table = Table(
        title=f"{measured.model}: {row.model} on {row.n_gpu} x {row.gpu}",
        title_justify="left",
        caption="\n".join([*lines, *measured.notes]),
        caption_justify="left",
    )
    for heading in ("figure", "measured", "95% interval", before):
        table.add_column(heading, justify="left" if heading == "figure" else "right", no_wrap=True)
    for name in ("weights_gb", "kv_bytes_per_token", "kv_capacity_tokens", *fitted.figures):
        earlier = "" if model.before is None else f"{getattr(model.before, name):.4g}"
        table.add_row(name, f"{getattr(row, name):.4g}", _interval(fitted.figures.get(name)), earlier)
    return table


def _interval(figure: Figure | None) -> str:
    return "" if figure is None or figure.low is None or figure.high is None else f"{figure.low:.3g} .. {figure.high:.3g}"
