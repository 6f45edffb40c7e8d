"""What clients were told of a request's waiting and completion, and what came. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from qlm_core.distribution import Normal, normal_quantile

DEPTH_EXPONENT_MAX = 9
"""Deeper than 4^9 = 262,144 requests ahead is one class."""


@dataclass(frozen=True, slots=True)
class Told:
    """Quantiles of a time from acceptance, in seconds, as the client was told. `own`: its moments as the formulas gave them, before
    calibration."""

    p50_s: float
    p90_s: float
    p99_s: float
    own: Normal


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What a client was told at acceptance. `at_s`: told, on the queue's clock. `wait`: to the first start on an engine,
    None where it is not told. `model` to `instance`: of the instance that the prediction was for; "" and 0 where it is not told."""

    queue_id: str
    at_s: float
    completion: Told
    wait: Told | None = None
    model: str = ""
    gpu: str = ""
    n_gpu: int = 0
    instance: str = ""
    requests_ahead: int = 0
    profile_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A prediction and what came: a completed request. `completion_s`: acceptance to the last token. `wait_s`: acceptance to the first
    start; None where that was not told, or was not the start of the first attempt. `at_s`: when the end was told, on the queue's clock."""

    predicted: Predicted
    at_s: float
    completion_s: float
    wait_s: float | None = None


def told(p50_s: float, p90_s: float, p99_s: float = 0.0, own: Normal | None = None) -> Told:
    """Quantiles of which only the first two need to be known: the others are those of the normal through them."""
    deviation_s = max(0.0, p90_s - p50_s) / normal_quantile(0.9)
    normal = Normal(p50_s, deviation_s * deviation_s)
    return Told(p50_s=p50_s, p90_s=p90_s, p99_s=max(p90_s, p99_s or normal.quantile(0.99)), own=own or normal)


def depth_class(requests_ahead: int) -> str:
    """The power of four at or above the requests ahead: "16" for 5 to 16; "0" for none, "262144+" beyond the largest."""
    if requests_ahead <= 0:
        return "0"
    for exponent in range(DEPTH_EXPONENT_MAX + 1):
        if requests_ahead <= 4**exponent:
            return str(4**exponent)
    return f"{4**DEPTH_EXPONENT_MAX}+"
