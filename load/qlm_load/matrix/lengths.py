"""Shapes of prompts and answers: token counts as functions of uniform levels, so that a seed gives the same ones everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from qlm_load.workload import azure_shape
from qlm_load.workload.output_bounds import BOUNDED_TOKENS_MAX

MEAN_SAMPLES = 4_096

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Token counts by their median and the standard deviation of their logarithm."""

    median: float
    sigma: float

    def at(self, level: float) -> int:
        """The quantile at a level in (0, 1)."""
        return max(2, round(self.median * float(np.exp(self.sigma * ndtri(level)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKind:
    """One kind of request."""

    prompt: Lognormal
    output: Lognormal


SHORT = RequestKind(prompt=Lognormal(median=100, sigma=0.6), output=Lognormal(median=40, sigma=0.6))
LONG_PROMPTS = RequestKind(prompt=Lognormal(median=3_000, sigma=0.5), output=Lognormal(median=60, sigma=0.6))
LONG_OUTPUTS = RequestKind(prompt=Lognormal(median=200, sigma=0.6), output=Lognormal(median=700, sigma=0.5))

AZURE = "azure"
KINDS: Mapping[str, tuple[RequestKind, ...]] = {
    AZURE: (),
    "short": (SHORT,),
    "long_prompts": (LONG_PROMPTS,),
    "long_outputs": (LONG_OUTPUTS,),
    "bimodal": (SHORT, RequestKind(prompt=Lognormal(median=1_500, sigma=0.4), output=Lognormal(median=500, sigma=0.4))),
}
"""By name: the kinds that a request has with equal probability; of `azure`, the joint histogram of `azure_shape`."""


def token_counts(name: str, levels: npt.NDArray[np.float64], context_tokens_max: int) -> tuple[Tokens, Tokens]:
    """Prompt and output tokens of requests of a shape, cut to a context. `levels`: uniform in (0, 1), of shape (3, requests)."""
    kinds = KINDS[name]
    prompts, outputs = [], []
    for kind_level, prompt_level, output_level in levels.T.tolist():
        if kinds:
            kind = kinds[int(kind_level * len(kinds))]
            prompt, output = kind.prompt.at(prompt_level), kind.output.at(output_level)
        else:
            prompt = azure_shape.input_tokens_at(prompt_level)
            output = azure_shape.output_tokens_at(output_level, prompt)
        output = min(output, BOUNDED_TOKENS_MAX, context_tokens_max // 2)
        prompts.append(max(2, min(prompt, context_tokens_max - output)))
        outputs.append(output)
    return np.array(prompts), np.array(outputs)


@cache
def mean_tokens(name: str, context_tokens_max: int) -> tuple[float, float]:
    """Mean prompt and output tokens of a shape, over a fixed sample."""
    levels = np.random.Generator(np.random.PCG64(0)).random((3, MEAN_SAMPLES))
    prompts, outputs = token_counts(name, levels, context_tokens_max)
    return float(prompts.mean()), float(outputs.mean())
