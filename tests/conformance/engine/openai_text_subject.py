"""The openai engine on a server that knows only text, a process of its own."""

from __future__ import annotations

from qlm_agent.engines.openai.engine import OpenAiEngine
from qlm_agent.engines.openai.run import RemoteModel
from qlm_agent.engines.openai.server import OpenAiServer
from qlm_agent.engines.openai.settings import OpenAiSettings
from qlm_agent.engines.port import Engine, EngineRequest, FinishReason, TextPrompt
from running_text_server import shared_text_server
from text_server import CONTEXT_WORDS, KEY, MODEL, text_prompt

from .subjects import Kind, Limits

TIMEOUTS = {f"{name}_timeout_s": 20.0 for name in ("call", "first_token", "stall", "swap")}


class OpenAiTextSubject:
    """Answers end when they are long enough: a word is a token."""

    def __init__(self, limits: Limits) -> None:
        self.models: tuple[str, ...] = (MODEL,)
        self.context_tokens = CONTEXT_WORDS
        self.finish = FinishReason.STOP
        self.deadline_s = 20.0
        settings = OpenAiSettings(
            base_url=shared_text_server().url, output="text", parameters=("ignore_eos",), tell_every_s=0.005, poll_s=0.5, **TIMEOUTS
        )
        remote = RemoteModel(
            name=MODEL,
            remote=MODEL,
            server=OpenAiServer(settings.base_url, KEY, settings),
            context_tokens=self.context_tokens,
            text_output=True,
            continues_chats=False,
            parameters=settings.parameters,
            ends=set(),
        )
        self.engine: Engine = OpenAiEngine({MODEL: remote}, settings, kv_capacity_tokens={MODEL: 100_000}, batch_max=limits.batch_max)

    def request(self, run_id: str, *, model: str, number: int, prompt: int, answer: int, **fields: object) -> EngineRequest:
        values: dict[str, object] = {
            "run_id": run_id,
            "model": model,
            "prompt": TextPrompt(text=text_prompt(number, prompt, answer)),
            "prompt_tokens": prompt,
            "output_tokens_max": 1800,
        }
        return EngineRequest(**{**values, **fields})  # type: ignore[arg-type]


SUBJECTS = {"openai-text": Kind(OpenAiTextSubject, frozenset())}
