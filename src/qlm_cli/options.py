"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any, TypeVar

import click

from qlm_core.errors import ConfigError
from qlm_process.config import parse_override

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TENANT = "default"

F = TypeVar("F", bound=Callable[..., Any])


def default_config_path() -> str:
    """The configuration that comes with QLM: two simulated instances of different GPUs, three models."""
    return str(files("qlm_cli").joinpath("default_config.yaml"))


def _parse_overrides(_ctx: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    try:
        return dict(parse_override(value) for value in values)
    except ConfigError as error:
        raise click.BadParameter(error.message) from error


def config_option(command: F) -> F:
    return click.option(
        "--config",
        "-c",
        "config_path",
        envvar="QLM_CONFIG",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="YAML file of all settings. Default: the one that comes with QLM (two simulated instances, three models).",
    )(command)


def set_option(command: F) -> F:
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        callback=_parse_overrides,
        metavar="SECTION.NAME=VALUE",
        help="Override one setting; may be repeated. Wins over QLM_SECTION__NAME, which wins over the file.",
    )(command)


def address_option(command: F) -> F:
    return click.option(
        "--address",
        "-a",
        "addresses",
        envvar="QLM_ADDRESS",
        multiple=True,
        default=(DEFAULT_ADDRESS,),
        show_default=True,
        metavar="HOST:PORT",
        help="A gateway; give several to go on at another when one is gone.",
    )(command)


def tenant_option(command: F) -> F:
    return click.option(
        "--tenant", envvar="QLM_TENANT", default=DEFAULT_TENANT, show_default=True, metavar="NAME", help="Who the request belongs to."
    )(command)
