"""docs/reference/cli.md, written from the commands: `python -m qlm_cli.reference.commands > docs/reference/cli.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from qlm_cli.root import root
from qlm_load.__main__ import main as load

HEAD = """# Commands

<!-- Written by `make docs` from the commands. -->

Exit codes: 0 done, 1 failed, 2 wrong use or configuration, 3 the request did not end COMPLETED (`qlm submit`). `-h` prints the same text.
"""


def reference() -> str:
    """The whole page: `qlm` and `python -m qlm_load`, one section a command."""
    return "\n".join((HEAD, *_sections(root, "qlm", None), *_sections(load, "python -m qlm_load", None)))


def _sections(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
    help_names = ["-h", "--help"]
    with click.Context(
        command, info_name=name, parent=parent, max_content_width=110, terminal_width=110, help_option_names=help_names
    ) as context:
        yield f"## `{context.command_path}`\n\n```text\n{command.get_help(context)}\n```\n"
        if isinstance(command, click.Group):
            for child in command.list_commands(context):
                found = command.get_command(context, child)
                assert found is not None
                yield from _sections(found, child, context)


if __name__ == "__main__":
    sys.stdout.write(reference())
