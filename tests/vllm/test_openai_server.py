"""The openai engine on vLLM's own API server: checks beyond the conformance suite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tokenizers import Tokenizer

from engine_reader import EngineReader
from qlm_agent.engines.openai.build import openai_engine
from qlm_agent.engines.openai.engine import OpenAiEngine
from qlm_agent.engines.openai.settings import OpenAiSettings
from qlm_agent.engines.port import (
    FailureKind,
    FinishReason,
    ModelLoadFailed,
    Sampling,
    TextPrompt,
    Tier,
    TokenPrompt,
)
from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.model import ModelSpec
from running_vllm_server import CONTEXT_TOKENS, KV_TOKENS, MODEL, RunningVllmServer, shared_vllm_server
from tiny_models import tiny_model

DEADLINE_S = 120.0

pytestmark = pytest.mark.timeout(600)


def engine_on(server: RunningVllmServer, **settings: object) -> OpenAiEngine:
    values = {"base_url": server.url, "models": {"m": {"remote": MODEL}}, "call_timeout_s": 60.0, "poll_s": 0.2, **settings}
    specs = {"m": ModelSpec(name="m", profile="tiny", context_tokens_max=CONTEXT_TOKENS)}
    return openai_engine(OpenAiSettings.model_validate(values), specs, {"m": 0}, 32)


@pytest.fixture
async def engine() -> AsyncIterator[OpenAiEngine]:
    engine = engine_on(shared_vllm_server())
    await engine.start()
    await engine.load_model("m", Tier.ACTIVE)
    yield engine
    await engine.stop()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model(1, CONTEXT_TOKENS) / "tokenizer.json"))


class Answers(EngineReader):
    """Reads an engine on a server."""

    def __init__(self, engine: OpenAiEngine) -> None:
        super().__init__(engine, "m")


async def test_text_and_chats_become_the_tokens_of_the_model(engine: OpenAiEngine, tokenizer: Tokenizer) -> None:
    answers = Answers(engine)
    ids = tokenizer.encode("the list of names").ids
    chat_ids = tokenizer.encode("<|im_start|>user\nthe list<|im_end|>\n<|im_start|>assistant\n").ids
    for name, same in (
        ("text", TextPrompt(text="the list of names")),
        ("chat", ChatPrompt(messages=({"role": "user", "content": "the list"},))),
    ):
        expected, _ = await answers.run(f"{name}-ids", 40, prompt=TokenPrompt(ids=ids if name == "text" else chat_ids))
        found, _ = await answers.run(name, 40, prompt=same)
        assert found == expected
        resumed, _ = await answers.run(f"{name}-rest", 40, prompt=same, after=expected[:9])
        assert resumed == expected[9:]


async def test_stop_strings_end_output_across_chunks_and_seams(engine: OpenAiEngine, tokenizer: Tokenizer) -> None:
    answers = Answers(engine)
    prompt = TokenPrompt(ids=tuple(range(50, 58)))
    whole, _ = await answers.run("whole", 40, prompt=prompt)
    text = tokenizer.decode(whole[15:18])
    sampling = Sampling(temperature=0.0, ignore_eos=True, stop=(text,))
    first = next(at for at in range(40) if text in tokenizer.decode(whole[: at + 3]))
    cut, end = await answers.run("cut", 40, prompt=prompt, sampling=sampling)
    assert end.finish is FinishReason.STOP
    assert cut == whole[: len(cut)]
    assert text not in tokenizer.decode(cut)
    assert first - 1 <= len(cut) <= first
    for seam in range(len(cut) + 1):
        rest, end = await answers.run(f"seam{seam}", 40, prompt=prompt, sampling=sampling, after=whole[:seam])
        assert (whole[:seam] + rest, end.finish) == (cut, FinishReason.STOP), seam


async def test_structured_output_and_seeds_are_passed_on(engine: OpenAiEngine, tokenizer: Tokenizer) -> None:
    answers = Answers(engine)
    prompt = TokenPrompt(ids=tuple(range(60, 68)))
    ids, end = await answers.run("regex", 40, prompt=prompt, sampling=Sampling(temperature=0.0, regex="(yes|no)"))
    assert tokenizer.decode(ids) in ("yes", "no")
    assert end.finish is FinishReason.STOP
    drawn = [
        (await answers.run(f"seed{n}", 40, prompt=prompt, sampling=Sampling(temperature=1.0, seed=seed)))[0]
        for n, seed in enumerate((1, 1, 2))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    for n, sampling in enumerate((Sampling(top_k=1), Sampling(min_p=1.0), Sampling(top_p=1e-6))):
        ids, _ = await answers.run(f"one{n}", 40, prompt=prompt, sampling=sampling)
        greedy, _ = await answers.run(f"greedy{n}", 40, prompt=prompt, sampling=Sampling(temperature=0.0))
        assert ids == greedy
    repeated, _ = await answers.run("free", 200, prompt=prompt)
    penalised, _ = await answers.run("penal", 200, prompt=prompt, sampling=Sampling(temperature=0.0, ignore_eos=True, presence_penalty=2.0))
    assert repeated != penalised
    _, end = await answers.run("bad", 40, prompt=prompt, sampling=Sampling(regex="("))
    assert end.failure is not None
    assert end.failure.kind is FailureKind.REFUSED


async def test_its_load_is_as_the_server_reports(engine: OpenAiEngine) -> None:
    assert engine.stats().kv_capacity_tokens == KV_TOKENS
    other = engine_on(shared_vllm_server())
    await other.start()
    await other.load_model("m", Tier.ACTIVE)
    others = Answers(other)
    names = [f"other{number}" for number in range(4)]
    for number, name in enumerate(names):
        await others.add(name, prompt=TokenPrompt(ids=tuple(range(100 + number, 108 + number))))
    await others.until_made(1, *names)
    reading = asyncio.create_task(others.ends(*names))
    async with asyncio.timeout(DEADLINE_S):
        while engine.stats().running < 4 or engine.stats().kv_used_tokens < 100:
            await asyncio.sleep(0.02)
    reading.cancel()
    await asyncio.wait([reading])
    await other.stop()
    async with asyncio.timeout(DEADLINE_S):
        while engine.stats().running or engine.stats().kv_used_tokens:
            await asyncio.sleep(0.02)


async def test_a_server_without_sleep_mode_is_not_believed() -> None:
    """It says that it sleeps, and frees nothing."""
    engine = engine_on(shared_vllm_server(), sleep=True)
    await engine.start()
    await engine.load_model("m", Tier.ACTIVE)
    with pytest.raises(ModelLoadFailed, match="without --enable-sleep-mode"):
        await engine.load_model("m", Tier.WARM)
    assert engine.tier("m") is Tier.ACTIVE
    await engine.stop()


async def test_a_killed_server_breaks_its_runs_and_serves_again() -> None:
    server = shared_vllm_server()
    engine = engine_on(server)
    await engine.start()
    await engine.load_model("m", Tier.ACTIVE)
    answers = Answers(engine)
    prompt = TokenPrompt(ids=tuple(range(70, 78)))
    await answers.add("r", prompt=prompt)
    await answers.until_made(21, "r")
    server.kill()
    (lost,) = await answers.ends("r")
    assert lost.failure is not None
    assert lost.failure.kind is FailureKind.BROKEN
    assert engine.stats().active_model == ""
    server.start()
    await engine.load_model("m", Tier.ACTIVE)
    made = answers.tokens["r"]
    rest, _ = await answers.run("rest", len(made) + 30, prompt=prompt, after=made)
    whole, _ = await answers.run("whole", len(made) + 30, prompt=prompt)
    assert made + rest == whole
    await engine.stop()
