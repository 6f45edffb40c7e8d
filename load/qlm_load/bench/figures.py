"""The figures of the bench: their names, what they are to be, and how they are told."""

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
        """Whether it is as it is to be; None where it was not measured or nothing was asked."""
        values = value if isinstance(value, Mapping) else {"": value}
        checks = [(values.get(point), limit, 1.0) for point, limit in (self.most or {}).items()]
        checks += [(values.get(point), limit, -1.0) for point, limit in (self.least or {}).items()]
        if not checks or any(found is None for found, _, _ in checks):
            return None
        return all(found is not None and sign * found <= sign * limit for found, limit, sign in checks)


LEASE_TTL_S = 3.0
"""Life of a lease in the clusters of the bench: as by default."""

RATES = ("at_200", "at_400")
"""Requests per second."""

FIGURES: Sequence[Figure] = (
    Figure(key="accepts_per_s", part="accepts", target=">= 1,500", least={"": 1_500}),
    Figure(key="accepts_per_s_disk", part="accepts", target="stated"),
    Figure(key="added_p50_ms", part="added", target="at 200/s <= 4", points=RATES, most={"at_200": 4.0}),
    Figure(key="added_p99_ms", part="added", target="at 200/s <= 15", points=RATES, most={"at_200": 15.0}),
    Figure(key="fanout_tokens_per_s", part="fanout", target=">= 15,000", least={"": 15_000}),
    Figure(key="itl_p99_ms", part="fanout", target="<= 60", most={"": 60.0}),
    Figure(key="pull_100_p99_ms", part="pulls", target="<= 6", most={"": 6.0}),
    Figure(
        key="redis_bytes_per_request",
        part="bytes",
        target="<= 450, 600, 300",
        points=("full", "after_churn", "finished"),
        most={"full": 450.0, "after_churn": 600.0, "finished": 300.0},
    ),
    Figure(key="failover_first_plan_s", part="failover", target=f"<= {LEASE_TTL_S + 5:g}", most={"": LEASE_TTL_S + 5}),
    Figure(key="recover_p99_s", part="recover", target=f"<= {LEASE_TTL_S + 1:g}", most={"": LEASE_TTL_S + 1}),
    Figure(key="lost", part="campaign", target="0", most={"": 0}),
    Figure(key="doubled", part="campaign", target="0", most={"": 0}),
    Figure(key="hung", part="campaign", target="0", most={"": 0}),
    Figure(key="greedy_equal", part="campaign", target="1.0", least={"": 1.0}),
)
BY_KEY: Mapping[str, Figure] = {figure.key: figure for figure in FIGURES}
PARTS: tuple[str, ...] = tuple(dict.fromkeys(figure.part for figure in FIGURES))


def parts_of(only: Sequence[str]) -> tuple[str, ...]:
    """The parts that give these keys (or are named themselves), in their order; all for none. Raises KeyError for another name."""
    named = {name if name in PARTS else BY_KEY[name].part for name in only}
    return tuple(part for part in PARTS if not named or part in named)


def document(values: Values, context: Mapping[str, object], figures: Sequence[Figure] = FIGURES) -> dict[str, object]:
    """All keys, those that were not measured as null, and `context`."""
    return {figure.key: values.get(figure.key, figure.empty()) for figure in figures} | {"context": dict(context)}


def print_table(console: Console, values: Values, figures: Sequence[Figure] = FIGURES, title: str = "bench queue") -> None:
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
