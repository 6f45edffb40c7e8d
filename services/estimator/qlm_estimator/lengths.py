"""Learns token counts of finished requests: mu_o and sigma_o of QLM equation 3, per class, with exponential forgetting."""

from __future__ import annotations

from dataclasses import dataclass

from qlm_core.group import token_class
from qlm_core.profile import WorkloadKey, WorkloadProfile


@dataclass(slots=True)
class Moments:
    """Mean and variance under weights that fade by `1 - 1 / memory` with each new value; `weight` is what they sum up to."""

    weight: float = 0.0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, value: float, memory: float) -> None:
        kept = self.weight * (1.0 - 1.0 / memory)
        self.weight = kept + 1.0
        share = 1.0 / self.weight
        gap = value - self.mean
        self.mean += share * gap
        self.variance = (1.0 - share) * (self.variance + share * gap * gap)


@dataclass(slots=True)
class _Row:
    prompt: Moments
    output: Moments


class LengthLearner:
    """Rows for (model, SLO class, token class), (model, any, token class) and (model, any, any). At most `rows_max`: the one that was not
    updated for the longest goes first."""

    def __init__(self, *, memory: float, rows_max: int) -> None:
        """`memory`: finished requests of a class after which an old one weighs 1 / e."""
        self._memory = memory
        self._rows_max = rows_max
        self._rows: dict[WorkloadKey, _Row] = {}

    def restore(self, profiles: tuple[WorkloadProfile, ...]) -> None:
        """Takes published rows as the state."""
        for profile in profiles[: self._rows_max]:
            weight = min(float(profile.samples), self._memory)
            self._rows[profile.key] = _Row(
                Moments(weight, profile.prompt_tokens_mean, profile.prompt_tokens_variance),
                Moments(weight, profile.output_tokens_mean, profile.output_tokens_variance),
            )

    def add(self, model: str, slo_class: str, prompt_tokens: int, output_tokens: int) -> None:
        """One finished request; `slo_class` "" where it is not known."""
        tokens = token_class(prompt_tokens)
        keys = [(model, "", ""), (model, "", tokens)]
        if slo_class:
            keys.append((model, slo_class, tokens))
        for key in keys:
            row = self._rows.pop(key, None) or _Row(Moments(), Moments())
            self._rows[key] = row  # the last in order is the newest
            row.prompt.add(float(prompt_tokens), self._memory)
            row.output.add(float(output_tokens), self._memory)
        while len(self._rows) > self._rows_max:
            del self._rows[next(iter(self._rows))]

    def model_profile(self, model: str) -> WorkloadProfile | None:
        """The row for any request of a model, if one finished."""
        row = self._rows.get((model, "", ""))
        return None if row is None else _profile((model, "", ""), row)

    def profiles(self) -> tuple[WorkloadProfile, ...]:
        """The rows by key."""
        return tuple(_profile(key, row) for key, row in sorted(self._rows.items()))


def _profile(key: WorkloadKey, row: _Row) -> WorkloadProfile:
    model, slo_class, tokens = key
    return WorkloadProfile(
        model=model,
        slo_class=slo_class,
        token_class=tokens,
        prompt_tokens_mean=row.prompt.mean,
        prompt_tokens_variance=max(0.0, row.prompt.variance),
        output_tokens_mean=row.output.mean,
        output_tokens_variance=max(0.0, row.output.variance),
        samples=round(row.output.weight),
    )
