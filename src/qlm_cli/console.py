"""Output to terminals."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def plain_console(**options: Any) -> Console:
    """Text is shown as it is: ids, models and messages of others may read like Rich's markup ("[/red]") or its emoji (":x:")."""
    return Console(**{"markup": False, "emoji": False, **options})
