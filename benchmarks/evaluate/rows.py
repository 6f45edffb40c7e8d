"""A row of an evaluation: a paper's claim, and ours over the seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.special import stdtrit

Range = tuple[float | None, float | None]
"""Least and most, None where it is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`claim`: the paper's figure. `ours`: one figure a seed. `note`: reason of a difference. `order`: the side on which the claim
    puts it."""

    name: str
    claim: Range
    ours: tuple[float, ...]
    note: str = ""
    order: Range = (None, None)

    @property
    def mean(self) -> float:
        return float(np.mean(self.ours))

    @property
    def interval(self) -> float:
        """Half of the 95% interval of the mean (Student's t); 0 for one seed."""
        count = len(self.ours)
        return float(stdtrit(count - 1, 0.975) * np.std(self.ours, ddof=1) / np.sqrt(count)) if count > 1 else 0.0

    @property
    def ratio(self) -> float | None:
        """Ours over the nearer end of the claim: 1 within it, None outside of an end at 0."""
        least, most = self.claim
        missed = least if least is not None and self.mean < least else most if most is not None and self.mean > most else None
        if missed is None:
            return 1.0
        return self.mean / missed if missed else None

    @property
    def order_held(self) -> bool | None:
        """Whether the whole interval is in `order`; None where that is open."""
        least, most = self.order
        if least is None and most is None:
            return None
        low, high = self.mean - self.interval, self.mean + self.interval
        return (least is None or low > least) and (most is None or high < most)

    def document(self) -> dict[str, object]:
        return {
            "claim": list(self.claim),
            "ours": round(self.mean, 4),
            "interval": round(self.interval, 4),
            "ratio": None if self.ratio is None else round(self.ratio, 3),
            "order_held": self.order_held,
            "seeds": [round(value, 4) for value in self.ours],
            "note": self.note,
        }


HELD = {True: "held", False: "not held", None: ""}


def print_rows(console: Console, rows: Iterable[Row], title: str) -> None:
    table = Table(title=title)
    for name in ("row", "claim", "ours", "ratio", "order", "note"):
        table.add_column(name, justify="left" if name in ("row", "note") else "right")
    for row in rows:
        ours = f"{row.mean:.3g}" + (f" ± {row.interval:.2g}" if row.interval else "")
        table.add_row(row.name, _range(row.claim), ours, "" if row.ratio is None else f"{row.ratio:.2f}", HELD[row.order_held], row.note)
    console.print(table)


def _range(claim: Sequence[float | None]) -> str:
    least, most = claim
    if least is None and most is None:
        return ""
    if least is None or most is None:
        return f"<= {most:g}" if least is None else f">= {least:g}"
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"
