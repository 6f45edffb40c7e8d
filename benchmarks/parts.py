"""A benchmark of parts: measured one after the other with progress on stderr, reported as one JSON object or a table."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import click

from benchmarks.figures import Figure, Values, document, print_table
from qlm_cli.console import plain_console
from qlm_core.vocabulary.errors import ConfigError, QlmError
from qlm_load.progress import Progress

EXIT_FAILED = 1

Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`values` by key; `details`: for the report's context."""

    values: Values
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Parts:
    """Results of the selected parts: `values` by key; `details` and `failures` by part. `only`: the selected keys, () for all."""

    title: str
    figures: Sequence[Figure]
    only: Sequence[str]
    progress: Progress = field(default_factory=Progress)
    values: Values = field(default_factory=dict)
    details: dict[str, object] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def measure(self, name: str, measured: Callable[[Plan], Measured], plan: Plan) -> None:
        """Measures one part, if a key of it is selected. A failed part is reported and the others run; raises UsageError for wrong
        settings."""
        if not any(figure.part == name for figure in self.figures if not self.only or figure.key in self.only):
            return
        began_s = time.monotonic()
        try:
            found = measured(plan)
        except ConfigError as error:
            raise click.UsageError(error.message) from error
        except QlmError as error:
            self._failed(name, error.message)
            return
        except Exception as error:  # any error of an engine, or the end of its process: earlier results are kept
            traceback.print_exc()
            self._failed(name, f"{type(error).__name__}: {error}")
            return
        self.values |= {key: value for key, value in found.values.items() if not self.only or key in self.only}
        self.details[name] = {**found.details, "took_s": round(time.monotonic() - began_s, 1)}

    def _failed(self, name: str, why: str) -> None:
        self.failures[name] = why
        self.progress.say(f"{name} FAILED: {why}")

    def print_results(self, context: Mapping[str, object], packages: Sequence[str], *, as_json: bool) -> None:
        """Prints on stdout, with the `context`, facts of the machine and the versions of `packages`. Ends the process with 1 if a part
        failed."""
        if as_json:
            whole = {
                **context,
                "python": platform.python_version(),
                "cores": os.cpu_count(),
                "versions": {name: _version(name) for name in packages},
                "wall_s": round(self.progress.wall_s, 1),
                "failures": self.failures,
                "parts": self.details,
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
