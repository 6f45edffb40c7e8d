"""Batches for engines that batch statically: SLO-ODBS of UELLM (section 4.2, algorithm 1).

A static batch pads all prompts to its longest one and decodes until its longest output ends (section 4.2), so alike lengths waste less.
Requests are columns; a batch is a tuple of their positions, and batches are in the order in which they are to be served.

Algorithm 1 contradicts its own equations, and leaves L1, L2, the threshold and the rule of CM open. `Reading` has the ways to read it:

- Line 6 adds the largest SLO of the batch and line 7 *subtracts* its largest length, where equation 2 adds both.
- Line 8 weighs the SLO by w1, line 13 by w2. With w1 = 0 the algorithm is named SLO-DBS, with w2 = 0 output-driven: line 13.
- Line 2 sorts by SLO alone. The program that the authors published (HYIUYOU/UELLM, experiment/batch_algorithm) sorts by
  w1 x length + w2 x SLO, and compares the growth of both (line 7's sign) with 15,000 at L1 = L2 = 1.2, w1 = 0.5, w2 = 1. There the
  threshold never ends a batch, and a batch has 10 requests for each value of CM.

Only the published program has the order of figure 4 (`python -m benchmarks evaluate --paper uellm`, docs/reference/uellm.md): sorted by SLO
alone, ODBS saves no time over FIFO, whatever the sign. It is the default.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Batch = tuple[int, ...]

BATCH_MAX = 10
"""Requests of a batch at most, as in the program of UELLM."""


class Reading(StrEnum):
    """Ways to read algorithm 1: the published program; line 7 as printed; equations 1 to 3; and these with the weights of line 8."""

    PROGRAM = "program"
    LINE_7 = "line_7"
    EQUATION_2 = "equation_2"
    LINE_8 = "line_8"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRequests:
    """Columns of equal length. `output_tokens`: predicted."""

    slo_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints

    def __len__(self) -> int:
        return len(self.slo_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OdbsRule:
    """`w1` weighs output tokens, `w2` seconds of SLO (under `Reading.LINE_8` the other way round); `overhead`: L1 and L2. `threshold`:
    of `Total` (equation 3). A batch has at most `batch_max` requests, and at most threshold / CM ("adjust batch size according to the
    value of CM", line 20: the heaviest request's weight times the requests is within the threshold)."""

    w1: float = 0.5
    w2: float = 1.0
    threshold: float = 15_000.0
    overhead: float = 1.2
    batch_max: int = BATCH_MAX
    reading: Reading = Reading.PROGRAM


SLO_ODBS = OdbsRule()


def slo_odbs(requests: BatchRequests, rule: OdbsRule = SLO_ODBS) -> tuple[Batch, ...]:
    """Algorithm 1. One pass over the sorted requests: O(n log n)."""
    by_length, by_slo = (rule.w2, rule.w1) if rule.reading is Reading.LINE_8 else (rule.w1, rule.w2)
    length, slo_s = by_length * requests.output_tokens, by_slo * requests.slo_s
    order = np.argsort(length + slo_s if rule.reading is Reading.PROGRAM else requests.slo_s, kind="stable")
    sign_slo = -1.0 if rule.reading is Reading.PROGRAM else 1.0
    sign_length = -1.0 if rule.reading in (Reading.PROGRAM, Reading.LINE_7) else 1.0
    batches: list[list[int]] = []
    slo_most = length_most = cm = 0.0
    for place in order:
        size = len(batches[-1]) + 1 if batches else 1
        growth = slo_s[place] + sign_slo * slo_most + length[place] + sign_length * length_most
        heaviest = max(cm, float(length[place] + slo_s[place]))
        fits = size <= rule.batch_max and size * heaviest <= rule.threshold and growth * size * rule.overhead <= rule.threshold
        if size == 1 or not fits:
            batches.append([])
            slo_most = length_most = cm = 0.0
        batches[-1].append(int(place))
        slo_most, length_most = max(slo_most, float(slo_s[place])), max(length_most, float(length[place]))
        cm = max(cm, float(length[place] + slo_s[place]))
    return tuple(map(tuple, batches))
