"""How long each step of a simulated engine really takes. The estimator knows neither this formula nor its noise.

A step costs its weights once, a share per sequence and per context token, and its prefill tokens, with a square part for attention that is
not the profile's. Each step is multiplied by lognormal noise of mean 1, and all of them by one hidden bias of the
instance.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from qlm_core.profiles.profile import HardwareProfile

STEP_NOISE_MIN = 0.05
"""Least relative standard deviation of a step."""

BIAS_MAX = 0.15
"""Most that an instance is faster or slower than its profile, relative."""

ATTENTION_SHARE = 2e-5
"""Quadratic prefill time per token squared, over the linear time per token: 1.7e-6/0.075, 2.7e-6/0.135 and 2.2e-6/0.19 ms on an A100."""

_DRAWS = 512


class InstanceNoise:
    """The randomness of one instance, by its seed: the bias is drawn once, so it is the same for all its models and after a restart."""

    def __init__(self, *, seed: int, instance: str, step_noise: float, bias_max: float) -> None:
        """`step_noise`: relative standard deviation of a step, at least STEP_NOISE_MIN. `bias_max`: 0 to BIAS_MAX."""
        if not step_noise >= STEP_NOISE_MIN or not 0.0 <= bias_max <= BIAS_MAX:
            raise ValueError(f"step noise >= {STEP_NOISE_MIN} and bias within 0 to {BIAS_MAX} needed, got {step_noise} and {bias_max}")
        self._random = np.random.Generator(np.random.PCG64([seed, zlib.crc32(instance.encode())]))
        self.bias = 1.0 + float(self._random.uniform(-bias_max, bias_max))
        self._sigma = float(np.sqrt(np.log1p(step_noise**2)))
        self._factors: list[float] = []

    def factor(self) -> float:
        """Bias and fresh noise of one step or one load."""
        if not self._factors:
            draws = self._random.lognormal(-(self._sigma**2) / 2.0, self._sigma, _DRAWS)
            self._factors = (self.bias * draws).tolist()
        return self._factors.pop()


class StepTiming:
    """Durations of one model on one instance, in real seconds: the profile's over `time_scale`."""

    def __init__(self, profile: HardwareProfile, noise: InstanceNoise, time_scale: float) -> None:
        self._profile = profile
        self._noise = noise
        self._scale = 1e-3 / time_scale
        self._time_scale = time_scale

    def step_s(self, sequences: int, context_tokens: int, prefills: Sequence[tuple[int, int]]) -> float:
        """One step: `sequences` decode over `context_tokens` in all; `prefills` are (tokens before the chunk, tokens of the chunk)."""
        return self.expected_step_s(sequences, context_tokens, prefills) * self._noise.factor()

    def expected_step_s(self, sequences: int, context_tokens: int, prefills: Sequence[tuple[int, int]]) -> float:
        """A step without bias and noise."""
        profile = self._profile
        if sequences:
            # The prefill rides along: the weights are read once, by the decode part.
            ms = profile.decode_a_ms + profile.decode_b_ms_per_seq * sequences + profile.decode_c_ms_per_context_token * context_tokens
        else:
            ms = profile.prefill_base_ms
        for before, tokens in prefills:
            quadratic = ATTENTION_SHARE * ((before + tokens) ** 2 - before**2)
            ms += profile.prefill_ms_per_token * (tokens + quadratic)
        return ms * self._scale

    def disk_to_host_s(self) -> float:
        """Reading the weights into host memory."""
        return self._profile.load_disk_to_cpu_s / self._time_scale * self._noise.factor()

    def host_to_gpu_s(self) -> float:
        """Copying the weights from host memory."""
        return self._profile.load_cpu_to_gpu_s / self._time_scale * self._noise.factor()

    def kv_swap_s(self, tokens: int) -> float:
        """Copying the KV of so many tokens to host memory or back."""
        return self._profile.kv_swap_s(tokens) / self._time_scale * self._noise.factor()
