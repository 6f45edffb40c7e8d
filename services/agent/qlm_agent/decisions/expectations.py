"""Expected output lengths, token times and waits of the agent's runs (QLM section 6, equations 1 to 4).

Output lengths are learned from completed runs, token times from the engine's reports; both begin at the profile or a stated prior. The
planner's predictions are finer; these only decide whether a head is late without an eviction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qlm_agent.decisions.events import PulledRun, QueueHead
from qlm_agent.decisions.runs import Run
from qlm_agent.engines.policies.port import MEDIAN, QUANTILE_LEVELS
from qlm_core.operations.batch_size import step_s
from qlm_core.profiles.profile import WORKLOAD_PRIOR, HardwareProfile
from qlm_core.statistics.length_curve import FloatArray, LengthCurve, bin_of

OUTPUT_SAMPLES_MIN = 20
OUTPUT_SAMPLES_MAX = 200
"""Weight of the prior, and of all the past, in the expected output length."""

TOKEN_S_PRIOR = 0.05
"""Seconds of a token without a profile or a measurement: a full batch of a 13B model on an A100."""

REPORT_KEPT = 0.95
"""Share of its weight that the token time keeps at each new report."""

STEPS_KEPT = 0.998
"""The same share for the engine's speed, which changes rarely, while single reports hold few or many prefills."""

GROWTH = 0.5
"""A run that outlives the expected output is expected to produce this share of its output again."""

SERVICE_MARGIN = 1.25
"""Margin on the expected service time of a head: outputs vary, and the batch around it slows it down."""

CLASSES_MAX = 1_000
"""Most pairs of model and SLO class with output lengths; further pairs count with their model."""

_ANY_CLASS = ""


@dataclass(slots=True)
class _Lengths:
    """Output lengths of a class: samples in the bins of `LengthCurve`; about the last OUTPUT_SAMPLES_MAX count."""

    samples: FloatArray
    _curve: LengthCurve | None = None

    def add(self, tokens: int) -> None:
        total = float(self.samples.sum())
        self.samples *= min(1.0, OUTPUT_SAMPLES_MAX / (total + 1.0))
        self.samples[bin_of(tokens)] += 1.0
        self._curve = None

    @property
    def curve(self) -> LengthCurve:
        if self._curve is None:
            self._curve = LengthCurve(self.samples)
        return self._curve


