"""The share of requests that are late where they end evenly between two times, each with a normal error."""

from __future__ import annotations

import math


def late_share(begin_s: float, end_s: float, deviation_s: float, due_s: float) -> float:
    """P(T > due) for T = a time even between begin and end, plus a normal error: closed form by the integral of the normal distribution's
    function. 0 for an infinite `due_s`."""
    if due_s == math.inf:
        return 0.0
    width_s = end_s - begin_s
    if width_s <= 1e-9:
        return 1.0 - _phi((due_s - end_s) / deviation_s) if deviation_s > 0.0 else float(end_s > due_s)
    if deviation_s <= 1e-9:
        return min(1.0, max(0.0, (end_s - due_s) / width_s))
    low, high = (due_s - end_s) / deviation_s, (due_s - begin_s) / deviation_s
    return min(1.0, max(0.0, 1.0 - (_integral(high) - _integral(low)) * deviation_s / width_s))


def _phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


def _integral(x: float) -> float:
    """Of the normal distribution's function, up to a constant."""
    return x * _phi(x) + math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
