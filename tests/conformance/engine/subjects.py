"""Engines under test, each with what a test needs beside the port: models, and prompts whose answers have a known length."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from qlm_agent.engine import Engine, EngineOutput, EngineRequest, Prompt, TokenPrompt
from qlm_agent.engine_policy import FirstComeFirstServed
from qlm_agent.simulated.engine import SimulatedEngine, SimulatedLimits, SimulatedModel
from qlm_agent.simulated.timing import InstanceNoise
from qlm_core.model import ModelSpec
from qlm_core.shipped_profiles import shipped_snapshot
from qlm_core.simulated_model import LENGTH_TOKEN_BASE

DEADLINE_S = 20.0
CONTEXT_TOKENS = 2048


class Subject(Protocol):
    """An engine and its models. Greedy output is the same for the same model and prompt."""

    engine: Engine
    models: tuple[str, str]
    context_tokens: int

    def prompt(self, number: int, tokens: int, answer_tokens: int) -> Prompt:
        """A prompt of so many tokens whose answer has `answer_tokens`; another number is another prompt."""


class SimulatedSubject:
    """The simulated engine, fast, with little KV where a test asks for it."""

    def __init__(self, *, kv_capacity_tokens: int = 0, host_memory_gb: float = 64.0, batch_max: int = 32) -> None:
        self.models = ("sim-a", "sim-b")
        self.context_tokens = CONTEXT_TOKENS
        rows = {(row.gpu, row.n_gpu, row.model): row for row in shipped_snapshot().hardware}
        profile = rows["H100-80GB", 1, "Mistral-7B"]
        specs = [ModelSpec(name=name, profile="Mistral-7B", context_tokens_max=CONTEXT_TOKENS) for name in self.models]
        limits = SimulatedLimits(
            time_scale=40.0, batch_max=batch_max, host_memory_gb=host_memory_gb, kv_capacity_tokens=kv_capacity_tokens, tell_every_s=0.005
        )
        self.engine: Engine = SimulatedEngine(
            {spec.name: SimulatedModel(spec=spec, profile=profile) for spec in specs},
            InstanceNoise(seed=7, instance="test", step_noise=0.05, bias_max=0.15),
            FirstComeFirstServed(),
            limits,
        )

    def prompt(self, number: int, tokens: int, answer_tokens: int) -> Prompt:
        return TokenPrompt(ids=[number % 30_000] * (tokens - 1) + [LENGTH_TOKEN_BASE + answer_tokens])


SUBJECTS: dict[str, Callable[..., Subject]] = {"simulated": SimulatedSubject}


@dataclass
class Collected:
    """All that an engine told of one run."""

    token_ids: bytes = b""
    pieces: list[str] = field(default_factory=list)
    outputs: list[EngineOutput] = field(default_factory=list)

    @property
    def ended(self) -> EngineOutput | None:
        last = self.outputs[-1] if self.outputs else None
        return last if last is not None and (last.finish is not None or last.failure is not None) else None


class Reader:
    """Reads the outputs of an engine, as its one reader."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.runs: dict[str, Collected] = {}

    async def read(self) -> None:
        """One batch of outputs."""
        for output in await self._engine.outputs():
            run = self.runs.setdefault(output.run_id, Collected())
            assert run.ended is None, f"output after the end of {output.run_id}"
            run.token_ids += output.token_ids
            run.pieces += output.pieces
            run.outputs.append(output)

    async def read_on(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.read()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await self.read()

    async def ends(self, *run_ids: str) -> list[Collected]:
        await self.until(lambda: all(run_id in self.runs and self.runs[run_id].ended is not None for run_id in run_ids))
        return [self.runs[run_id] for run_id in run_ids]


def request(subject: Subject, run_id: str, *, number: int = 1, prompt: int = 20, answer: int = 30, **fields: object) -> EngineRequest:
    """A run of the first model."""
    values: dict[str, object] = {
        "run_id": run_id,
        "model": subject.models[0],
        "prompt": subject.prompt(number, prompt, answer),
        "prompt_tokens": prompt,
        "output_tokens_max": 1000,
    }
    return EngineRequest(**{**values, **fields})  # type: ignore[arg-type]
