"""The commands `qlm profiles`, `qlm profiles export` and `qlm profiles import`: what the estimator knows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Group
from rich.table import Table

from qlm.api.v1 import estimator_pb2
from qlm_cli.console import columns, plain_console
from qlm_cli.options import address_option
from qlm_cli.profiles.estimator_calls import call_estimator, estimator_option
from qlm_core.profiles.hardware_profile import TIMED_OPERATIONS, HardwareProfile, OperationSlowdown
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.errors import InvalidRequest
from qlm_process.profile_file import dump_profiles, parse_profiles
from qlm_process.wire import profile as profile_wire

CLASSES_SHOWN = 20
"""Classes of requests in the table: those that most is known of."""
WORKLOAD_SHOWN = ("model", "slo_class", "token_class", "prompt_tokens_mean", "output_tokens_mean", "output_tokens_variance")
ORIGINS = {"": "shipped", "facts": "from facts", "measured": "measured"}
OPERATION_TEXTS: Mapping[str, tuple[str, Callable[[HardwareProfile], str]]] = {
    "swap_warm": ("load, from host memory", lambda row: f"{row.swap_s(warm=True):.2f} s"),
    "swap_cold": ("load, from disk", lambda row: f"{row.swap_s(warm=False):.2f} s"),
    "kv_swap": ("KV of 1,000 tokens, one way", lambda row: f"{1e3 * row.kv_swap_s(1_000.0):.1f} ms"),
}
"""Field of a row -> what it is called, and what it takes now."""


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@estimator_option
@address_option
@click.pass_context
def profiles(ctx: click.Context, as_json: bool, estimator: str | None, addresses: tuple[str, ...]) -> None:
    """Show the profiles: how fast each GPU and instance is believed to be, and how sure that is, how long loads of models and moves of KV
    take, how long answers are, and whether those of single requests are predicted; or export and import them.

    `prior`: how much of an instance's slowdown still is what was believed before it ran anything. `not ended`: requests whose
    length so far counts as a lower bound.

    Exit codes: 0 done; 1 no estimator answered, or there is nothing to export; 2 wrong use, or a damaged file.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = (estimator, addresses)
        return
    snapshot = read_profiles(estimator, addresses)
    if as_json:
        click.echo(json.dumps(_document(snapshot)))
        return
    plain_console().print(Group(_pairs(snapshot), _instances(snapshot), _operations(snapshot), _classes(snapshot), _predicted(snapshot)))


@profiles.command("export")
@click.argument("file", type=click.Path(dir_okay=False), default="-")
@click.pass_obj
def export_profiles(where: tuple[str | None, tuple[str, ...]], file: str) -> None:
    """Write what was learned, measured or imported as YAML to FILE, or to standard output. Rows that QLM ships are left out."""
    snapshot = read_profiles(*where)
    try:
        text = dump_profiles(snapshot)
    except ValueError as error:
        raise click.ClickException(f"nothing was exported: {error}") from error
    if file == "-":
        click.echo(text, nl=False)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.FileError(file, error.strerror) from error


