"""Runs of a profiling experiment on any engine, and the outputs of each: the one reader of the engine's outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from qlm_agent.engines.port import Engine, EngineRequest, Sampling, TextPrompt, TokenPrompt
from qlm_core.vocabulary.errors import QlmError
from qlm_core.vocabulary.simulated_model import TOKEN_BYTES

TOKEN_ID_LEAST = 100
"""Lower ids are control tokens of many vocabularies."""


class ProfilingFailed(QlmError):
    """The engine failed a run of the experiment, or did not answer in time."""

    default_reason = "ENGINE_FAILURE"


@dataclass(slots=True, kw_only=True)
class ProfiledRun:
    """A run and its output so far. `points`: (time of the last token, tokens made by then), one for each output."""

    run_id: str
    prompt_tokens: int
    output_tokens: int
    prompt: TokenPrompt | TextPrompt
    resumed_tokens: int = 0
    started_s: float = 0.0
    first_s: float = 0.0
    made: bytes = b""
    pieces: tuple[str, ...] = ()
    points: list[tuple[float, int]] = field(default_factory=list)
    ended: bool = False

    @property
    def tokens(self) -> int:
        """Tokens made by now, without those of earlier attempts."""
        return self.points[-1][1] if self.points else 0

    def tokens_at(self, at_s: float) -> float:
        """Tokens made by then, interpolated in time between two outputs."""
        before_s, before = self.first_s, 1
        if at_s < before_s:
            return 0.0
        for output_s, tokens in self.points:
            if output_s >= at_s:
                share = (at_s - before_s) / (output_s - before_s) if output_s > before_s else 1.0
                return before + share * (tokens - before)
            before_s, before = output_s, tokens
        return float(before)


class ProfilingRuns:
    """Starts runs of one model and follows them. `prefix`: of the run ids, each used once on an engine."""

    def __init__(self, engine: Engine, model: str, vocabulary_size: int, prefix: str, timeout_s: float) -> None:
        """`timeout_s`: longest wait for an output."""
        self._engine = engine
        self._model = model
        self._vocabulary = vocabulary_size
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._runs: dict[str, ProfiledRun] = {}
        self._number = 0
        self._news = asyncio.Event()
        self._failure: ProfilingFailed | None = None

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Reads outputs meanwhile; at the end all runs are aborted."""
        reader = asyncio.create_task(self._read(), name="profiling-outputs")
        try:
            yield
        finally:
            with suppress(QlmError):
                await self._engine.abort(list(self._runs))
            reader.cancel()
            await asyncio.wait([reader])

    async def start(self, prompt_tokens: int, output_tokens: int) -> ProfiledRun:
        """A run with a prompt of its own (no prefix cache helps it), which makes exactly so many tokens. An engine of text gets as many
        bytes as gateways count for the tokens."""
        self._number += 1
        if self._engine.text_output:
            words = f"{self._number * 7919 % 1000:03d} " * prompt_tokens  # four bytes a token
            return await self.add(TextPrompt(text=words), prompt_tokens, output_tokens)
        span = max(1, self._vocabulary - TOKEN_ID_LEAST)
        ids = [TOKEN_ID_LEAST % self._vocabulary + (self._number * 7919 + at * 31) % span for at in range(prompt_tokens)]
        ids = [min(each, self._vocabulary - 1) for each in ids]
        return await self.add(TokenPrompt(ids=ids), prompt_tokens, output_tokens)

    async def start_together(self, sequences: int, prompt_tokens: int, output_tokens: int) -> list[ProfiledRun]:
        """Starts so many equal runs; the engine is paused until it has them all, however long that takes."""
        await self._engine.pause()
        try:
            return [await self.start(prompt_tokens, output_tokens) for _ in range(sequences)]
        finally:
            await self._engine.resume()

    async def resume(self, run: ProfiledRun) -> ProfiledRun:
        """Another attempt after a run's whole output, for one more token."""
        again = await self.add(run.prompt, run.prompt_tokens, run.resumed_tokens + run.tokens + 1, run.made, run.pieces)
        again.resumed_tokens = run.tokens
        return again

    async def add(
        self, prompt: TokenPrompt | TextPrompt, prompt_tokens: int, output_tokens: int, produced: bytes = b"", pieces: tuple[str, ...] = ()
    ) -> ProfiledRun:
        """A greedy run that makes exactly so many tokens, those of earlier attempts included."""
        self._number += 1
        name = f"{self._prefix}-{self._number}"
        run = ProfiledRun(run_id=name, prompt_tokens=prompt_tokens, output_tokens=output_tokens, prompt=prompt)
        self._runs[run.run_id] = run
        await self._engine.add(
            EngineRequest(
                run_id=run.run_id,
                model=self._model,
                prompt=prompt,
                prompt_tokens=run.prompt_tokens,
                output_tokens_max=output_tokens,
                produced=produced,
                produced_pieces=pieces,
                sampling=Sampling(temperature=0.0, ignore_eos=True),
                arrival=self._number,
            )
        )
        return run

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition on outputs. Raises ProfilingFailed if a run fails, or after `timeout_s` without output."""
        while not condition():
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._news.wait()
            except TimeoutError:
                raise ProfilingFailed(f"the engine made no output for {self._timeout_s:g} s") from None

    async def begin(self, runs: Iterable[ProfiledRun]) -> None:
        """Waits until all of them have output."""
        waited = list(runs)
        await self.until(lambda: all(run.points for run in waited))

    async def ends(self, runs: Iterable[ProfiledRun]) -> None:
        """Waits until all of them ended."""
        waited = list(runs)
        await self.until(lambda: all(run.ended for run in waited))

    async def abort(self, runs: Iterable[ProfiledRun]) -> None:
        """Aborts them; they have no further output."""
        dropped = list(runs)
        await self._engine.abort([run.run_id for run in dropped])
        for run in dropped:
            self._runs.pop(run.run_id, None)

    async def _read(self) -> None:
        while True:
            for output in await self._engine.outputs():
                run = self._runs.get(output.run_id)
                if run is None:
                    continue
                if output.failure is not None:
                    self._failure = ProfilingFailed(f"the engine failed a run of {run.prompt_tokens} tokens: {output.failure.message}")
                if not run.points:
                    run.started_s, run.first_s = output.started_s, output.first_s
                run.made += output.token_ids
                run.pieces += output.pieces
                tokens = len(run.pieces) if self._engine.text_output else len(run.made) // TOKEN_BYTES
                run.points.append((output.last_s, tokens))
                if output.finish is not None or output.failure is not None:
                    run.ended = True
                    del self._runs[output.run_id]
            self._news.set()