class Expectations:
    """`hardware`: profiles by model on this agent's GPUs; some models have none."""

    def __init__(self, hardware: Mapping[str, HardwareProfile]) -> None:
        self.hardware = hardware
        self._outputs: dict[tuple[str, str], _Lengths] = {}  # (model, SLO class)
        self._prompt_tokens: dict[str, float] = {}  # by model, of completed requests
        self._token_times: dict[str, tuple[float, float]] = {}  # model -> seconds, tokens
        self._steps: dict[str, tuple[float, float]] = {}  # model -> measured seconds, profiled seconds
        self._prefilled = (0, 0)  # tokens of prompts computed since the last report of others, and the sum of the squares of each
        self._computed: dict[tuple[str, str], tuple[float, float]] = {}  # (model, SLO class) -> of prompts, tokens computed and all

    # Output lengths ---------------------------------------------------------------------------------------------------

    def output_tokens(self, model: str, slo_class: str = _ANY_CLASS) -> int:
        """Expected output of the class, else of its model, else of any."""
        return math.ceil(self._output(model, slo_class))

    def outputs(self, model: str, slo_class: str) -> LengthCurve:
        """The distribution of outputs of the class, else of its model, else of any."""
        found = self._outputs.get((model, slo_class)) or self._outputs.get((model, _ANY_CLASS))
        return WORKLOAD_PRIOR.output_curve() if found is None else found.curve

    def length_quantiles(self, pulled: PulledRun) -> tuple[float, ...]:
        """Output of a request in tokens, at QUANTILE_LEVELS: of its class, around the prediction of the length model where there is one."""
        found = self.outputs(pulled.model, pulled.slo_class).quantiles(QUANTILE_LEVELS)
        scale = pulled.predicted_tokens / found[MEDIAN] if pulled.predicted_tokens else 1.0
        return tuple(np.clip(scale * found, 1.0, pulled.output_tokens_max).tolist())

    def _output(self, model: str, slo_class: str) -> float:
        return self.outputs(model, slo_class).output_tokens.mean

    def record_completion(self, run: Run) -> None:
        """A request completed: one more sample."""
        mean = self._prompt_tokens.get(run.model, WORKLOAD_PRIOR.prompt_tokens_mean)
        self._prompt_tokens[run.model] = mean + (run.prompt_tokens - mean) / OUTPUT_SAMPLES_MAX
        for key in dict.fromkeys(((run.model, run.slo_class), (run.model, _ANY_CLASS))):
            if key in self._outputs or len(self._outputs) < CLASSES_MAX:
                if key not in self._outputs:
                    self._outputs[key] = _Lengths(OUTPUT_SAMPLES_MIN * self.outputs(*key).shares)
                self._outputs[key].add(run.produced)

    def record_cached(self, run: Run) -> None:
        """The prefill of a run began: one more sample of what the prefix cache leaves of prompts, faded as outputs are. Those of resumed
        runs say nothing of others."""
        if run.resumed or run.cached_tokens >= run.prompt_tokens:
            return
        for key in dict.fromkeys(((run.model, run.slo_class), (run.model, _ANY_CLASS))):
            if key in self._computed or len(self._computed) < CLASSES_MAX:
                kept = 1.0 - 1.0 / OUTPUT_SAMPLES_MAX
                computed, prompts = self._computed.get(key, (0.0, 0.0))
                self._computed[key] = (kept * computed + run.prompt_tokens - run.cached_tokens, kept * prompts + run.prompt_tokens)

    def uncached_share(self, model: str, slo_class: str = _ANY_CLASS) -> float:
        """The computed share of the prompts of the class, else of its model; 1 where the engine reports nothing."""
        computed, prompts = self._computed.get((model, slo_class)) or self._computed.get((model, _ANY_CLASS), (1.0, 1.0))
        return computed / prompts

    def left_tokens(self, run: Run) -> float:
        """Tokens that the run is expected to produce until its end, at least one."""
        expected = self._output(run.model, run.slo_class)
        left = expected - run.produced if run.produced < expected else GROWTH * run.produced
        return max(1.0, min(left, run.output_tokens_max - run.produced))

    # Times ------------------------------------------------------------------------------------------------------------

    def record_prefill(self, tokens: int, cached_tokens: int) -> None:
        """Records that a prompt of so many tokens was computed, all but the cached ones, while others produced tokens, which are reported
        later than first tokens."""
        squares = tokens * tokens - cached_tokens * cached_tokens
        self._prefilled = (self._prefilled[0] + tokens - cached_tokens, self._prefilled[1] + squares)

    def record_tokens(self, model: str, seconds: float, tokens: int, decoding: Sequence[int], others: int) -> None:
        """Records that runs of a model, with `decoding` tokens of context each, produced `tokens` in `seconds`, both summed over the runs,
        beside `others` of which only the number is known. Prompts that were computed since the last call took their part."""
        kept_s, kept_tokens = self._token_times.get(model, (0.0, 0.0))
        self._token_times[model] = (REPORT_KEPT * kept_s + seconds, REPORT_KEPT * kept_tokens + tokens)
        hardware = self.hardware.get(model)
        if hardware is not None:
            others_s = self._step_s(hardware, model, others) - self._step_s(hardware, model, 0)
            profiled_s = tokens * (hardware.decode_step_s(len(decoding), sum(decoding)) + others_s)
            profiled_s += len(decoding) * hardware.prefill_work_s(*self._prefilled)
            kept_s, kept_profiled_s = self._steps.get(model, (0.0, 0.0))
            self._steps[model] = (STEPS_KEPT * kept_s + seconds, STEPS_KEPT * kept_profiled_s + profiled_s)
        self._prefilled = (0, 0)

    def token_s(self, model: str) -> float:
        """Seconds from one token of a run to its next: d of equation 4."""
        seconds, tokens = self._token_times.get(model, (0.0, 0.0))
        if tokens:
            return seconds / tokens
        hardware = self.hardware.get(model)
        return TOKEN_S_PRIOR if hardware is None else hardware.decode_step_s(1.0, 0.0)

    def slowdown(self, model: str) -> float:
        """Measured token times over profiled ones, for batches of the same sizes; 1 without measurements."""
        seconds, profiled_s = self._steps.get(model, (0.0, 0.0))
        return seconds / profiled_s if seconds > 0.0 and profiled_s > 0.0 else 1.0

    def output_s(self, model: str, sequences: int) -> float:
        """Seconds of a model's output in a batch of this size; 1 without a profile."""
        hardware = self.hardware.get(model)
        return 1.0 if hardware is None else self._output(model, _ANY_CLASS) * self._step_s(hardware, model, sequences)

    def _step_s(self, hardware: HardwareProfile, model: str, sequences: int) -> float:
        prompt_tokens = self._prompt_tokens.get(model, WORKLOAD_PRIOR.prompt_tokens_mean)
        return step_s(hardware, sequences, prompt_tokens, self._output(model, _ANY_CLASS), self.uncached_share(model))

    def left_s(self, run: Run) -> float:
        """Seconds until the run ends, including its prefill if it has not started."""
        prefill_s = 0.0 if run.started else self._prefill_s(run.model, run.slo_class, run.prompt_tokens + run.produced)
        return prefill_s + self.left_tokens(run) * self.token_s(run.model)

    def head_kv_tokens(self, head: QueueHead) -> int:
        """KV that one request of the head is expected to need at its end, as a pull requests it."""
        return math.ceil(head.waiting_prompt_tokens / max(1, head.waiting)) + self.output_tokens(head.model)

    def service_s(self, head: QueueHead, swap_s: float) -> float:
        """Seconds from a request's start to the point that its SLO bounds, with a margin: P + O * d of equation 1, after a model swap."""
        seconds = swap_s + self._prefill_s(head.model, head.slo_class, head.waiting_prompt_tokens / max(1, head.waiting))
        if not head.first_token:
            seconds += self._output(head.model, head.slo_class) * self.token_s(head.model)
        return SERVICE_MARGIN * seconds

    def swap_s(self, model: str, *, warm: bool) -> float:
        """Seconds to make a model active."""
        hardware = self.hardware.get(model)
        return 0.0 if hardware is None else hardware.swap_s(warm)

    def _prefill_s(self, model: str, slo_class: str, tokens: float) -> float:
        hardware = self.hardware.get(model)
        return 0.0 if hardware is None else hardware.prefill_s(tokens, self.uncached_share(model, slo_class))
