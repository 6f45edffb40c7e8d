"""The openai engine on vLLM's own API server, with token ids."""

from __future__ import annotations

from qlm_agent.engines.openai.engine import OpenAiEngine
from qlm_agent.engines.openai.run import RemoteModel
from qlm_agent.engines.openai.server import OpenAiServer, Timeouts
from qlm_agent.engines.openai.settings import EXTRA_PARAMETERS
from qlm_agent.engines.port import Engine, EngineRequest, FinishReason, Sampling, TokenPrompt
from running_vllm_server import CONTEXT_TOKENS, MODEL, shared_vllm_server

from .subjects import Kind, Limits

TIMEOUTS = Timeouts(connect_s=5.0, call_s=30.0, first_token_s=60.0, stall_s=60.0, swap_s=60.0)
ORDINARY_TOKENS = range(3, 2048)


class OpenAiSubject:
    """Answers are cut when they are long enough."""

    def __init__(self, limits: Limits) -> None:
        self.models: tuple[str, ...] = ("served",)
        self.context_tokens = CONTEXT_TOKENS
        self.finish = FinishReason.LENGTH
        self.deadline_s = 90.0
        server = OpenAiServer(shared_vllm_server().url, "", TIMEOUTS, connections_max=200)
        remote = RemoteModel(
            name="served",
            remote=MODEL,
            server=server,
            context_tokens=self.context_tokens,
            text_output=False,
            continues_chats=False,
            parameters=EXTRA_PARAMETERS,
            ends=set(),
        )
        self.engine: Engine = OpenAiEngine(
            {"served": remote},
            kv_capacity_tokens={"served": 0},
            batch_max=limits.batch_max,
            sleeps=False,
            tell_every_s=0.005,
            poll_s=0.5,
            swap_timeout_s=60.0,
        )

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