@profiles.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.pass_obj
def import_profiles(where: tuple[str | None, tuple[str, ...]], file: str) -> None:
    """Give the rows of FILE ("-": standard input) to the estimator, in place of those of the same keys: an export, or what `qlm profile`
    wrote.

    All or nothing. Exit codes: 0 published; 1 no estimator took them; 2 the file is damaged, with what is wrong."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        snapshot = parse_profiles(text)
    except (OSError, ValueError) as error:  # UnicodeDecodeError is one
        raise click.UsageError(f"{file}: {error}") from error
    request = estimator_pb2.ImportProfilesRequest(profiles=profile_wire.to_proto(snapshot))
    try:
        answer = call_estimator(*where, lambda stub: stub.ImportProfiles, request)
    except InvalidRequest as error:
        raise click.UsageError(f"{file}: {error.message}") from error
    click.echo(f"{answer.hardware} hardware and {answer.workload} workload rows are in version {answer.version}")


def read_profiles(estimator: str | None, addresses: tuple[str, ...]) -> ProfileSnapshot:
    """Reads the profiles of the estimator at that address, or of the leader that a gateway names. Raises QlmError."""
    return profile_wire.from_proto(call_estimator(estimator, addresses, lambda stub: stub.GetProfiles, estimator_pb2.GetProfilesRequest()))


def _document(snapshot: ProfileSnapshot) -> dict[str, object]:
    hardware = [
        {
            "gpu": row.gpu,
            "n_gpu": row.n_gpu,
            "model": row.model,
            "instance": row.instance,
            "origin": ORIGINS[row.origin],
            "slowdown": row.slowdown,
            "samples": row.samples,
            "prior_share": row.prior_share if row.instance else 1.0,
            "operations": {name: asdict(getattr(row, name)) for name in TIMED_OPERATIONS if getattr(row, name).samples},
        }
        for row in snapshot.hardware
    ]
    workload = [
        {
            **{name: getattr(row, name) for name in WORKLOAD_SHOWN},
            "output_tokens_p50": row.output_curve().quantile(0.5),
            "output_tokens_p90": row.output_curve().quantile(0.9),
            "samples": row.samples,
            "censored": row.censored,
        }
        for row in snapshot.workload
    ]
    lengths = [{**asdict(score), "gain": score.gain} for score in snapshot.length_model.scores]
    return {
        "version": snapshot.version,
        "made_s": snapshot.made_s,
        "hardware": hardware,
        "workload_rows": len(workload),
        "workload": workload,
        "length_model": lengths,
    }


def _pairs(snapshot: ProfileSnapshot) -> Table:
    table = _table(
        f"pairs of GPUs and model, version {snapshot.version}",
        ("GPUs", "model", "from"),
        ("step of 1", "step of 32", "prefill of 1,000", "KV tokens", "swap warm", "cold"),
    )
    for row in snapshot.hardware:
        if not row.instance:
            steps = [f"{row.decode_step_s(sequences, 500.0 * sequences) * 1e3:.1f} ms" for sequences in (1, 32)]
            loads = [f"{row.swap_s(warm=warm):.1f} s" for warm in (True, False)]
            prefill = f"{row.prefill_s(1_000) * 1e3:.0f} ms"
            table.add_row(_gpus(row), row.model, ORIGINS[row.origin], *steps, prefill, f"{row.kv_capacity_tokens:,}", *loads)
    return table


def _instances(snapshot: ProfileSnapshot) -> Table:
    table = _table("instances, as measured", ("instance", "GPUs", "model", "prior from"), ("slowdown", "runs", "prior"))
    for row in snapshot.hardware:
        if row.instance:
            figures = (f"{row.slowdown:.2f}", f"{row.samples:,}", f"{row.prior_share:.0%}")
            table.add_row(row.instance, _gpus(row), row.model, ORIGINS[row.origin], *figures)
    return table


def _operations(snapshot: ProfileSnapshot) -> Table:
    table = _table(
        "loads and KV swap of instances, as measured", ("instance", "model", "operation"), ("takes", "slowdown", "times", "prior")
    )
    for row in snapshot.hardware:
        for name, (text, takes) in OPERATION_TEXTS.items():
            operation: OperationSlowdown = getattr(row, name)
            if operation.samples:
                figures = (f"{operation.slowdown:.2f}", f"{operation.samples:,}", f"{operation.prior_share:.0%}")
                table.add_row(row.instance, row.model, text, takes(row), *figures)
    return table


def _classes(snapshot: ProfileSnapshot) -> Table:
    rows = sorted(snapshot.workload, key=lambda row: (-row.samples, row.key))
    table = _table(
        f"classes of requests, as learned: {min(len(rows), CLASSES_SHOWN)} of {len(rows):,}",
        ("model", "SLO", "tokens"),
        ("prompt", "output", "p50", "p90", "requests", "not ended"),
    )
    for row in rows[:CLASSES_SHOWN]:
        curve = row.output_curve()
        lengths = (row.prompt_tokens_mean, row.output_tokens_mean, curve.quantile(0.5), curve.quantile(0.9))
        counts = (row.samples, row.censored)
        table.add_row(row.model, row.slo_class or "any", row.token_class or "any", *(f"{round(each):,}" for each in (*lengths, *counts)))
    return table


def _predicted(snapshot: ProfileSnapshot) -> Table:
    table = _table(
        "outputs of single requests, mean errors in tokens", ("model", "predicted"), ("error", "of the median", "gain", "requests")
    )
    for score in snapshot.length_model.scores:
        errors = (f"{score.model_error_tokens:,.1f}", f"{score.median_error_tokens:,.1f}")
        table.add_row(score.model, "yes" if score.used else "no", *errors, f"{score.gain:.1%}", f"{score.samples:,}")
    return table


def _table(title: str, headings: tuple[str, ...], figures: tuple[str, ...]) -> Table:
    """`figures`: headings of the columns that follow, of numbers."""
    return Table(*columns((*headings, *figures), figures, no_wrap=True), title=title, title_justify="left")


def _gpus(row: HardwareProfile) -> str:
    return f"{row.n_gpu} x {row.gpu}"
