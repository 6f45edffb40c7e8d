"""Workload rows of a profile snapshot: token counts of a class of requests, and how a class with few of them leans on a wider one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

from qlm_core.statistics.distribution import Normal
from qlm_core.statistics.length_curve import BINS, LengthCurve, curve_of_moments, unpacked
from qlm_core.vocabulary.group import OUTPUT_MARK, predicted_tokens_of, prompt_class_of

PRIOR_SAMPLES = 20.0
"""How many finished requests weigh as much as `WORKLOAD_PRIOR`, which is of another service."""
WIDER_SAMPLES = 5.0
"""How many weigh as much as what a class leans on, a wider class of its model or what was predicted of its outputs: the variance within
classes over that between their means (Buehlmann, Experience rating and credibility, 1967), which is 2 to 18 on public traces whose prompts
predict outputs. Where they predict nothing there is little to lose."""
LONG_FACTOR = 4.0
"""A class whose predicted output is so many times that of the wider class leans on the prediction: it takes its first finishes as long as
they are to become known, and it may hold most of the work by then."""

PREDICTED_SPREAD = 0.5
"""Variance of outputs over the square of the mean that was predicted for them, before any is known: on public traces 0.2 to 2."""

FIGURE_MAX = 1e18
"""More is no count of tokens, nor the square of one, and would overflow where figures are mixed."""

WorkloadKey = tuple[str, str, str]
"""(model, SLO class, token class); "" stands for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadProfile:
    """Token counts of a class of requests: the mean and variance of mu_o and sigma_o of QLM equation 3. "" stands for any.
    `output_shares`: of the bins of `LengthCurve` from `output_first_bin` on; empty: no more is known than mean and variance. `censored`:
    requests that have not ended, or never will, which the figures allow for. `uncached_share`: in (0, 1], of the tokens of prompts what the
    engines' prefix caches leave to compute; 1 where nothing is known."""

    model: str = ""
    slo_class: str = ""
    token_class: str = ""
    prompt_tokens_mean: float
    prompt_tokens_variance: float
    output_tokens_mean: float
    output_tokens_variance: float
    samples: int = 0
    censored: int = 0
    output_first_bin: int = 0
    output_shares: tuple[float, ...] = ()
    uncached_share: float = 1.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, (int, float)) and not 0.0 <= value <= FIGURE_MAX:  # False for NaN
                raise ValueError(f"workload profile {self.key}: {item.name} is finite, from 0 to {FIGURE_MAX:g}, got {value}")
        if self.output_tokens_mean <= 0.0 or not 0.0 < self.uncached_share <= 1.0:
            raise ValueError(f"workload profile {self.key}: output_tokens_mean is > 0, uncached_share above 0 and at most 1")
        shares = self.output_shares
        if shares and not (min(shares) >= 0.0 and 0.0 < sum(shares) < math.inf and self.output_first_bin + len(shares) <= BINS):
            raise ValueError(f"workload profile {self.key}: output_shares are >= 0 and finite, not all zero, and of {BINS} bins")

    @property
    def key(self) -> WorkloadKey:
        return (self.model, self.slo_class, self.token_class)

    @property
    def prompt_tokens(self) -> Normal:
        return Normal(self.prompt_tokens_mean, self.prompt_tokens_variance)

    @property
    def output_tokens(self) -> Normal:
        """O of QLM equation 3."""
        return Normal(self.output_tokens_mean, self.output_tokens_variance)

    def output_curve(self) -> LengthCurve:
        """The row's own distribution of O."""
        if self.output_shares:
            return unpacked(self.output_first_bin, self.output_shares)
        return curve_of_moments(self.output_tokens_mean, self.output_tokens_variance)


WORKLOAD_PRIOR = WorkloadProfile(
    prompt_tokens_mean=1154.7, prompt_tokens_variance=1108.8**2, output_tokens_mean=211.1, output_tokens_variance=162.9**2
)
"""Prior of a model without data: the moments of the Azure conversation trace of 2023 (AzurePublicDataset @ b469a113cedc,
AzureLLMInferenceTrace_conv.csv, CC-BY-4.0; Patel et al., Splitwise, ISCA 2024)."""


