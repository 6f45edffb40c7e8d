"""Request traces: arrivals and token counts from CSV files, plain or gzip.

Two headers are read:

- `arrival_s,input_tokens,output_tokens[,model][,client]`, more columns are ignored. Seconds from any start.
- `TIMESTAMP,ContextTokens,GeneratedTokens`, the Azure LLM inference traces as published: 2023 with 7 decimals
  ("2023-11-16 18:17:03.9799600"), 2024 with 6 or none and an offset from UTC ("2024-05-12 00:00:00.001163+00:00").

Arrivals are shifted so that the first is at 0 s. A wrong line raises TraceError with its number; files that are not sorted by
arrival are sorted (stable), with a note. At most ROWS_MAX rows are kept, the rest is left out with a note.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from qlm_core.vocabulary.errors import ConfigError

ROWS_MAX = 1_000_000
"""Most rows that are read."""
LINE_CHARACTERS_MAX = 65_536
"""Longest line: some public traces carry a list of prefix blocks in an extra column."""
TOKENS_MAX = 10_000_000
"""Largest plausible token count; above it the column is something else."""


class TraceError(ConfigError):
    """A trace that cannot be replayed; the message names the file and, if known, the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace. `arrival_s` from the first arrival; `model` and `client` are None where the trace does not say."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    model: str | None = None
    client: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Rows sorted by arrival, the first at 0 s. `notes`: the reader's changes and omissions, for people."""

    rows: tuple[TraceRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def duration_s(self) -> float:
        return self.rows[-1].arrival_s

    def head(self, rows_max: int | None = None, duration_max_s: float | None = None) -> Trace:
        """Its first rows: at most `rows_max`, arriving before `duration_max_s`."""
        kept = self.rows[:rows_max]
        if duration_max_s is not None:
            kept = tuple(row for row in kept if row.arrival_s < duration_max_s)
        if len(kept) == len(self.rows):
            return self
        if not kept:
            raise TraceError("none of the trace's rows is left")
        note = f"first {len(kept):,} of {len(self.rows):,} rows ({kept[-1].arrival_s:,.0f} of {self.duration_s:,.0f} s)"
        return Trace(rows=kept, notes=(*self.notes, note))


def read_trace(path: str | Path, rows_max: int = ROWS_MAX) -> Trace:
    """Reads a CSV or CSV.GZ file. Raises TraceError, also for a file that cannot be opened or has no rows."""
    path = Path(path)
    try:
        with _open_text(path) as lines:
            return _read(path.name, lines, min(rows_max, ROWS_MAX))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def _open_text(path: Path) -> TextIO:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if packed:
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _read(name: str, lines: TextIO, rows_max: int) -> Trace:
    columns = [column.strip() for column in next(csv.reader([lines.readline(LINE_CHARACTERS_MAX)]), [])]
    read_row = _row_reader(name, columns)
    rows: list[TraceRow] = []
    notes: list[str] = []
    for number, fields in enumerate(csv.reader(_bounded(name, lines)), start=2):
        if not fields:
            continue
        if len(rows) == rows_max:
            notes.append(f"{name}: only the first {rows_max:,} rows are read")
            break
        try:
            rows.append(read_row(fields))
        except ValueError as error:
            raise TraceError(f"{name}, line {number}: {error}") from error
    if not rows:
        raise TraceError(f"{name}: has no rows")
    if any(later.arrival_s < earlier.arrival_s for earlier, later in pairwise(rows)):
        notes.append(f"{name}: not sorted by arrival; sorted")
        rows.sort(key=lambda row: row.arrival_s)
    start_s = rows[0].arrival_s
    return Trace(rows=tuple(replace(row, arrival_s=round(row.arrival_s - start_s, 7)) for row in rows), notes=tuple(notes))


def _bounded(name: str, lines: TextIO) -> Iterator[str]:
    number = 1
    while line := lines.readline(LINE_CHARACTERS_MAX):
        number += 1
        if len(line) == LINE_CHARACTERS_MAX and not line.endswith("\n"):
            raise TraceError(f"{name}, line {number}: longer than {LINE_CHARACTERS_MAX:,} characters")
        yield line


def _row_reader(name: str, columns: Sequence[str]) -> Callable[[Sequence[str]], TraceRow]:
    at = {column.lower(): index for index, column in enumerate(columns)}
    if {"arrival_s", "input_tokens", "output_tokens"} <= at.keys():
        names, read_arrival = ("arrival_s", "input_tokens", "output_tokens"), _seconds
    elif {"timestamp", "contexttokens", "generatedtokens"} <= at.keys():
        names, read_arrival = ("timestamp", "contexttokens", "generatedtokens"), _timestamp_s
    else:
        raise TraceError(
            f"{name}, line 1: the header must name arrival_s,input_tokens,output_tokens or TIMESTAMP,ContextTokens,GeneratedTokens; "
            f"it is {','.join(columns)[:200]!r}"
        )
    arrival, given, produced = (at[column] for column in names)
    model, client = at.get("model"), at.get("client")

    def read(fields: Sequence[str]) -> TraceRow:
        if len(fields) < len(columns):
            raise ValueError(f"{len(fields)} fields where the header has {len(columns)}")
        return TraceRow(
            arrival_s=read_arrival(fields[arrival].strip(), columns[arrival]),
            input_tokens=_tokens(fields[given].strip(), columns[given]),
            output_tokens=_tokens(fields[produced].strip(), columns[produced]),
            model=None if model is None else fields[model].strip() or None,
            client=None if client is None else fields[client].strip() or None,
        )

    return read


def _seconds(text: str, column: str) -> float:
    value = _number(text, column)
    if value < 0:
        raise ValueError(f"{column} must be >= 0, it is {text!r}")
    return value


def _tokens(text: str, column: str) -> int:
    value = _number(text, column)
    if value != int(value) or not 1 <= value <= TOKENS_MAX:
        raise ValueError(f"{column} must be a whole number from 1 to {TOKENS_MAX:,}, it is {text!r}")
    return int(value)


def _number(text: str, column: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{column} must be a number, it is {text[:40]!r}") from None
    if not math.isfinite(value):
        raise ValueError(f"{column} must be finite, it is {text!r}")
    return value


def _timestamp_s(text: str, column: str) -> float:
    """Seconds since the epoch to the microsecond (a double holds no more); without an offset the time is taken as UTC."""
    try:
        moment = datetime.fromisoformat(text)  # which leaves digits behind the sixth out
        if ":" not in text:
            raise ValueError("a date without a time")
    except ValueError as error:
        raise ValueError(f'{column} must be like "2023-11-16 18:17:03.9799600", it is {text[:40]!r} ({error})') from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
