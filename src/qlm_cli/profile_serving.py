"""`qlm profile --serving`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from qlm import AsyncClient
from qlm_agent.config import AgentConfig, served_models
from qlm_agent.profiling.rows import SERVING, table_text
from qlm_agent.profiling.session import chosen_models
from qlm_cli.console import plain_console
from qlm_cli.profile import write_rows
from qlm_cli.profiles import read_profiles
from qlm_cli.serving_load import ServedRow, measure_serving
from qlm_core.errors import QlmError
from qlm_core.shipped_profiles import shipped_snapshot
from qlm_process.runner import EXIT_FAILED, run_service

SEED = 7
"""Of the load's sizes."""


def profile_serving(
    config: AgentConfig, names: Sequence[str], addresses: tuple[str, ...], *, load_s: float, output: str, as_json: bool
) -> None:
    """Measures models of the agent in a running queue, and writes their rows as `qlm profile` does. Raises QlmError."""
    specs = {name: model.spec for name, model in served_models(config, shipped_snapshot()).items()}
    chosen = [specs[name] for name in chosen_models(names, specs)]
    agent = config.agent
    found: list[ServedRow] = []
    failed: list[QlmError] = []

    async def measure() -> None:
        async with AsyncClient(addresses, application="qlm profile") as client:
            for spec in chosen:
                click.echo(f"{spec.name} ({spec.profile}) on {agent.name}, which serves: {load_s:.0f} s", err=True)
                found.append(
                    await measure_serving(
                        client,
                        lambda: asyncio.to_thread(read_profiles, None, addresses),
                        spec,
                        instance=agent.name,
                        seats=agent.batch_max,
                        load_s=load_s,
                        seed=SEED,
                    )
                )

    async def session(stop: asyncio.Event) -> None:
        measuring, stopped = asyncio.create_task(measure()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([measuring, stopped], return_when=asyncio.FIRST_COMPLETED)
            if measuring.done():
                measuring.result()
        except QlmError as error:
            failed.append(error)
        finally:
            for task in (measuring, stopped):
                task.cancel()
            await asyncio.wait([measuring, stopped])

    code = run_service(session)
    if failed:
        raise failed[0]
    if len(found) < len(chosen):
        click.echo("stopped before the end: nothing was written", err=True)
        sys.exit(code or EXIT_FAILED)
    text = table_text(found, SERVING)
    if output != "-":
        write_rows(Path(output), text)
    if as_json:
        click.echo(json.dumps({"file": output, "models": [_document(model) for model in found]}))
    elif output == "-":
        click.echo(text, nl=False)
    else:
        console = plain_console()
        console.print(_table(found))
        console.print(f"{len(found)} rows in {output}; `qlm profiles import {output}` gives them to a running queue", soft_wrap=True)


def _document(model: ServedRow) -> dict[str, object]:
    return {
        "model": model.model,
        "instance": model.instance,
        "row": asdict(model.row),
        "before": asdict(model.before),
        "factor": model.factor,
        "runs": model.runs,
        "completed": model.completed,
    }


def _table(models: Sequence[ServedRow]) -> Table:
    table = Table(title=f"on {models[0].instance}, as it serves", title_justify="left")
    for heading in ("model", "profile"):
        table.add_column(heading, no_wrap=True)
    for heading in ("runs", "times as slow as its row", "step of 1", "step of 32"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model in models:
        steps = [f"{model.row.decode_step_s(sequences, 500.0 * sequences) * 1e3:.2f} ms" for sequences in (1, 32)]
        table.add_row(model.model, model.row.model, f"{model.runs:,}", f"{model.factor:.3f}", *steps)
    return table
