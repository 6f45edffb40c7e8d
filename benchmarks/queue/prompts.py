"""Synthetic requests by seed: token prompts that set the answer's length for a simulated model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qlm.api.v1.request_pb2 import SLO_KIND_COMPLETION, Admission, Request, SamplingParams, Slo, TokenPrompt
from qlm_core.vocabulary.simulated_model import LENGTH_TOKEN_BASE
from qlm_load.workload.output_bounds import output_bound

MODEL = "mistral-7b"
PROFILE = "Mistral-7B"
VOCABULARY_SIZE = 32_000
CONTEXT_TOKENS_MAX = 8192


PROMPTS = 500
"""Different prompts of a source; requests take them in turn, which costs a load generator next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """Requests `<run_id>-<index>`, the same in every process for the same seed. `slo_s`: to the last token."""

    seed: int
    run_id: str
    prompt_tokens: int
    output_tokens: int
    slo_s: float

    def request_id(self, index: int) -> str:
        return f"{self.run_id}-{index}"

    def prompts(self) -> Sequence[Request]:
        """Requests without an id, as clients send them."""
        generator = np.random.Generator(np.random.PCG64([self.seed, 0x70726F]))
        bounds = np.random.Generator(np.random.PCG64([self.seed, 0x626F])).random(PROMPTS).tolist()
        ids = generator.integers(0, VOCABULARY_SIZE, size=(PROMPTS, self.prompt_tokens - 1), dtype=np.uint32)
        return [
            Request(
                model=MODEL,
                tokens=TokenPrompt(ids=[*row, LENGTH_TOKEN_BASE + self.output_tokens]),
                sampling=SamplingParams(max_tokens=output_bound(self.output_tokens, level), temperature=0.0),
                slo=Slo(kind=SLO_KIND_COMPLETION, seconds=self.slo_s),
            )
            for row, level in zip(ids.tolist(), bounds, strict=True)
        ]

    def admitted(self) -> Sequence[Request]:
        """The same as a gateway stores them, without their ids: for parts that fill the queue directly."""
        found = self.prompts()
        for request in found:
            request.tenant = "default"
            room_tokens = CONTEXT_TOKENS_MAX - self.prompt_tokens
            output_tokens_max = min(request.sampling.max_tokens or room_tokens, room_tokens)
            admission = Admission(prompt_tokens=self.prompt_tokens, output_tokens_max=output_tokens_max, slo=request.slo)
            request.admission.CopyFrom(admission)
        return found
