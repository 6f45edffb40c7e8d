"""How much longer the outputs of a class are for each token more of the prompt: a line of least squares that fades.

A class holds prompts of up to four times the same length, and outputs may follow the prompt within it too. Where the prompts that come
change, the mean of its finishes is that of the prompts before. The prompts of those that wait are known, so their outputs are expected
along this line (`WorkloadProfile.along_prompts`). It is flatter than that of least squares by how little that stands out from chance. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from qlm_core.workload_profile import WorkloadProfile


@dataclass(slots=True)
class PromptSlope:
    """Of one class: faded means, variances and the covariance of prompts and outputs; `weight` is what the weights sum up to."""

    weight: float = 0.0
    prompt: float = 0.0
    output: float = 0.0
    prompt_variance: float = 0.0
    output_variance: float = 0.0
    covariance: float = 0.0

    def restore(self, weight: float, profile: WorkloadProfile) -> None:
        """Goes on from a published row, as of finishes of this weight."""
        self.weight = weight
        self.prompt, self.output = profile.prompt_tokens_mean, profile.output_tokens_mean
        self.prompt_variance, self.output_variance = profile.prompt_tokens_variance, profile.output_tokens_variance
        most = (self.prompt_variance * self.output_variance) ** 0.5
        self.covariance = min(max(profile.output_per_prompt_token * self.prompt_variance, -most), most)

    def add(self, prompt_tokens: float, output_tokens: float, memory: float) -> None:
        """A finish; `memory`: finishes after which an old one weighs 1 / e."""
        self.weight = self.weight * (1.0 - 1.0 / memory) + 1.0
        share = 1.0 / self.weight
        longer, more = prompt_tokens - self.prompt, output_tokens - self.output
        self.prompt += share * longer
        self.output += share * more
        self.prompt_variance = (1.0 - share) * (self.prompt_variance + share * longer * longer)
        self.output_variance = (1.0 - share) * (self.output_variance + share * more * more)
        self.covariance = (1.0 - share) * (self.covariance + share * longer * more)

    @property
    def tokens(self) -> float:
        """Of output for each of the prompt: the slope of least squares, less the share of its square that chance alone would make (the
        positive part of James and Stein's estimator); 0 where it is no more than chance."""
        spread = self.prompt_variance * self.output_variance
        if spread <= 0.0:
            return 0.0
        explained = min(1.0, self.covariance * self.covariance / spread)
        chance = (1.0 - explained) / self.weight
        return self.covariance / self.prompt_variance * (1.0 - chance / explained) if explained > chance else 0.0
