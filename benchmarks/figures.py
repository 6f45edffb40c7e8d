"""A figure of a benchmark: its key, its target, and how measured values are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

Value = float | int | None
Values = dict[str, "Value | dict[str, Value]"]
"""By key: a number, or numbers by the names of their points; None where it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One key of the document. `points`: names of its values, none for a single one. `target`: as text, for people; `most`, `least`: the
    same for the machine, by point ("" for a single value)."""

    key: str
    part: str
    target: str
    points: tuple[str, ...] = ()
    most: Mapping[str, float] | None = None
    least: Mapping[str, float] | None = None

    def empty(self) -> Value | dict[str, Value]:
        return dict.fromkeys(self.points) if self.points else None

    def met(self, value: Value | Mapping[str, Value]) -> bool | None:
        """Whether it meets its target; None where it was not measured or has no target."""
        values = value if isinstance(value, Mapping) else {"": value}
        checks = [(values.get(point), limit, 1.0) for point, limit in (self.most or {}).items()]
        checks += [(values.get(point), limit, -1.0) for point, limit in (self.least or {}).items()]
        if not checks or any(found is None for found, _, _ in checks):
            return None
        return all(found is not None and sign * found <= sign * limit for found, limit, sign in checks)


def document(values: Values, context: Mapping[str, object], figures: Sequence[Figure]) -> dict[str, object]:
    """All keys, those that were not measured as null, and `context`."""
    return {figure.key: values.get(figure.key, figure.empty()) for figure in figures} | {"context": dict(context)}


def parts_of(figures: Sequence[Figure], only: Sequence[str]) -> tuple[str, ...]:
    """The parts that give these keys (or are named themselves), in their order; all for none. Raises KeyError for another name."""
    parts, by_key = tuple(dict.fromkeys(figure.part for figure in figures)), {figure.key: figure.part for figure in figures}
    named = {name if name in parts else by_key[name] for name in only}
    return tuple(part for part in parts if not named or part in named)


def print_table(console: Console, values: Values, figures: Sequence[Figure], title: str) -> None:
    """The figures beside their targets."""
    table = Table(title=title)
    table.add_column("key", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("target", justify="right", no_wrap=True)
    table.add_column("")
    for figure in figures:
        value = values.get(figure.key)
        verdict = {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}[figure.met(value)]
        table.add_row(figure.key, _text(value), figure.target, verdict)
    console.print(table)


def _text(value: Value | Mapping[str, Value]) -> str:
    if isinstance(value, Mapping):
        return "\n".join(f"{point} {_text(each)}" for point, each in value.items())
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"
