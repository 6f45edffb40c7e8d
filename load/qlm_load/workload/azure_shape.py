"""The shape of the Azure conversation trace of 2023, as fitted parameters.

Source: `AzureLLMInferenceTrace_conv.csv` of Azure/AzurePublicDataset at commit b469a113cedc (CC-BY-4.0; Patel et al., Splitwise,
ISCA 2024): 19,366 requests in 3,502 s, 5.53 requests/s, mean 1,155 input and 211 output tokens, inter-arrival CV 1.09.

Arrivals: a Gamma renewal process under a slow rate. The trace's time was cut into 24 equal parts; the number of requests in each
is the rate profile. Time was rescaled by that profile (unit rate), and a Gamma distribution with location 0 was fitted to the
rescaled gaps by maximum likelihood: shape 0.923 (CV 1.04). The rest of the burstiness (raw CV 1.09, variance/mean of 10 s counts
3.9) is the profile. Consecutive rescaled gaps are almost uncorrelated (0.02 at lags 1 and 2), so a renewal process is enough.

Lengths: a small joint histogram by quantiles. Input tokens are drawn by inverse CDF from 42 quantiles, output tokens from the 14
conditional quantiles of the input's octile, both with linear interpolation of the logarithm between knots. The trace is strongly
multi-modal (system prompts: inputs near 200, 400, 1,050 and 4,080 tokens; answers near 90 and 400), which lognormals miss: a single
lognormal has a Kolmogorov-Smirnov distance of 0.16 (input) and 0.18 (output).

Two-sample Kolmogorov-Smirnov distance of 19,366 generated requests (seed 1) to the trace: input tokens 0.019, output tokens 0.017,
their sum 0.031, inter-arrival gaps 0.013. Mean tokens 1,163 and 215; Spearman's correlation of input and output 0.065 (trace 0.073);
inter-arrival CV 1.07 (1.09); variance/mean of 10 s counts 3.6 (3.9).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

TRACE_RATE_PER_S = 5.530
"""Mean arrivals per second of the trace."""

GAP_GAMMA_SHAPE = 0.923
"""Shape of the Gamma distribution of gaps at unit rate; the scale is its inverse (mean 1)."""

RATE_PROFILE: tuple[int, ...] = (
    586, 817, 650, 734, 744, 771, 687, 811, 848, 960, 990, 1141, 1137, 1055, 1046, 851, 807, 825, 866, 637, 619, 656, 596, 532,
)  # fmt: skip
"""Requests in each 24th of the trace's time."""

INPUT_LEVELS: tuple[float, ...] = (*(step / 40 for step in range(39)), 0.9875, 0.999, 1.0)
INPUT_QUANTILES: tuple[int, ...] = (
    2, 120, 181, 200, 207, 235, 372, 379, 387, 393, 396, 400, 403, 407, 414, 428, 703, 922, 984, 1005, 1020, 1034, 1045, 1058, 1071,
    1083, 1097, 1112, 1130, 1153, 1189, 1277, 1315, 1434, 1876, 2309, 2734, 4075, 4083, 4123, 6179, 14050,
)  # fmt: skip
"""Input tokens at INPUT_LEVELS."""

OUTPUT_INPUT_EDGES: tuple[int, ...] = (235, 396, 428, 1020, 1083, 1189, 2309)
"""Octiles of the input tokens: an input at or above the n-th edge uses row n of OUTPUT_QUANTILES."""

OUTPUT_LEVELS: tuple[float, ...] = (0.0, 0.02, 0.07, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93, 0.98, 1.0)
OUTPUT_QUANTILES: tuple[tuple[int, ...], ...] = (
    (11, 12, 53, 80, 106, 129, 152, 162, 175, 186, 217, 217, 248, 1000),
    (7, 14, 18, 51, 62, 70, 78, 84, 89, 95, 103, 119, 145, 436),
    (25, 71, 81, 86, 90, 94, 97, 101, 107, 115, 130, 145, 169, 200),
    (10, 42, 68, 86, 96, 114, 373, 393, 397, 411, 426, 453, 567, 921),
    (33, 78, 375, 386, 394, 397, 402, 411, 416, 429, 447, 520, 622, 1000),
    (28, 55, 363, 382, 393, 396, 401, 411, 418, 428, 451, 527, 625, 1000),
    (15, 42, 50, 66, 82, 97, 121, 145, 174, 210, 396, 417, 501, 954),
    (17, 27, 33, 39, 46, 51, 59, 69, 81, 98, 121, 148, 195, 757),
)
"""Output tokens at OUTPUT_LEVELS, one row for each octile of the input."""


def input_tokens_at(level: float) -> int:
    """Quantile of the input tokens, `level` in [0, 1]."""
    return _log_interpolated(level, INPUT_LEVELS, INPUT_QUANTILES)


def output_tokens_at(level: float, input_tokens: int) -> int:
    """Quantile of the output tokens given the input tokens, `level` in [0, 1]."""
    return _log_interpolated(level, OUTPUT_LEVELS, OUTPUT_QUANTILES[bisect_right(OUTPUT_INPUT_EDGES, input_tokens)])


def _log_interpolated(level: float, levels: Sequence[float], quantiles: Sequence[int]) -> int:
    right = min(bisect_right(levels, level), len(levels) - 1)
    left = right - 1
    share = (level - levels[left]) / (levels[right] - levels[left])
    return max(1, round(math.exp((1 - share) * math.log(quantiles[left]) + share * math.log(quantiles[right]))))
