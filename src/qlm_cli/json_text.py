"""Output of commands with `--json`."""

from __future__ import annotations

import json
import math


def json_text(document: object) -> str:
    """One line of JSON that every reader takes: a figure that is infinite, such as the deadline of requests without one, is null."""
    return json.dumps(_finite(document), allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
