"""The command line of a service: `qlm gateway`, `python -m qlm_gateway` and the like take the same options."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import click
from pydantic import BaseModel

from qlm_core.vocabulary.errors import ConfigError
from qlm_process.config import load_config, parse_override
from qlm_process.logs import configure_logging
from qlm_process.runner import EXIT_CONFIG, EXIT_FAILED, run_service

Config = TypeVar("Config", bound=BaseModel)
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
EPILOG = (
    "QLM_SECTION__NAME in the environment sets what --set section.name=value does, and --set wins. Units are the last word of a setting: "
    "_s seconds, _tokens tokens, _gb 10^9 bytes. Exit codes: 0 stopped, 1 failed, 2 wrong configuration."
)


def service_command(
    service: str, config_class: type[Config], *, text: str, example: str, serve: Callable[[Config, asyncio.Event], Awaitable[None]]
) -> click.Command:
    """A command that reads the settings of one process, runs it until it is stopped and exits with its code. `text`: what the process does,
    and how it stops. `example`: a setting of it. `serve`: runs until the event is set."""

    @click.pass_context
    def run(context: click.Context, path: str | None, name: str | None, settings: Sequence[str]) -> None:
        try:
            overrides = dict(parse_override(setting) for setting in settings)
            config = load_config(config_class, path, f"{service}s" if name else None, name, overrides)
        except ConfigError as error:
            click.echo(f"{service}: {error.message}", err=True)
            context.exit(EXIT_CONFIG)
        sections: Any = config  # every service has `telemetry`, and a section of its own name
        configure_logging(sections.telemetry, service, getattr(sections, service).name)
        context.exit(run_service(lambda stop: serve(config, stop)))

    return click.Command(
        service,
        callback=run,
        help=text,
        epilog=EPILOG,
        context_settings=CONTEXT,
        params=[
            click.Option(
                ["--config", "-c", "path"],
                type=click.Path(),
                metavar="FILE",
                help=f"YAML file with the sections queue, models, {service} or {service}s, telemetry. Default: what QLM_CONFIG names.",
            ),
            click.Option(
                ["--name"], metavar="NAME", help=f"Entry of the list {service}s to run; without the list, the name of this {service}."
            ),
            click.Option(
                ["--set", "settings"],
                multiple=True,
                metavar="SECTION.NAME=VALUE",
                help=f"Override one setting, such as {example}; may be repeated.",
            ),
        ],
    )


def run_command(command: click.Command, argv: Sequence[str] | None) -> int:
    """Runs the command with these arguments, or those of the process; returns its exit code."""
    try:
        result: object = command.main(
            args=list(sys.argv[1:] if argv is None else argv), prog_name=f"qlm {command.name}", standalone_mode=False
        )
    except click.ClickException as error:
        error.show()
        return EXIT_CONFIG
    except click.Abort:
        return EXIT_FAILED
    return result if isinstance(result, int) else 0
