"""Predictions that clients got of a request's waiting and completion, and their outcomes. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from qlm_core.statistics.distribution import Normal, normal_quantile
from qlm_core.vocabulary.group import prompt_class

OUTSTANDING_MAX = 10_000
"""Predictions whose requests have not ended that are kept; beyond it new ones are left out, since the longest waits would otherwise never
be judged."""
AGE_MAX_S = 6 * 3600.0
"""A prediction this old is given up: the end of its request was missed, or nobody waits for it."""
DEPTH_EXPONENT_MAX = 9
"""Deeper than 4^9 = 262,144 requests ahead is one class."""


@dataclass(frozen=True, slots=True)
class PredictedQuantiles:
    """A time from acceptance as the client got it: `seconds` of each of LEVELS. `own`: its moments as the formulas gave them, before
    calibration."""

    seconds: tuple[float, ...]
    own: Normal


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A client's prediction at acceptance. `at_s`: of the prediction, on the queue's clock. `wait`: to the first start on an engine,
    None where there is none. `model` to `instance`: of the instance that the prediction was for; "" and 0 where it is not known."""

    queue_id: str
    at_s: float
    completion: PredictedQuantiles
    wait: PredictedQuantiles | None = None
    model: str = ""
    gpu: str = ""
    n_gpu: int = 0
    instance: str = ""
    requests_ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A prediction and the actual times of its completed request. `completion_s`: acceptance to the last token. `wait_s`: acceptance to the
    first start; None where that is not known, or was not of the first attempt. `at_s`: when the end was reported, on the queue's clock."""

    predicted: Predicted
    at_s: float
    completion_s: float
    wait_s: float | None = None


def quantiles_of(p50_s: float, p90_s: float, p99_s: float = 0.0, own: Normal | None = None) -> PredictedQuantiles:
    """Quantiles of which only the first two need to be known: the others are those of the normal through them."""
    deviation_s = max(0.0, p90_s - p50_s) / normal_quantile(0.9)
    normal = Normal(p50_s, deviation_s * deviation_s)
    return PredictedQuantiles((p50_s, p90_s, max(p90_s, p99_s or normal.quantile(0.99))), own or normal)


def depth_class(requests_ahead: int) -> str:
    """The power of four at or above the requests ahead: "16" for 5 to 16; "0" for none, "262144+" beyond the largest."""
    if requests_ahead <= 0:
        return "0"
    return prompt_class(requests_ahead) if requests_ahead <= 4**DEPTH_EXPONENT_MAX else f"{4**DEPTH_EXPONENT_MAX}+"
