"""Cells of the matrix: a cluster, its traffic and its load, drawn from factors by a published seed, after the named ones.

Capacity of an instance for a model, in requests/s, with batches of n = min(256, KV capacity / (p + o/2)) and mean prompt p and output o:

    n / (o * step(n, n * (p + o/2)) + n * prefill(p))

An instance that serves models with shares s_m has the harmonic mean, 1 / sum(s_m / capacity_m), without model swaps; a cluster has the sum
of its instances. `load` is arrivals over that: lateness at 1.0 comes from order or batch size, not from want of GPUs alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np

from qlm_core.profiles.hardware_profile import HardwareProfile
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_load.demo.settings import DemoConfig, demo_config_path
from qlm_load.matrix.lengths import AZURE, KINDS, mean_tokens
from qlm_load.workload.workload import SLO_CLASSES, classes_of
from qlm_process.config import load_config

T = TypeVar("T")

CELLS_SEED = 20_261_125
"""Seed of the published cells."""
CELLS = 24
"""Number of drawn cells."""
QUICK_CELLS = 6
BATCH_MAX = 256
"""Requests of a batch in the capacity figures, as shipped (`agent.batch_max`)."""
REQUESTS_MIN = 2_000
REQUESTS_MAX = 5_000
"""Most requests of a drawn cell; a larger one is drawn again."""
SPAN_MIN_SLOS, SPAN_MIN_S = 4.0, 60.0
"""Arrivals last at least this x the shortest SLO, and so many seconds: a shorter run shows mostly its beginning."""
INSIDE_SPAN = 3.0
"""A cell whose arrivals last this x its longest SLO or more has that SLO well inside the run: no request is postponed at no cost."""
MODELS_PER_INSTANCE_MAX = 3
STEADY_S, STEADY_QUICK_S = 3_600.0, 900.0
LONG_OUTPUTS_STRETCH = 3.0
"""Completion SLOs of answers that are several times as long."""

MODEL_COUNTS = (2, 3, 6)
INSTANCE_COUNTS = (1, 2, 4, 8)
PROFILES = ("Mistral-7B", "Mistral-7B", "Vicuna-13B")
"""Profiles of the models, in turn."""
CONTEXT_TOKENS_MAX = {"Mistral-7B": 8_192, "Vicuna-13B": 2_048}
GPUS = {
    "a100": ("A100-80GB",),
    "h100": ("H100-80GB",),
    "mixed": ("A100-80GB", "H100-80GB"),
    "mixed3": ("A100-80GB", "A10", "H100-80GB"),
}
"""By name: the GPUs of the instances, in turn. An A10 serves Mistral-7B alone."""
ARRIVALS = ("poisson", "bursty", "traced")
LOADS = (0.4, 0.6, 0.8, 0.9, 1.0, 1.15, 1.3)
MIXES = ("chat", "batch", "mixed")
PATIENT_S = (120.0, 300.0, 3_600.0)
URGENT_KINDS = (SloKind.COMPLETION, SloKind.FIRST_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloShare:
    """An SLO of requests, and their share of all."""

    name: str
    slo: Slo
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests for one model in one SLO class; `share` of all requests, relative to the others."""

    model: str
    slo_class: str
    slo: Slo
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One workload on one cluster. `models`: served by every instance. `gpus`: of each instance."""

    key: str
    models: tuple[ModelSpec, ...]
    gpus: tuple[str, ...]
    traffic: tuple[Traffic, ...]
    arrivals: str
    lengths: str
    rate_per_s: float
    requests: int

    @property
    def span_s(self) -> float:
        """Expected seconds of arrivals."""
        return self.requests / self.rate_per_s

    @property
    def urgent(self) -> str:
        return min(self.traffic, key=lambda each: each.slo.seconds).slo_class

    @property
    def longest_slo_s(self) -> float:
        return max(each.slo.seconds for each in self.traffic)

    @property
    def inside(self) -> bool:
        """The longest SLO is well inside the run."""
        return INSIDE_SPAN * self.longest_slo_s <= self.span_s

    @property
    def load(self) -> float:
        return self.rate_per_s / capacity_per_s(self.models, self.gpus, self.lengths, model_shares(self.traffic))


def cells(cells_seed: int = CELLS_SEED, *, quick: bool = False) -> tuple[Cell, ...]:
    """The named cells, then those drawn by a seed; fewer of these if `quick`."""
    return (*named_cells(STEADY_QUICK_S if quick else STEADY_S), *drawn_cells(cells_seed, QUICK_CELLS if quick else CELLS))


def named_cells(steady_s: float = STEADY_S) -> tuple[Cell, ...]:
    """Workloads that are reported by name. `steady_s`: seconds of arrivals of those that judge the steady state."""
    pair = ("A100-80GB", "A100-80GB")
    specs = _models(1)
    overload = 1.3 * capacity_per_s(specs, pair, AZURE, {specs[0].name: 1.0})

    def alone(key: str, rate_per_s: float, requests: float, patient_s: float) -> Cell:
        return Cell(
            key=key,
            models=specs,
            gpus=pair,
            traffic=_traffic(specs, _mixed(patient_s, SloKind.COMPLETION), tails=False),
            arrivals="poisson",
            lengths=AZURE,
            rate_per_s=rate_per_s,
            requests=round(requests),
        )

    return (
        alone("one_model_two_gpus", 12.0, 3_000, 3_600.0),
        alone("overload", overload, 4_000, 300.0),
        _demo(),
        alone("steady_state_9", 9.0, 9.0 * steady_s, 300.0),
        alone("steady_state_11", 11.0, 11.0 * steady_s, 300.0),
    )


def drawn_cells(seed: int, count: int) -> tuple[Cell, ...]:
    """Half of them with one model, and every third with its longest SLO well inside the run."""
    chance = np.random.Generator(np.random.PCG64(seed))
    found: dict[str, Cell] = {}
    while len(found) < count:
        cell = _drawn(chance, one_model=len(found) % 2 == 0, inside=len(found) % 3 == 0)
        if cell is not None:
            found.setdefault(cell.key, cell)
    return tuple(found.values())


def capacity_per_s(models: Sequence[ModelSpec], gpus: Sequence[str], lengths: str, shares: dict[str, float]) -> float:
    """Requests/s of a cluster (see the module). `shares`: of each model's requests, by name."""
    total = sum(shares.values())
    parts = ([shares[spec.name] / total / _capacity_per_s(gpu, spec, lengths) for spec in models if shares.get(spec.name)] for gpu in gpus)
    return sum(1.0 / sum(part) for part in parts)


