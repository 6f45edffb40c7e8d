"""Bounded tables, in the order of their updates."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Row = TypeVar("Row")


def put_newest(rows: dict[Key, Row], key: Key, row: Row, rows_max: int) -> None:
    """Puts a row last. Beyond `rows_max`, the rows with the oldest update are removed."""
    rows.pop(key, None)
    rows[key] = row
    while len(rows) > rows_max:
        del rows[next(iter(rows))]