def wider_keys(key: WorkloadKey) -> list[WorkloadKey]:
    """Keys of the wider classes, the nearest first: the same of any SLO class, then without the predicted output, then its model."""
    model, slo_class, token_class = key
    prompt_class = prompt_class_of(token_class)
    chain = [(model, "", token_class), (model, "", prompt_class), (model, "", "")]
    if slo_class:
        chain.insert(1, (model, slo_class, prompt_class))
    return [wider for at, wider in enumerate(chain) if wider != key and wider not in chain[:at]]


def blend_all(rows: Iterable[WorkloadProfile]) -> dict[WorkloadKey, WorkloadProfile]:
    """Every row leaning on the next wider one that there is."""
    blended: dict[WorkloadKey, WorkloadProfile] = {}
    for row in sorted(rows, key=lambda row: (row.token_class != "", "/" in row.token_class, row.slo_class != "", row.key)):
        wider = wider_row(blended, row.key)
        blended[row.key] = _blend(row, wider, _weight(row, on_prior=wider is WORKLOAD_PRIOR))
    return blended


def wider_row(rows: Mapping[WorkloadKey, WorkloadProfile], key: WorkloadKey) -> WorkloadProfile:
    """Returns the nearest wider row, else the prior. Where that is of requests whose outputs were not
    predicted, and those of the class were predicted to be far longer, they have the predicted mean and PREDICTED_SPREAD."""
    found = next((rows[each] for each in wider_keys(key) if each in rows), WORKLOAD_PRIOR)
    predicted = predicted_tokens_of(key[2])
    if not _by_prediction(key, found):
        return found
    return replace(
        found,
        model=key[0],
        slo_class=key[1],
        token_class=key[2],
        output_tokens_mean=predicted,
        output_tokens_variance=PREDICTED_SPREAD * predicted**2,
        output_first_bin=0,
        output_shares=(),
    )


def _by_prediction(key: WorkloadKey, wider: WorkloadProfile) -> bool:
    return OUTPUT_MARK not in wider.token_class and predicted_tokens_of(key[2]) >= LONG_FACTOR * wider.output_tokens_mean


def blended_curve(
    own: Mapping[WorkloadKey, WorkloadProfile], blended: Mapping[WorkloadKey, WorkloadProfile], key: WorkloadKey
) -> LengthCurve:
    """The distribution of O of a class, leaning as its moments do. `own`: the rows as they were learned; `blended`: as they lean."""
    wider = next((each for each in wider_keys(key) if each in own), None)
    predicted = predicted_tokens_of(key[2])
    by_prediction = _by_prediction(key, WORKLOAD_PRIOR if wider is None else blended[wider])
    if by_prediction:
        curve = curve_of_moments(predicted, PREDICTED_SPREAD * predicted**2)
    else:
        curve = WORKLOAD_PRIOR.output_curve() if wider is None else blended_curve(own, blended, wider)
    row = own.get(key)
    return curve if row is None else row.output_curve().mixed(curve, _weight(row, on_prior=wider is None and not by_prediction))


def _weight(row: WorkloadProfile, *, on_prior: bool) -> float:
    return row.samples / (row.samples + (PRIOR_SAMPLES if on_prior else WIDER_SAMPLES))


def _blend(row: WorkloadProfile, wider: WorkloadProfile, weight: float) -> WorkloadProfile:
    """Mean and variance of the mixture of the row's requests, by their weight, and those of the wider class."""
    prompt = _mixture(row.prompt_tokens, wider.prompt_tokens, weight)
    output = _mixture(row.output_tokens, wider.output_tokens, weight)
    return replace(
        row,
        prompt_tokens_mean=prompt.mean,
        prompt_tokens_variance=prompt.variance,
        output_tokens_mean=output.mean,
        output_tokens_variance=output.variance,
    )


def _mixture(own: Normal, wider: Normal, weight: float) -> Normal:
    mean = weight * own.mean + (1.0 - weight) * wider.mean
    between = weight * (1.0 - weight) * (own.mean - wider.mean) ** 2
    return Normal(mean, weight * own.variance + (1.0 - weight) * wider.variance + between)
