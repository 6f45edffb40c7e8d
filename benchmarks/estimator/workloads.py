"""The load of the simulated engines: the public traces in arrival order, as requests of one model or of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.estimator.families import FAMILIES, family_rows
from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.request import RequestFacts, RequestKey, Slo, SloKind
from qlm_load.workload.trace import TraceRow, read_trace

MODEL = "mistral"
OUTPUT_TOKENS_MAX = 1 << 17
"""Traces do not record the limit of a request."""
SLO = Slo(kind=SloKind.COMPLETION, seconds=4096.0)
"""One objective for all, so that the order of deadlines is the order of arrival."""

FILES = {
    "azure": "azure_conv_2023",
    "azure_code": "azure_code_2023",
    "mooncake": "mooncake_conversation",
    "servegen": "servegen_6h_day2",
}
"""Traces that are reported."""
OTHER_FILES = {"servegen_other": "servegen_24h_day4", "mooncake_other": "mooncake_synthetic"}
"""Traces that constants were chosen on."""
TICKED = {"mooncake": 3.0, "mooncake_other": 3.0}
"""Seconds between the ticks that the arrivals of a trace were recorded in; they are spread evenly over a tick."""
PARTS = {"small": "m-small", "mid": "m-mid", "large": "m-large", "mixed": ""}
"""Runs of a ServeGen trace: the requests of one of its models by itself, or all of them as one model's. It has a few hundred of
deepseek-r1, which make no queue."""


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a run's requests: those of `model` in a trace, "": all."""

    trace: str
    model: str = ""


def _sources() -> dict[str, Source]:
    found = {}
    for trace in (*FILES, *OTHER_FILES):
        if trace.startswith("servegen"):
            found.update({f"{trace}_{part}": Source(trace, model) for part, model in PARTS.items()})
        else:
            found[trace] = Source(trace)
    return found


SOURCES = _sources()
"""By the name of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request, `number` in the order of arrival."""

    number: int
    arrival_s: float
    model: str
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""

    def facts(self, predicted_output_tokens: int = 0) -> RequestFacts:
        """As the planner knows it."""
        return RequestFacts(
            queue_id=str(self.number),
            key=RequestKey("", str(self.number)),
            acceptance_number=self.number + 1,
            accepted_s=self.arrival_s,
            model=self.model,
            slo=SLO,
            prompt_tokens=self.prompt_tokens,
            output_tokens_max=OUTPUT_TOKENS_MAX,
            predicted_output_tokens=predicted_output_tokens,
        )


def load_trace(folder: Path, name: str, seed: int, rows_max: int | None = None) -> tuple[Arrival, ...]:
    """The requests of a run of SOURCES or FAMILIES, as requests of MODEL. Raises ConfigError for a file that is not there or has no such
    requests."""
    if name in FAMILIES:
        return arrivals(family_rows(name, seed)[:rows_max])
    source = SOURCES.get(name)
    if source is None:
        raise ConfigError(f"a run is one of {', '.join([*SOURCES, *FAMILIES])}, got {name!r}")
    file = {**FILES, **OTHER_FILES}[source.trace]
    path = next((path for path in (folder / f"{file}.csv.gz", folder / f"{file}.csv") if path.exists()), None)
    if path is None:
        raise ConfigError(f"--traces {folder}: has no {file}.csv.gz")
    rows = [row for row in read_trace(path).rows if not source.model or row.model == source.model]
    if not rows:
        raise ConfigError(f"{path}: has no requests of {source.model}")
    return arrivals(rows[:rows_max], tick_s=TICKED.get(source.trace, 0.0), seed=seed)


def arrivals(rows: Sequence[TraceRow], *, tick_s: float = 0.0, seed: int = 0) -> tuple[Arrival, ...]:
    """The rows of a trace as requests of MODEL, those of a tick spread over it."""
    times_s = np.array([row.arrival_s for row in rows])
    if tick_s > 0.0:
        times_s = times_s + np.random.default_rng(seed).uniform(0.0, tick_s, len(rows))
    order = np.argsort(times_s, kind="stable")
    return tuple(
        Arrival(
            number=number,
            arrival_s=float(times_s[at] - times_s[order[0]]),
            model=MODEL,
            prompt_tokens=rows[at].input_tokens,
            output_tokens=rows[at].output_tokens,
            tenant=rows[at].client or "",
        )
        for number, at in enumerate(order)
    )


def stretched(requests: Sequence[Arrival], duration_s: float) -> tuple[Arrival, ...]:
    """The same requests with the last arrival at `duration_s`; 0: all at once."""
    factor = duration_s / requests[-1].arrival_s
    return tuple(replace(request, arrival_s=request.arrival_s * factor) for request in requests)
