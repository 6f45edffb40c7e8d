"""The vllm engine on tiny random models; the suite runs on it where QLM_TEST_ENGINES names it. Policies of a test stay in its process."""

from __future__ import annotations

import os
from typing import Literal

from qlm_agent.engines.policies.registry import FirstComeFirstServed
from qlm_agent.engines.port import Engine, EngineRequest, FinishReason, Sampling, TokenPrompt
from qlm_agent.engines.vllm.engine import VllmEngine
from qlm_agent.engines.vllm.folder import ModelFolder
from qlm_agent.engines.vllm.plans import VllmModel
from qlm_agent.engines.vllm.settings import VllmSettings
from served_policy import served_policy
from tiny_models import tiny_model
from vllm_nursery import QuickTemplate

from .subjects import Can, Kind, Limits

DEVICE: Literal["cpu", "cuda"] = "cuda" if os.environ.get("QLM_TEST_VLLM_DEVICE") == "cuda" else "cpu"
KV_TOKENS = 24_000
TOKEN_IDS = 2_000
TOKEN_ID_LEAST = 3


class VllmSubject:
    """Two models of one shape. Answers of a wanted length ignore the end-of-sequence token."""

    async_scheduling = False

    def __init__(self, limits: Limits) -> None:
        self.models: tuple[str, ...] = ("tiny-a", "tiny-b")
        self.context_tokens = 2048
        self.finish = FinishReason.LENGTH
        self.deadline_s = 90.0
        policy = {} if type(limits.policy) is FirstComeFirstServed else served_policy(limits.policy)
        models = {
            name: VllmModel(name=name, weights=str(tiny_model(seed)), context_tokens_max=self.context_tokens, **policy)
            for seed, name in enumerate(self.models, start=1)
        }
        folder = ModelFolder.read("tiny-a", models["tiny-a"].weights)
        settings = VllmSettings()
        block_bytes = folder.kv_bytes_per_token(settings.dtype) * settings.block_size
        blocks = (limits.kv_capacity_tokens or KV_TOKENS) // settings.block_size + 1
        settings = VllmSettings(
            device=DEVICE,
            enforce_eager=DEVICE == "cpu",
            kv_cache_gb=(blocks + 0.5) * block_bytes / 1e9,
            host_memory_gb=limits.host_models * folder.weights_bytes / 1e9,
            host_kv_gb=limits.host_kv_tokens // settings.block_size * block_bytes / 1e9,
            arguments={"async_scheduling": self.async_scheduling},
        )
        self.engine: Engine = VllmEngine(
            models, settings, batch_max=limits.batch_max, template=QuickTemplate(like_gpus=self.async_scheduling)
        )

    def request(self, run_id: str, *, model: str, number: int, prompt: int, answer: int, **fields: object) -> EngineRequest:
        ids = [TOKEN_ID_LEAST + (number * 37 + at * 11) % TOKEN_IDS for at in range(prompt)]
        values: dict[str, object] = {
            "run_id": run_id,
            "model": model,
            "prompt": TokenPrompt(ids=ids),
            "prompt_tokens": prompt,
            "output_tokens_max": answer,
            "sampling": Sampling(temperature=0.0, ignore_eos=True),
        }
        return EngineRequest(**{**values, **fields})  # type: ignore[arg-type]


ALL = frozenset(Can) - ({Can.STAGE} if DEVICE == "cuda" else set())  # beside another model files are only read there
SUBJECTS = {"vllm": Kind(VllmSubject, ALL)}
