"""The command group. Subcommands load when they are used, so that `qlm submit` does not pay for the planner."""

from __future__ import annotations

from importlib import import_module

import click

from qlm_core.vocabulary.errors import ConfigError, QlmError

COMMANDS = {
    "up": ("qlm_cli.up.command", "up", "Run everything on this machine."),
    "serve": ("qlm_cli.serve.command", "serve", "Put QLM in front of OpenAI-compatible servers that run."),
    "gateway": ("qlm_gateway.__main__", "COMMAND", "Run one gateway."),
    "planner": ("qlm_planner.__main__", "COMMAND", "Run one planner (leader or standby)."),
    "estimator": ("qlm_estimator.__main__", "COMMAND", "Run one estimator (leader or standby)."),
    "agent": ("qlm_agent.__main__", "COMMAND", "Run the agent of one instance."),
    "submit": ("qlm_cli.submit", "submit", "Send a prompt and print its answer."),
    "status": ("qlm_cli.operate.status", "status", "Show the queue, or one request."),
    "requests": ("qlm_cli.operate.requests", "requests", "List, show or cancel requests."),
    "pause": ("qlm_cli.operate.pauses", "pause", "Let the requests for a model, or of a tenant, wait."),
    "resume": ("qlm_cli.operate.pauses", "resume", "End a pause."),
    "keys": ("qlm_cli.keys", "keys", "Make, list or revoke API keys."),
    "top": ("qlm_cli.top.command", "top", "Watch the whole cluster live."),
    "doctor": ("qlm_cli.operate.doctor", "doctor", "Find damaged records in the queue, and repair them."),
    "health": ("qlm_cli.operate.health", "health", "Ask one process whether it serves."),
    "profile": ("qlm_cli.profiles.measure", "profile", "Measure how fast an engine is: its hardware profile."),
    "profiles": ("qlm_cli.profiles.exchange", "profiles", "Show, export or import what the estimator knows."),
    "deploy": ("qlm_cli.deploy.command", "deploy", "Split a model over unlike devices."),
    "models": ("qlm_cli.models.command", "models", "Make or list small models for real engines."),
    "tune": ("qlm_load.tune.command", "tune_command", "Choose policies for the traffic of a trace."),
    "load": ("qlm_load.replay.command", "replay", "Replay a workload and report its outcome."),
}
"""Name -> module, attribute, one line of help."""


class LazyGroup(click.Group):
    """Knows its subcommands by name; imports one when it is called, and says the errors of QLM in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise click.UsageError(error.message) from error
        except QlmError as error:
            raise click.ClickException(described(error)) from error


def described(error: QlmError) -> str:
    """An error in one line: what, why, and when to try again."""
    retry = "" if error.retry_after_s is None else f" (try again in {error.retry_after_s:g} s)"
    return f"{error.message} [{error.reason}]{retry}"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="qlm-serving", prog_name="qlm")
def root() -> None:
    """QLM: a durable queue in front of LLM serving engines that keeps end-to-end latency objectives."""
