"""Workloads: the requests of a replay and their times, from a trace or generated in its shape, all by seed.

A workload is the same in every process for the same spec and seed: numbers come from numpy's PCG64 raw uniforms and closed-form inverse
distributions, never from `hash()` or set order.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import numpy as np
from scipy.special import gammaincinv

from qlm.messages import Prompt
from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.simulated_model import LENGTH_TOKEN_BASE, answer_tokens, prompt_digest
from qlm_load.workload import azure_shape
from qlm_load.workload.output_bounds import output_bound
from qlm_load.workload.trace import Trace, TraceRow

T = TypeVar("T")

REQUESTS_MAX = 1_000_000
"""Most requests of a workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """A class of requests: `slo_s` trace seconds from arrival to the last token; `share` of all requests, relative to the others."""

    name: str
    slo_s: float
    share: float


SLO_CLASSES: tuple[SloClass, ...] = (
    SloClass(name="interactive", slo_s=20.0, share=0.5),
    SloClass(name="batch-1", slo_s=60.0, share=0.3),
    SloClass(name="batch-2", slo_s=3600.0, share=0.2),
)
"""The three classes of QLM section 8 ("Experiment Setup"), half of the requests interactive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShare:
    """A served model and its share of the requests, relative to the others; `class_shares`: the shares of the SLO classes among them by
    name (empty: the classes' own). Lengths beyond its context are cut."""

    name: str
    share: float
    class_shares: Mapping[str, float] = field(default_factory=dict)
    context_tokens_max: int = 8192
    vocabulary_size: int = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """One request. `arrival_s` in trace seconds from the start; `slo_s` in trace seconds. `output_tokens_max`: its limit, 0 for none."""

    index: int
    request_id: str
    arrival_s: float
    model: str
    slo_class: str
    slo_s: float
    input_tokens: int
    output_tokens: int
    output_tokens_max: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests by arrival. `notes`: scaling, mapping and cuts of the trace. `texts`: for real models, each request's chat; none: requests
    are made of tokens, for simulated models."""

    seed: int
    requests: tuple[WorkloadRequest, ...]
    vocabulary_sizes: dict[str, int]
    notes: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def duration_s(self) -> float:
        """Trace seconds from the first to the last arrival."""
        return self.requests[-1].arrival_s

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals per trace second."""
        return len(self.requests) / self.duration_s if self.duration_s else float(len(self.requests))

    def prompt_ids(self, request: WorkloadRequest) -> list[int]:
        """The prompt: random tokens of the model's vocabulary, by seed and index, and last the token that sets an answer of `output_tokens`
        tokens for a simulated model. Made anew at each call, so that a workload is small."""
        generator = np.random.Generator(np.random.PCG64([self.seed, request.index]))
        ids = generator.integers(0, self.vocabulary_sizes[request.model], size=request.input_tokens - 1, dtype=np.uint32)
        return [*ids.tolist(), LENGTH_TOKEN_BASE + request.output_tokens]

    @property
    def answers_known(self) -> bool:
        """Whether `expected_output` exists: only for simulated models."""
        return not self.texts

    def prompt(self, request: WorkloadRequest) -> Prompt:
        return [{"role": "user", "content": self.texts[request.index]}] if self.texts else self.prompt_ids(request)

    def expected_output(self, request: WorkloadRequest) -> array[int]:
        """The answer that a simulated model must give, token by token: computed here, from the prompt alone."""
        digest = prompt_digest(request.model, self.prompt_ids(request))
        packed = answer_tokens(digest, 0, request.output_tokens, self.vocabulary_sizes[request.model])
        return array("I", np.frombuffer(packed, dtype="<u4").astype(np.uint32).tobytes())


def generate_rows(count: int, seed: int, rate_per_s: float = azure_shape.TRACE_RATE_PER_S) -> Trace:
    """`count` rows shaped like the Azure conversation trace (see azure_shape): the whole hour's rate profile is stretched over
    `count` requests at a mean of `rate_per_s`."""
    if not 1 <= count <= REQUESTS_MAX:
        raise ConfigError(f"a workload has 1 to {REQUESTS_MAX:,} requests, not {count:,}")
    if not 0 < rate_per_s < float("inf"):
        raise ConfigError(f"the rate must be a positive number of requests per second, it is {rate_per_s}")
    levels = np.random.Generator(np.random.PCG64([seed, 0x617A])).random((3, count))
    shape = azure_shape.GAP_GAMMA_SHAPE
    unit_times = np.concatenate([[0.0], np.cumsum(gammaincinv(shape, levels[0][1:]) / shape)])
    profile = azure_shape.RATE_PROFILE
    reached = np.concatenate([[0.0], np.cumsum(profile)]) / sum(profile)
    span_s = count / rate_per_s
    # Beyond the profile (the sum of the gaps is random) the mean rate continues.
    within = np.interp(unit_times / count, reached, np.linspace(0.0, span_s, len(reached)))
    arrivals = within + np.maximum(unit_times - count, 0.0) / rate_per_s
    rows = []
    for arrival_s, input_level, output_level in zip(arrivals.tolist(), levels[1].tolist(), levels[2].tolist(), strict=True):
        input_tokens = azure_shape.input_tokens_at(input_level)
        output_tokens = azure_shape.output_tokens_at(output_level, input_tokens)
        rows.append(TraceRow(arrival_s=round(arrival_s, 6), input_tokens=input_tokens, output_tokens=output_tokens))
    note = f"{count:,} requests generated in the shape of the Azure conversation trace 2023, seed {seed}, {rate_per_s:.2f} requests/s"
    return Trace(rows=tuple(rows), notes=(note,))


def make_workload(
    trace: Trace,
    models: Sequence[ModelShare],
    seed: int,
    classes: Sequence[SloClass] = SLO_CLASSES,
    rate_per_s: float | None = None,
    run_id: str = "load",
) -> Workload:
    """Assigns models and SLO classes by seed and scales arrivals to a mean of `rate_per_s` (None: as in the trace). A trace's own models
    are mapped to the served ones (see `_model_map`). Request ids begin with `run_id`: two runs against one queue need two, else the second
    gets the first one's answers. Raises ConfigError for no models or shares that are not positive."""
    if len(trace.rows) > REQUESTS_MAX:
        raise ConfigError(f"a workload has at most {REQUESTS_MAX:,} requests, the trace has {len(trace.rows):,}")
    notes = list(trace.notes)
    factor = 1.0
    if rate_per_s is not None and trace.duration_s > 0:
        own_rate_per_s = len(trace.rows) / trace.duration_s
        factor = own_rate_per_s / rate_per_s
        if abs(factor - 1) > 0.05:
            notes.append(f"arrivals scaled from {own_rate_per_s:.3g} to {rate_per_s:.3g} requests per trace second")
    levels = np.random.Generator(np.random.PCG64([seed, 0x6D6F])).random((len(trace.rows), 2)).tolist()
    bound_levels = np.random.Generator(np.random.PCG64([seed, 0x626F])).random(len(trace.rows)).tolist()
    by_name = _model_map(trace, models)
    if by_name:
        notes.append("models mapped: " + ", ".join(f"{theirs} -> {ours.name}" for theirs, ours in by_name.items()))
    requests, cut = [], 0
    for index, (row, (model_level, class_level), bound_level) in enumerate(zip(trace.rows, levels, bound_levels, strict=True)):
        model = by_name[row.model] if row.model in by_name else pick(models, [m.share for m in models], model_level)
        slo = pick(*classes_of(model, classes), class_level)
        output_tokens = min(row.output_tokens, model.context_tokens_max // 2)
        input_tokens = min(row.input_tokens, model.context_tokens_max - output_tokens)
        cut += (input_tokens, output_tokens) != (row.input_tokens, row.output_tokens)
        requests.append(
            WorkloadRequest(
                index=index,
                request_id=f"{run_id}-{index}",
                arrival_s=row.arrival_s * factor,
                model=model.name,
                slo_class=slo.name,
                slo_s=slo.slo_s,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                output_tokens_max=output_bound(output_tokens, bound_level),
            )
        )
    if cut:
        notes.append(f"{cut:,} requests cut to their model's context")
    sizes = {model.name: model.vocabulary_size for model in models}
    return Workload(seed=seed, requests=tuple(requests), vocabulary_sizes=sizes, notes=tuple(notes))


def classes_of(model: ModelShare, classes: Sequence[SloClass]) -> tuple[Sequence[SloClass], Sequence[float]]:
    """The classes of a model's requests, and their shares."""
    if not model.class_shares:
        return classes, [each.share for each in classes]
    unknown = model.class_shares.keys() - {each.name for each in classes}
    if unknown:
        raise ConfigError(f"{model.name}: no SLO class {', '.join(sorted(unknown))}; may be {', '.join(each.name for each in classes)}")
    chosen = [each for each in classes if each.name in model.class_shares]
    return chosen, [model.class_shares[each.name] for each in chosen]


def _model_map(trace: Trace, models: Sequence[ModelShare]) -> dict[str, ModelShare]:
    """A trace's models -> served models: by name if all are served, else the busiest first, round robin over the served ones."""
    counts = Counter(row.model for row in trace.rows if row.model is not None)
    served = {model.name: model for model in models}
    if all(name in served for name in counts):
        return {name: served[name] for name in counts}
    ordered = sorted(counts, key=lambda name: (-counts[name], name))
    return {name: models[position % len(models)] for position, name in enumerate(ordered)}


def pick(choices: Sequence[T], shares: Sequence[float], level: float) -> T:
    if not choices or min(shares) <= 0:
        raise ConfigError("models and SLO classes need positive shares")
    reached = list(accumulate(shares))
    return choices[min(bisect_right(reached, level * reached[-1]), len(choices) - 1)]
