"""Whatever ids and models are named, commands show it as it is."""

from __future__ import annotations

import io

import pytest
from rich.table import Table

from qlm_cli.console import plain_console

NAMES = ("[/red]", "[bold]", "[red]x[/red]", ":smile:", "[link=x]", "\\[x]", "[", "[/]", "[@click=f]x[/]")


@pytest.mark.parametrize("name", NAMES)
def test_names_are_no_markup(name: str) -> None:
    console = plain_console()
    console.file = file = io.StringIO()
    table = Table(title=name)
    table.add_column(name)
    table.add_row(name)
    console.print(name, table)
    assert file.getvalue().count(name) == 4
