"""Greedy runs on an engine behind its port, and their output."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from qlm_agent.engines.port import Engine, EngineRequest, Sampling, TokenPrompt
from qlm_core.vocabulary.errors import QlmError
from qlm_core.vocabulary.simulated_model import TOKEN_BYTES

SILENCE_S = 120.0
"""Longest wait for output."""


class RunFailed(QlmError):
    """The engine failed a run, or made no output for long."""

    default_reason = "ENGINE_FAILURE"


@dataclass(slots=True)
class PortRun:
    """`output`: token ids as little-endian uint32, without those of earlier attempts."""

    run_id: str
    output: bytes = b""
    ended: bool = False
    failure: str = ""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> int:
        return len(self.output) // TOKEN_BYTES

    async def until(self, tokens: int) -> None:
        """Waits until it has so many tokens, or has ended. Raises RunFailed."""
        while self.tokens < tokens and not self.ended:
            self.news.clear()
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self.news.wait()
            except TimeoutError:
                raise RunFailed(f"run {self.run_id} made no output for {SILENCE_S:g} s") from None
        if self.failure:
            raise RunFailed(f"run {self.run_id}: {self.failure}")

    async def end(self) -> None:
        """Waits until it has ended. Raises RunFailed."""
        while not self.ended:
            await self.until(self.tokens + 1)


class PortRuns:
    """Starts runs of a model on one engine, and aborts them. Run ids are never used twice."""

    def __init__(self, engine: Engine, model: str, prefix: str) -> None:
        self._engine = engine
        self._model = model
        self._prefix = prefix
        self._runs: dict[str, PortRun] = {}
        self._number = 0

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Reads outputs meanwhile."""
        reader = asyncio.create_task(self._read(), name="bench-outputs")
        try:
            yield
        finally:
            reader.cancel()
            await asyncio.wait([reader])

    async def start(self, prompt: Sequence[int], output_tokens: int, produced: bytes = b"") -> PortRun:
        """`output_tokens`: of all attempts together, exactly so many; `produced`: the output of earlier ones."""
        self._number += 1
        run = PortRun(f"{self._prefix}-{self._number}")
        self._runs[run.run_id] = run
        request = EngineRequest(
            run_id=run.run_id,
            model=self._model,
            prompt=TokenPrompt(ids=prompt),
            prompt_tokens=len(prompt),
            output_tokens_max=output_tokens,
            produced=produced,
            sampling=Sampling(temperature=0.0, ignore_eos=True),
            arrival=self._number,
        )
        await self._engine.add(request)
        return run

    async def abort(self, run: PortRun) -> bool:
        """Whether it was still running; its output is then complete."""
        await self._engine.abort([run.run_id])
        return self._runs.pop(run.run_id, None) is not None

    async def _read(self) -> None:
        while True:
            for output in await self._engine.outputs():
                run = self._runs.get(output.run_id)
                if run is None:
                    continue
                run.output += output.token_ids
                if output.finish is not None or output.failure is not None:
                    run.ended = True
                    run.failure = "" if output.failure is None else output.failure.message
                    del self._runs[output.run_id]
                run.news.set()
