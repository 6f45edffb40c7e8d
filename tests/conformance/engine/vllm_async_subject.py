"""The vllm engine through AsyncLLM, which takes half a minute to start: one of it for all tests, as it comes."""

from __future__ import annotations

from functools import cache

from qlm_agent.engine import Engine, FinishReason
from qlm_agent.vllm.engine import VllmEngine
from qlm_agent.vllm.folder import ModelFolder
from qlm_agent.vllm.plans import VllmModel
from qlm_agent.vllm.settings import VllmSettings
from shared_engine import SharedEngine
from tiny_models import tiny_model

from .subjects import Can, Kind, Limits
from .vllm_subject import KV_TOKENS, VllmSubject

MODEL = "tiny-a"
CONTEXT_TOKENS = 2048


class VllmAsyncSubject(VllmSubject):
    """One model."""

    def __init__(self, limits: Limits) -> None:
        self.models: tuple[str, ...] = (MODEL,)
        self.context_tokens = CONTEXT_TOKENS
        self.finish = FinishReason.LENGTH
        self.deadline_s = 120.0
        self.engine: Engine = _engine()


@cache
def _engine() -> SharedEngine:
    return SharedEngine(_make)


def _make() -> Engine:
    limits = Limits()
    model = VllmModel(name=MODEL, weights=str(tiny_model(1)), context_tokens_max=CONTEXT_TOKENS)
    folder = ModelFolder.read(MODEL, model.weights)
    block_bytes = folder.kv_bytes_per_token("float32") * VllmSettings().block_size
    settings = VllmSettings(
        runner="async",
        kv_cache_gb=(KV_TOKENS // VllmSettings().block_size + 1.5) * block_bytes / 1e9,
        host_kv_gb=limits.host_kv_tokens // VllmSettings().block_size * block_bytes / 1e9,
    )
    return VllmEngine({MODEL: model}, settings, batch_max=limits.batch_max)


SUBJECTS = {"vllm-async": Kind(VllmAsyncSubject, frozenset({Can.OFFLOAD, Can.HALT}))}