def model_shares(traffic: Sequence[Traffic]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for each in traffic:
        shares[each.model] = shares.get(each.model, 0.0) + each.share
    return shares


def _capacity_per_s(gpu: str, spec: ModelSpec, lengths: str) -> float:
    row = _shipped().hardware_of_pair(gpu, 1, spec)
    assert row is not None, f"{spec.profile} on {gpu}"
    prompt, output = mean_tokens(lengths, spec.context_tokens_max)
    return _served_per_s(row, prompt, output)


def _served_per_s(row: HardwareProfile, prompt: float, output: float) -> float:
    held = prompt + output / 2
    batch = min(BATCH_MAX, row.kv_capacity_tokens / held)
    return batch / (output * row.decode_step_s(batch, batch * held) + batch * row.prefill_work_s(prompt, prompt * prompt))


@cache
def _shipped() -> ProfileSnapshot:
    return shipped_snapshot()


# Drawing --------------------------------------------------------------------------------------------------------------


def _drawn(chance: np.random.Generator, *, one_model: bool, inside: bool) -> Cell | None:
    """A cell, or None if the factors conflict."""

    def pick(choices: Sequence[T]) -> T:
        return choices[int(chance.integers(len(choices)))]

    model_count = 1 if one_model else pick(MODEL_COUNTS)
    first_profile = pick(range(len(PROFILES))) if one_model else 0
    instances, gpu_kind = pick(INSTANCE_COUNTS), pick(tuple(GPUS))
    arrivals, lengths, mix, load = pick(ARRIVALS), pick(tuple(KINDS)), pick(MIXES), pick(LOADS)
    patient_s, urgent_kind = pick(PATIENT_S), pick(URGENT_KINDS)
    tails = pick((False, True)) and not one_model and mix == "mixed"
    models = _models(model_count, first_profile)
    a10 = gpu_kind == "mixed3" and any(spec.profile != "Mistral-7B" for spec in models)
    if a10 or model_count > MODELS_PER_INSTANCE_MAX * instances or (gpu_kind.startswith("mixed") and instances < len(GPUS[gpu_kind])):
        return None
    classes = _mixed(patient_s, urgent_kind) if mix == "mixed" else _chat() if mix == "chat" else _batch()
    if lengths == "long_outputs":
        classes = tuple(map(_stretched, classes))
    gpus = tuple(GPUS[gpu_kind][at % len(GPUS[gpu_kind])] for at in range(instances))
    traffic = _traffic(models, classes, tails=tails)
    rate_per_s = load * capacity_per_s(models, gpus, lengths, model_shares(traffic))
    seconds = [each.slo.seconds for each in classes]
    span_s = max(SPAN_MIN_S, SPAN_MIN_SLOS * min(seconds), INSIDE_SPAN * max(seconds) if inside else 0.0)
    requests = max(REQUESTS_MIN, math.ceil(span_s * rate_per_s))
    if requests > REQUESTS_MAX:
        return None
    kind = f"{mix}{patient_s:g}{'-first' if urgent_kind is SloKind.FIRST_TOKEN else ''}" if mix == "mixed" else mix
    name = f"{model_count}x{models[0].profile[0]}{'-tails' if tails else ''}_{instances}x{gpu_kind}_{kind}_{arrivals}_{lengths}_{load:g}"
    return Cell(
        key=name,
        models=models,
        gpus=gpus,
        traffic=traffic,
        arrivals=arrivals,
        lengths=lengths,
        rate_per_s=rate_per_s,
        requests=requests,
    )


def _models(count: int, first_profile: int = 0) -> tuple[ModelSpec, ...]:
    profiles = [PROFILES[(first_profile + number) % len(PROFILES)] for number in range(count)]
    return tuple(
        ModelSpec(name=f"model-{number}", profile=profile, context_tokens_max=CONTEXT_TOKENS_MAX[profile])
        for number, profile in enumerate(profiles)
    )


def _chat() -> tuple[SloShare, ...]:
    return (_class("interactive", 5.0, 0.5, SloKind.FIRST_TOKEN), _class("answer", 20.0, 0.5))


def _batch() -> tuple[SloShare, ...]:
    return (_class("batch-1", 60.0, 0.5), _class("batch-2", 300.0, 0.5))


def _mixed(patient_s: float, urgent_kind: SloKind) -> tuple[SloShare, ...]:
    urgent_s = 5.0 if urgent_kind is SloKind.FIRST_TOKEN else 20.0
    return (_class("interactive", urgent_s, 0.5, urgent_kind), _class("batch-1", 60.0, 0.25), _class("patient", patient_s, 0.25))


def _class(name: str, seconds: float, share: float, kind: SloKind = SloKind.COMPLETION) -> SloShare:
    return SloShare(name=name, slo=Slo(kind=kind, seconds=seconds), share=share)


def _stretched(each: SloShare) -> SloShare:
    factor = LONG_OUTPUTS_STRETCH if each.slo.kind is SloKind.COMPLETION else 1.0
    return _class(each.name, factor * each.slo.seconds, each.share, each.slo.kind)


def _traffic(models: Sequence[ModelSpec], classes: Sequence[SloShare], *, tails: bool) -> tuple[Traffic, ...]:
    """The n-th model has a share of 1/n. `tails`: all but the first have none of the most urgent class, as in workload W_A of QLM."""
    found = []
    for number, spec in enumerate(models):
        own = classes[1:] if tails and number else classes
        total = sum(each.share for each in own)
        found += [Traffic(model=spec.name, slo_class=each.name, slo=each.slo, share=each.share / total / (number + 1)) for each in own]
    return tuple(found)


def _demo() -> Cell:
    """The workload of `python -m qlm_load demo`."""
    config = load_config(DemoConfig, demo_config_path())
    found = []
    for model in config.shares():
        classes, shares = classes_of(model, SLO_CLASSES)
        for each, share in zip(classes, shares, strict=True):
            slo = Slo(kind=SloKind.COMPLETION, seconds=each.slo_s)
            found.append(Traffic(model=model.name, slo_class=each.name, slo=slo, share=model.share * share / sum(shares)))
    return Cell(
        key="demo",
        models=tuple(model.spec() for model in config.models),
        gpus=("A100-80GB", "H100-80GB"),
        traffic=tuple(found),
        arrivals="traced",
        lengths=AZURE,
        rate_per_s=config.load.rate_per_s,
        requests=config.load.requests,
    )
