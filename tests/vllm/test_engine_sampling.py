"""Sampling parameters, prompts and stop strings through a real engine process, and what an eviction makes of them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine_reader import GREEDY, PROMPT, EngineReader
from qlm_agent.engines.port import (
    EngineOutput,
    FailureKind,
    FinishReason,
    Prompt,
    Sampling,
    TextPrompt,
    Tier,
    TokenPrompt,
)
from qlm_agent.engines.vllm.engine import VllmEngine
from qlm_agent.engines.vllm.plans import VllmModel
from qlm_agent.engines.vllm.settings import VllmSettings
from qlm_core.vocabulary.chat import ChatPrompt
from vllm_nursery import QuickTemplate


class Rig(EngineReader):
    """An engine with one model; runs are named by a count."""

    def __init__(self, engine: VllmEngine, tokenizer: Tokenizer) -> None:
        super().__init__(engine)
        self.tokenizer = tokenizer
        self.names = (f"r{number}" for number in itertools.count())

    async def made(
        self, sampling: Sampling, tokens: int, *, prompt: Prompt = PROMPT, after: Sequence[int] = ()
    ) -> tuple[list[int], EngineOutput]:
        return await self.run(next(self.names), tokens, prompt=prompt, sampling=sampling, after=after)

    def text(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens)
        return text


@pytest.fixture
async def rig(tiny_models: tuple[Path, Path]) -> AsyncIterator[Rig]:
    models = {"a": VllmModel(name="a", weights=str(tiny_models[0]), context_tokens_max=2048)}
    engine = VllmEngine(models, VllmSettings(kv_cache_gb=0.1, host_kv_gb=0.05), batch_max=8, template=QuickTemplate())
    await engine.start()
    try:
        await engine.load_model("a", Tier.ACTIVE)
        yield Rig(engine, Tokenizer.from_file(str(tiny_models[0] / "tokenizer.json")))
    finally:
        await engine.stop()


async def test_stop_strings_end_output_before_them_wherever_it_was_evicted(rig: Rig) -> None:
    greedy = GREEDY
    whole, _ = await rig.made(greedy, 40)
    text = rig.text(whole)
    inside = [at for at in range(20, len(text) - 8) if text[at : at + 8].isascii()]
    at = inside[len(inside) // 2]
    stop = text[at : at + 8]  # of more than one token
    stopping = Sampling(temperature=0.0, ignore_eos=True, stop=(stop, "never said"))
    output, ended = await rig.made(stopping, 40)
    assert ended.finish is FinishReason.STOP
    assert output == whole[: len(output)]
    assert stop not in rig.text(output)
    assert stop in rig.text(whole[: len(output) + 8])
    for produced in range(len(output) + 1):
        rest, again = await rig.made(stopping, 40, after=output[:produced])
        assert (output[:produced] + rest, again.finish) == (output, FinishReason.STOP), f"evicted after {produced}"


async def test_the_model_ends_its_answer_and_an_evicted_one_knows(rig: Rig) -> None:
    """The end-of-sequence token is forced by a regular expression that allows nothing else."""
    output, ended = await rig.made(Sampling(temperature=0.0, regex="ab"), 40)
    assert ended.finish is FinishReason.STOP
    assert rig.text(output) == "ab"
    nothing, again = await rig.made(Sampling(temperature=0.0), 40, after=output)
    assert (nothing, again.finish) == ([], FinishReason.STOP)


async def test_a_seed_gives_the_same_answer(rig: Rig) -> None:
    seeded = Sampling(temperature=1.0, seed=7, ignore_eos=True)
    first, _ = await rig.made(seeded, 30)
    second, _ = await rig.made(seeded, 30)
    other, _ = await rig.made(Sampling(temperature=1.0, seed=8, ignore_eos=True), 30)
    assert first == second != other


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=7, ignore_eos=True),
        Sampling(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.2, ignore_eos=True),
        Sampling(temperature=0.0, regex="[a-z]{400}"),
    ],
    ids=["seed", "penalties", "structured"],
)
async def test_a_run_that_may_not_be_aborted_continues_exactly_after_a_kv_swap(rig: Rig, sampling: Sampling) -> None:
    assert not sampling.resumable, "the agent's machine never aborts it"
    whole, _ = await rig.made(sampling, 120)
    await rig.add("moved", 120, sampling=sampling)
    await rig.until_made(3, "moved")
    assert list(await rig.engine.offload(["moved"])) == ["moved"]
    assert list(await rig.engine.restore(["moved"])) == ["moved"]
    await rig.ends("moved")
    assert rig.tokens["moved"] == whole


async def test_penalties_change_the_answer(rig: Rig) -> None:
    plain, _ = await rig.made(Sampling(temperature=0.0, ignore_eos=True), 60)
    penalised, _ = await rig.made(Sampling(temperature=0.0, ignore_eos=True, repetition_penalty=5.0), 60)
    assert penalised != plain


async def test_structured_output_has_its_structure(rig: Rig) -> None:
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["n"]})
    output, ended = await rig.made(Sampling(temperature=0.0, json_schema=schema), 200)
    assert ended.finish is FinishReason.STOP
    assert 0 <= json.loads(rig.text(output))["n"] <= 99
    output, _ = await rig.made(Sampling(temperature=0.0, regex="[0-9]{3}-[a-f]{2}"), 50)
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", rig.text(output))


@pytest.mark.parametrize(
    "sampling", [Sampling(regex="("), Sampling(json_schema="{"), Sampling(temperature=-1.0), Sampling(repetition_penalty=-2.0)]
)
async def test_wrong_parameters_are_refused_by_themselves(rig: Rig, sampling: Sampling) -> None:
    _, ended = await rig.made(sampling, 20)
    assert ended.failure is not None
    assert ended.failure.kind is FailureKind.REFUSED
    assert ended.failure.message
    assert (await rig.made(Sampling(temperature=0.0, ignore_eos=True), 5))[1].finish is FinishReason.LENGTH


async def test_token_ids_outside_of_the_vocabulary_are_refused(rig: Rig) -> None:
    _, ended = await rig.made(Sampling(temperature=0.0), 5, prompt=TokenPrompt(ids=[1, 1 << 24]))
    assert ended.failure is not None
    assert ended.failure.kind is FailureKind.REFUSED


async def test_text_and_chat_are_the_tokens_that_the_gateway_counts(rig: Rig) -> None:
    greedy = GREEDY
    text = "the quick brown fox"
    chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    for prompt, said in ((TextPrompt(text=text), text), (ChatPrompt(messages=({"role": "user", "content": text},)), chat)):
        by_text, _ = await rig.made(greedy, 20, prompt=prompt)
        by_tokens, _ = await rig.made(greedy, 20, prompt=TokenPrompt(ids=rig.tokenizer.encode(said).ids))
        assert by_text == by_tokens
