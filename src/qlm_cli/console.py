"""Output of commands: text for terminals, tables, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable
from typing import Any

from rich.console import Console
from rich.table import Column


def plain_console(**options: Any) -> Console:
    """Text is shown as it is: ids, models and messages of others may read like Rich's markup ("[/red]") or its emoji (":x:")."""
    return Console(**{"markup": False, "emoji": False, **options})


def columns(headings: Iterable[str], right: Container[str] = (), **options: Any) -> list[Column]:
    """Columns of a table; those of `right` are aligned there."""
    return [Column(heading, justify="right" if heading in right else "left", **options) for heading in headings]


def json_text(document: object) -> str:
    """One line of JSON that every reader takes: a figure that is infinite, such as the deadline of requests without one, is null."""
    return json.dumps(_finite(document), allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
