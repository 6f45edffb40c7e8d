"""Engines under test, each with what a test needs beside the port: models, requests whose answers have a known length, and what it can do.

Another engine is added with one entry of `SUBJECTS`: a class with the attributes of `Subject` that takes the limits a test sets (`Limits`),
and the `Can`s that it has. A test says what it needs with `@needs(Can...)` and is skipped where the engine cannot do it; without a mark
it is for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import pytest

from qlm_agent.engines.policies.port import EnginePolicy
from qlm_agent.engines.policies.registry import FirstComeFirstServed
from qlm_agent.engines.port import Engine, EngineOutput, EngineRequest, FinishReason, TokenPrompt
from qlm_agent.engines.simulated.core import SimulatedLimits, SimulatedModel
from qlm_agent.engines.simulated.engine import SimulatedEngine
from qlm_agent.engines.simulated.timing import InstanceNoise
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.simulated_model import LENGTH_TOKEN_BASE, TOKEN_BYTES


class Can(Enum):
    """Features that not every engine has."""

    SWAP = "swap"  # serves two models in turn, and reports their tiers
    STAGE = "stage"  # loads a model to warm it, which takes longer than a few steps
    OFFLOAD = "offload"  # moves KV to host memory
    HALT = "halt"  # generates nothing in a pause, where others only hold it back
    POLICY = "policy"  # consults an engine policy
    LIMIT = "limit"  # can be made with the KV, the batch and the host memory that a test wants, and with little of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How small a test wants an engine: 0 for its default. `host_models`: models whose weights host memory holds; `host_kv_tokens`: KV that
    it holds beside them."""

    kv_capacity_tokens: int = 0
    batch_max: int = 32
    host_models: float = 4.0
    host_kv_tokens: int = 20_000
    policy: EnginePolicy = field(default_factory=FirstComeFirstServed)


class Subject(Protocol):
    """An engine and its models. Greedy output is the same for the same model and prompt; `finish`: how an answer of the wanted length ends;
    `deadline_s`: for anything to happen."""

    engine: Engine
    models: tuple[str, ...]
    context_tokens: int
    finish: FinishReason
    deadline_s: float

    def request(self, run_id: str, *, model: str, number: int, prompt: int, answer: int, **fields: object) -> EngineRequest:
        """A greedy run over `prompt` tokens that makes `answer` tokens; another number is another prompt. `fields` replace its own."""


class SimulatedSubject:
    """The simulated engine, fast; not so fast that a run ends while its worker waits for a core."""

    def __init__(self, limits: Limits) -> None:
        self.models: tuple[str, ...] = ("sim-a", "sim-b")
        self.context_tokens = 2048
        self.finish = FinishReason.STOP
        self.deadline_s = 20.0
        rows = {(row.gpu, row.n_gpu, row.model): row for row in shipped_snapshot().hardware}
        row = rows["H100-80GB", 1, "Mistral-7B"]
        profile = replace(row, kv_swap_us_per_token=400.0 * row.kv_swap_us_per_token)  # so that calls find a move under way
        specs = [ModelSpec(name=name, profile="Mistral-7B", context_tokens_max=self.context_tokens) for name in self.models]
        self.engine: Engine = SimulatedEngine(
            {spec.name: SimulatedModel(spec=spec, profile=profile) for spec in specs},
            InstanceNoise(seed=7, instance="test", step_noise=0.05, bias_max=0.15),
            limits.policy,
            SimulatedLimits(
                time_scale=20.0,
                batch_max=limits.batch_max,
                host_memory_gb=limits.host_models * profile.weights_gb,
                host_kv_gb=limits.host_kv_tokens * profile.kv_bytes_per_token / 1e9,
                kv_capacity_tokens=limits.kv_capacity_tokens,
                tell_every_s=0.005,
            ),
        )

    def request(self, run_id: str, *, model: str, number: int, prompt: int, answer: int, **fields: object) -> EngineRequest:
        ids = [number % 30_000] * (prompt - 1) + [LENGTH_TOKEN_BASE + answer]
        values: dict[str, object] = {
            "run_id": run_id,
            "model": model,
            "prompt": TokenPrompt(ids=ids),
            "prompt_tokens": prompt,
            "output_tokens_max": 1800,
        }
        return EngineRequest(**{**values, **fields})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of engine: what makes one, and what it can do."""

    make: Callable[[Limits], Subject]
    can: frozenset[Can]


SUBJECTS = {"simulated": Kind(SimulatedSubject, frozenset(Can))}


def needs(*wanted: Can) -> pytest.MarkDecorator:
    """Marks a test that is only for engines that can do all of it."""
    return pytest.mark.needs(*wanted)


@dataclass
class Collected:
    """All that an engine reported of one run. `output`: token ids, or pieces of text from an engine that reports only that."""

    output: list[int | str] = field(default_factory=list)
    logprobs: bytes = b""
    outputs: list[EngineOutput] = field(default_factory=list)

    @property
    def ended(self) -> EngineOutput | None:
        last = self.outputs[-1] if self.outputs else None
        return last if last is not None and (last.finish is not None or last.failure is not None) else None


class Reader:
    """Reads the outputs of an engine, as its one reader."""

    def __init__(self, subject: Subject) -> None:
        self._engine = subject.engine
        self._deadline_s = subject.deadline_s
        self.runs: dict[str, Collected] = {}

    def made(self, run_id: str) -> int:
        """How much output of a run was read."""
        return len(self.runs[run_id].output) if run_id in self.runs else 0

    async def read(self) -> None:
        """One batch of outputs."""
        for output in await self._engine.outputs():
            run = self.runs.setdefault(output.run_id, Collected())
            assert run.ended is None, f"output after the end of {output.run_id}"
            ids = output.token_ids
            run.output += [int.from_bytes(ids[at : at + TOKEN_BYTES], "little") for at in range(0, len(ids), TOKEN_BYTES)]
            run.output += output.pieces
            run.logprobs += output.logprobs
            run.outputs.append(output)

    async def read_on(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.read()

    async def for_s(self, duration_s: float) -> None:
        """Reads for so long."""
        try:
            async with asyncio.timeout(duration_s):
                await self.read_on()
        except TimeoutError:
            return

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(self._deadline_s):
            while not condition():
                await self.read()

    async def until_made(self, count: int, *run_ids: str) -> None:
        """Until each of the runs has made so much."""
        await self.until(lambda: all(self.made(run_id) >= count for run_id in run_ids))

    async def ends(self, *run_ids: str) -> list[Collected]:
        await self.until(lambda: all(run_id in self.runs and self.runs[run_id].ended is not None for run_id in run_ids))
        return [self.runs[run_id] for run_id in run_ids]


def request(
    subject: Subject,
    run_id: str,
    *,
    model: str = "",
    number: int = 1,
    prompt: int = 20,
    answer: int = 30,
    after: Sequence[int | str] = (),
    **fields: object,
) -> EngineRequest:
    """A run of the first model, unless another is named, that continues after the output `after`."""
    if after:
        fields["produced"] = b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in after if isinstance(token, int))
        fields["produced_pieces"] = tuple(piece for piece in after if isinstance(piece, str))
    return subject.request(run_id, model=model or subject.models[0], number=number, prompt=prompt, answer=answer, **fields)


async def undisturbed(subject: Subject, reader: Reader, run_id: str = "undisturbed", *, model: str = "", answer: int = 30) -> Collected:
    """Output of a request that nothing happens to."""
    await subject.engine.add(request(subject, run_id, model=model, answer=answer))
    (run,) = await reader.ends(run_id)
    assert run.ended is not None
    assert run.ended.failure is None
    return run
