"""Shared state of all parts of a bench."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.figures import Values
from benchmarks.queue.collector import Collector
from benchmarks.queue.plan import Sizes


@dataclass(slots=True, kw_only=True)
class Bench:
    """One run. Parts put their figures into `values`, and further findings into `details`, by part. `say`: progress, for people."""

    seed: int
    out: Path
    sizes: Sizes
    collector: Collector
    say: Callable[[str], None]
    values: Values = field(default_factory=dict)
    details: dict[str, object] = field(default_factory=dict)
