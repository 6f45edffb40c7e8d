"""The openai engine on a text server, and what tests read of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from qlm_agent.engines.openai.build import openai_engine
from qlm_agent.engines.openai.engine import OpenAiEngine
from qlm_agent.engines.openai.settings import OpenAiSettings
from qlm_agent.engines.port import EngineOutput, EngineRequest, Prompt, TextPrompt
from qlm_core.vocabulary.model import ModelSpec
from running_text_server import RunningTextServer
from text_server import KEY, MODEL, OTHER_MODEL, text_prompt

DEADLINE_S = 60.0
PATIENT = {"call_timeout_s": 20.0, "first_token_timeout_s": 20.0, "stall_timeout_s": 20.0, "poll_s": 0.2, "tell_every_s": 0.001}


def text_engine(server: RunningTextServer, **settings: object) -> OpenAiEngine:
    """Its key is in the environment, as SERVER_KEY."""
    values = {"base_url": server.url, "api_key_env": "SERVER_KEY", "output": "text", "parameters": [], **PATIENT, **settings}
    values.setdefault("models", {"m": {"remote": MODEL}, "n": {"remote": OTHER_MODEL}})
    specs = {name: ModelSpec(name=name, profile="Mistral-7B", context_tokens_max=2048) for name in ("m", "n")}
    return openai_engine(OpenAiSettings.model_validate(values), specs, dict.fromkeys(specs, 10_000), 32)


class Answers:
    """Reads an engine."""

    def __init__(self, engine: OpenAiEngine) -> None:
        self.engine = engine
        self.text: dict[str, str] = {}
        self.ends: dict[str, EngineOutput] = {}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                for output in await self.engine.outputs():
                    self.text[output.run_id] = self.text.get(output.run_id, "") + "".join(output.pieces)
                    if output.finish is not None or output.failure is not None:
                        assert output.run_id not in self.ends
                        self.ends[output.run_id] = output

    async def end(self, run_id: str) -> EngineOutput:
        await self.until(lambda: run_id in self.ends)
        return self.ends[run_id]


def run(run_id: str, *, answer: int = 20, prompt: Prompt | None = None, **fields: object) -> EngineRequest:
    values: dict[str, object] = {
        "run_id": run_id,
        "model": "m",
        "prompt": prompt or TextPrompt(text=text_prompt(1, 10, answer)),
        "prompt_tokens": 10,
        "output_tokens_max": 1000,
    }
    return EngineRequest(**{**values, **fields})  # type: ignore[arg-type]


async def fault(server: RunningTextServer, name: str, count: int = 1, status: int = 0) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        await session.post(f"{server.url}/fault", json={"name": name, "count": count, "status": status})


async def calls(server: RunningTextServer) -> list[str]:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{server.url}/calls") as answer:
        found = (await answer.json())["calls"]
    assert isinstance(found, list)
    return found
