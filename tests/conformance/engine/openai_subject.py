"""The openai engine on vLLM's own API server, with token ids."""

from __future__ import annotations

from qlm_agent.engines.openai.build import openai_engine
from qlm_agent.engines.openai.settings import OpenAiSettings
from qlm_agent.engines.port import Engine, EngineRequest, FinishReason, Sampling, TokenPrompt
from qlm_core.vocabulary.model import ModelSpec
from running_vllm_server import CONTEXT_TOKENS, MODEL, shared_vllm_server

from .subjects import Kind, Limits

ORDINARY_TOKENS = range(3, 2048)


class OpenAiSubject:
    """Answers are cut when they are long enough."""

    def __init__(self, limits: Limits) -> None:
        self.models: tuple[str, ...] = ("served",)
        self.context_tokens = CONTEXT_TOKENS
        self.finish = FinishReason.LENGTH
        self.deadline_s = 90.0
        values = {"models": {"served": {"remote": MODEL, "base_url": shared_vllm_server().url}}, "tell_every_s": 0.005, "poll_s": 0.5}
        spec = ModelSpec(name="served", profile="served", context_tokens_max=CONTEXT_TOKENS)
        settings = OpenAiSettings.model_validate({**values, "call_timeout_s": 30.0})
        self.engine: Engine = openai_engine(settings, {"served": spec}, {"served": 0}, limits.batch_max)

    def request(self, run_id: str, *, model: str, number: int, prompt: int, answer: int, **fields: object) -> EngineRequest:
        ids = [ORDINARY_TOKENS[(number * 131 + place * 17) % len(ORDINARY_TOKENS)] for place in range(prompt)]
        values: dict[str, object] = {
            "run_id": run_id,
            "model": model,
            "prompt": TokenPrompt(ids=ids),
            "prompt_tokens": prompt,
            "output_tokens_max": answer,
            "sampling": Sampling(temperature=0.0, ignore_eos=True),
        }
        return EngineRequest(**{**values, **fields})  # type: ignore[arg-type]


SUBJECTS = {"openai": Kind(OpenAiSubject, frozenset())}
