"""Learns token counts of requests: mu_o and sigma_o of QLM equation 3 and their distribution, by class, with exponential forgetting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from qlm_core.profiles.profile import WorkloadKey, WorkloadProfile
from qlm_core.profiles.workload_profile import wider_row
from qlm_core.statistics.length_curve import BINS, FloatArray, packed
from qlm_core.vocabulary.group import prompt_class_of
from qlm_estimator.lengths.fading import FadingLengths
from qlm_estimator.newest_rows import put_newest

RUNNING_COUNTED_MAX = 4_096
"""Running requests that one publication reads; of more, a regular sample stands for all."""


@dataclass(slots=True)
class Moments:
    """Mean and variance under weights that fade by `1 - 1 / memory` with each new value; `weight` is what they sum up to."""

    weight: float = 0.0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, value: float, memory: float, weight: float = 1.0) -> None:
        kept = self.weight * (1.0 - 1.0 / memory)
        self.weight = kept + weight
        share = weight / self.weight
        gap = value - self.mean
        self.mean += share * gap
        self.variance = (1.0 - share) * (self.variance + share * gap * gap)


@dataclass(slots=True, kw_only=True)
class Begun:
    """A request that has been pulled and has not ended. `classes`: each with that class's clock when it first started. `produced_tokens`:
    made at least in runs that ended; `incarnation`: that runs it, "" while it waits again. `output_tokens_max`: what the context of its
    model holds beside its prompt, so that one that hangs is not taken for endless."""

    classes: Mapping[WorkloadKey, float]
    incarnation: str
    output_tokens_max: float
    produced_tokens: float = 0.0


@dataclass(slots=True)
class _Row:
    output: FadingLengths
    prompt: Moments = field(default_factory=Moments)
    uncached: Moments = field(default_factory=lambda: Moments(mean=1.0))  # shares of prompts, by their tokens


class LengthLearner:
    """Rows for (model, any, any), (model, any, token class) and (model, SLO class, token class), where a class with a predicted output
    ("256/o64") feeds that without ("256") too. At most `rows_max`: the one that was not updated for the longest goes first."""

    def __init__(self, *, memory: float, rows_max: int) -> None:
        """`memory`: finished requests of a class after which an old one weighs 1 / e."""
        self._memory = memory
        self._rows_max = rows_max
        self._rows: dict[WorkloadKey, _Row] = {}
        self._published: dict[WorkloadKey, WorkloadProfile] = {}
        self._changed: set[WorkloadKey] = set()
        self._held: set[WorkloadKey] = set()  # rows that were published with requests that ran

    def restore(self, profiles: tuple[WorkloadProfile, ...]) -> None:
        """Takes published rows as the state."""
        for profile in profiles[: self._rows_max]:
            weight = min(float(profile.samples), self._memory)
            row = _Row(FadingLengths(self._memory), Moments(weight, profile.prompt_tokens_mean, profile.prompt_tokens_variance))
            known = weight * profile.prompt_tokens_mean if profile.uncached_share < 1.0 else 0.0
            row.uncached = Moments(known, profile.uncached_share)
            row.output.restore(weight, profile.output_curve(), profile.output_tokens_mean)
            put_newest(self._rows, profile.key, row, self._rows_max)
            self._published[profile.key] = profile

    def classes(self, model: str, slo_class: str, token_class_name: str) -> dict[WorkloadKey, float]:
        """The classes of a request (`slo_class` "" where it is not known) with their clocks now: what it says about them later weighs by
        when it started."""
        prompt = prompt_class_of(token_class_name)
        keys = dict.fromkeys(
            [(model, "", ""), (model, "", prompt), (model, "", token_class_name)]
            + ([(model, slo_class, prompt), (model, slo_class, token_class_name)] if slo_class else [])
        )
        return {key: row.output.clock if (row := self._rows.get(key)) is not None else 0.0 for key in keys}

    def uncached_share(self, classes: Mapping[WorkloadKey, float]) -> float:
        """The expected share of the prompt of a request of these classes that is computed: as of the narrowest that has finished any."""
        return next((row.uncached.mean for key in reversed([*classes]) if (row := self._rows.get(key)) is not None), 1.0)

    def finish(
        self, classes: Mapping[WorkloadKey, float], prompt_tokens: int, output_tokens: int, cached_tokens: int | None = None
    ) -> None:
        """One finished request; `classes` as at its start. `cached_tokens`: of its prompt; None, and those that no prompt has, teach
        nothing."""
        for key, started in classes.items():
            row = self._rows.get(key) or _Row(FadingLengths(self._memory))
            put_newest(self._rows, key, row, self._rows_max)
            row.prompt.add(float(prompt_tokens), self._memory)
            if cached_tokens is not None and cached_tokens < prompt_tokens:
                row.uncached.add(1.0 - cached_tokens / prompt_tokens, self._memory, float(prompt_tokens))
            row.output.finish(float(output_tokens), started)
            self._changed.add(key)

    def give_up(self, classes: Mapping[WorkloadKey, float], produced_tokens: float) -> None:
        """A request that was cancelled, expired or failed after it had made at least so many tokens."""
        for key, started in classes.items():
            if (row := self._rows.get(key)) is not None:
                row.output.give_up(produced_tokens, started)
                self._changed.add(key)

    def profiles(self, running: Iterable[tuple[Begun, float]] = ()) -> tuple[WorkloadProfile, ...]:
        """The rows by key. `running`: requests that have not ended, with what each has made at least."""
        self._published = {key: profile for key, profile in self._published.items() if key in self._rows}
        held = self._running(list(running))
        changed = self._changed | self._held | held.keys()
        # Wider rows first: others lean on what is published of them.
        for key in sorted(changed & self._rows.keys(), key=lambda key: (key[2] != "", "/" in key[2], key[1] != "", key)):
            self._published[key] = self._profile(key, self._rows[key], held.get(key, _NONE_RUNNING))
        self._changed, self._held = set(), set(held)
        return tuple(self._published[key] for key in sorted(self._published))

    def _running(self, running: list[tuple[Begun, float]]) -> dict[WorkloadKey, FloatArray]:
        """Weights by bin, for each class that has any."""
        step = -(-len(running) // RUNNING_COUNTED_MAX) or 1
        bounds: dict[WorkloadKey, list[tuple[float, float]]] = {}
        for begun, tokens in running[::step]:
            for key, started in begun.classes.items():
                bounds.setdefault(key, []).append((tokens, started))
        return {key: step * self._rows[key].output.running_of(found) for key, found in bounds.items() if key in self._rows}

    def _profile(self, key: WorkloadKey, row: _Row, running: FloatArray) -> WorkloadProfile:
        wider = wider_row(self._published, key)
        curve = row.output.curve(running, wider.output_curve())
        first, shares = packed(curve.shares) if curve is not None else (0, ())
        mean, variance = row.output.moments(curve) if curve is not None else (wider.output_tokens_mean, wider.output_tokens_variance)
        model, slo_class, tokens = key
        return WorkloadProfile(
            model=model,
            slo_class=slo_class,
            token_class=tokens,
            prompt_tokens_mean=row.prompt.mean,
            prompt_tokens_variance=max(0.0, row.prompt.variance),
            output_tokens_mean=mean,
            output_tokens_variance=variance,
            samples=round(row.prompt.weight),
            censored=round(row.output.censored(running)),
            output_first_bin=first,
            output_shares=shares,
            uncached_share=row.uncached.mean,
        )


_NONE_RUNNING: FloatArray = np.zeros(BINS)
