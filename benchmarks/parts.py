"""A benchmark of parts: measured one after the other with progress on stderr, reported as one JSON object or a table."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import click

from benchmarks.figures import Figure, Values, document, parts_of, print_table
from qlm_cli.console import plain_console
from qlm_core.vocabulary.errors import ConfigError, QlmError
from qlm_load.progress import Progress

EXIT_FAILED = 1

Plan = TypeVar("Plan")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`values` by key; `details`: for the report's context."""

    values: Values
    details: Mapping[str, object] = field(default_factory=dict)


def late(module: str, function: str = "measure") -> Callable[[Plan], Measured]:
    """A function whose module is imported at its call: vLLM and the solver take seconds to load."""
    return lambda plan: getattr(import_module(module), function)(plan)


def bench_options(figures: Sequence[Figure], seed: str) -> Callable[[F], F]:
    """Options of a benchmark: `as_json`, `only`, `seed` (with its meaning) and `quick`."""
    names = dict.fromkeys([*(figure.part for figure in figures), *(figure.key for figure in figures)])
    options = (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line instead of a table."),
        click.option("--only", multiple=True, type=click.Choice([*names]), help="A key or a part; may be repeated. Default: all."),
        click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help=seed),
        click.option("--quick", is_flag=True, help="Small sizes: shows that all parts run; the figures mean nothing."),
    )

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@dataclass(slots=True, kw_only=True)
class Parts:
    """Results of the selected parts: `values` by key; `details` and `failures` by part. `only`: selected keys and parts, () for all."""

    title: str
    figures: Sequence[Figure]
    only: Sequence[str]
    load_before: float = field(default_factory=lambda: round(os.getloadavg()[0], 2))
    progress: Progress = field(default_factory=Progress)
    values: Values = field(default_factory=dict)
    details: dict[str, object] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def selected(self) -> tuple[str, ...]:
        return parts_of(self.figures, self.only)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Measures one part within: if it fails, that is reported, and the others run. Raises UsageError for wrong settings."""
        try:
            yield
        except ConfigError as error:
            raise click.UsageError(error.message) from error
        except QlmError as error:
            self._failed(name, error.message)
        except Exception as error:  # any error of an engine, or the end of its process: earlier results are kept
            traceback.print_exc()
            self._failed(name, f"{type(error).__name__}: {error}")

    def measure(self, functions: Mapping[str, Callable[[Plan], Measured]], plan: Plan) -> None:
        """Measures the selected parts, each by its function."""
        for name in self.selected:
            began_s = time.monotonic()
            with self.attempt(name):
                found = functions[name](plan)
                wanted = set(found.values) if not self.only or name in self.only else set(self.only)
                self.values |= {key: value for key, value in found.values.items() if key in wanted}
                self.details[name] = {**found.details, "took_s": round(time.monotonic() - began_s, 1)}

    def _failed(self, name: str, why: str) -> None:
        self.failures[name] = why
        self.progress.say(f"{name} FAILED: {why}")

    def print_results(self, context: Mapping[str, object], packages: Sequence[str], *, as_json: bool) -> None:
        """Prints on stdout, with the `context`, facts of the machine and the versions of `packages`. Ends the process with 1 if a part
        failed."""
        if as_json:
            whole = {
                "platform": platform.platform(),
                "python": platform.python_version(),
                "cores": os.cpu_count(),
                "load_before": self.load_before,
                "versions": {name: _version(name) for name in packages},
                "wall_s": round(self.progress.wall_s, 1),
                "failures": self.failures,
                "parts": self.details,
                **context,
            }
            click.echo(json.dumps(document(self.values, whole, self.figures)))
        else:
            print_table(plain_console(), self.values, self.figures, self.title)
        if self.failures:
            sys.exit(EXIT_FAILED)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
