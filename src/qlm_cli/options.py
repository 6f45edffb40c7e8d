"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.resources import files
from typing import Any, TypeVar

import click

from qlm.credentials import Credentials, credentials_of
from qlm_core.vocabulary.errors import ConfigError
from qlm_process.config import parse_override

DEFAULT_ADDRESS = "127.0.0.1:50051"

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


def access_options(command: F) -> F:
    """How the command shows who it is, and checks servers: see `credentials`."""
    for flag, text in reversed(_ACCESS.items()):
        command = click.option(flag, type=click.Path(dir_okay=False), metavar="FILE", expose_value=False, callback=_remember, help=text)(
            command
        )
    return command


def credentials() -> Credentials:
    """Those of the command that runs: its options win over QLM_API_KEY, QLM_API_KEY_FILE, QLM_CA_FILE and so on. Raises ConfigError."""
    context = click.get_current_context(silent=True)  # None in a thread, and outside of a command
    given: dict[str, str] = {} if context is None else context.meta.get(_META, {})
    environment = {**os.environ, **given}
    if "QLM_API_KEY_FILE" in given:
        environment.pop("QLM_API_KEY", None)
    return credentials_of(environment)


def _remember(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.meta.setdefault(_META, {})[f"QLM_{parameter.name}".upper()] = value


_META = "qlm.access"
_ACCESS = {
    "--api-key-file": "File of the API key. Default: QLM_API_KEY_FILE names it, or QLM_API_KEY holds the key.",
    "--ca-file": "PEM file of the authorities that vouch for servers; with it the connection uses TLS. Default: QLM_CA_FILE.",
    "--cert-file": "PEM file of the client's own certificate, for mutual TLS. Default: QLM_CERT_FILE.",
    "--cert-key-file": "PEM file of its key. Default: QLM_CERT_KEY_FILE.",
}


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
    )(access_options(command))


def tenant_option(command: F) -> F:
    return click.option(
        "--tenant",
        envvar="QLM_TENANT",
        default="",
        metavar="NAME",
        help="Who the request belongs to. Default: the API key's.",
    )(command)
