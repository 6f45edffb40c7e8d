"""Adds runs of one model to an engine, and reads what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from qlm_agent.engines.port import Engine, EngineOutput, EngineRequest, Prompt, Sampling, TokenPrompt
from qlm_core.vocabulary.simulated_model import TOKEN_BYTES

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
PROMPT = TokenPrompt(ids=[11, 12, 13, 14, 15])


class EngineReader:
    """`tokens`: ids that each run made; `ended`: its last output."""

    def __init__(self, engine: Engine, model: str = "a", deadline_s: float = 120.0) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, EngineOutput] = {}
        self._model = model
        self._deadline_s = deadline_s

    async def add(
        self,
        run_id: str,
        tokens: int = 2000,
        *,
        model: str = "",
        prompt: Prompt = PROMPT,
        sampling: Sampling = GREEDY,
        after: Sequence[int] = (),
    ) -> None:
        """A run that continues after some tokens of an earlier attempt."""
        produced = b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in after)
        await self.engine.add(
            EngineRequest(
                run_id=run_id,
                model=model or self._model,
                prompt=prompt,
                prompt_tokens=5,
                output_tokens_max=tokens,
                sampling=sampling,
                produced=produced,
            )
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(self._deadline_s):
            while not condition():
                for output in await self.engine.outputs():
                    made, ids = self.tokens.setdefault(output.run_id, []), output.token_ids
                    made += [int.from_bytes(ids[at : at + TOKEN_BYTES], "little") for at in range(0, len(ids), TOKEN_BYTES)]
                    if output.finish is not None or output.failure is not None:
                        self.ended[output.run_id] = output

    async def until_made(self, count: int, *run_ids: str) -> None:
        await self.until(lambda: all(len(self.tokens.get(run_id, ())) >= count for run_id in run_ids))

    async def ends(self, *run_ids: str) -> list[EngineOutput]:
        await self.until(lambda: all(run_id in self.ended for run_id in run_ids))
        return [self.ended[run_id] for run_id in run_ids]

    async def run(
        self, run_id: str, tokens: int, *, prompt: Prompt = PROMPT, sampling: Sampling = GREEDY, after: Sequence[int] = ()
    ) -> tuple[list[int], EngineOutput]:
        """Tokens of a run, and its end."""
        await self.add(run_id, tokens, prompt=prompt, sampling=sampling, after=after)
        (end,) = await self.ends(run_id)
        return self.tokens[run_id], end
