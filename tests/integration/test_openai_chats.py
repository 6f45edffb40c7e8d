"""Chats and limits of the openai engine on servers that know only text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from qlm_agent.engines.openai.engine import OpenAiEngine
from qlm_agent.engines.port import FailureKind, FinishReason, TextPrompt, Tier
from qlm_core.vocabulary.chat import ChatPrompt
from running_text_server import RunningTextServer, shared_text_server
from text_server import CONTEXT_WORDS, KEY

from .openai_rig import Answers, calls, fault, run, text_engine


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> RunningTextServer:
    monkeypatch.setenv("SERVER_KEY", KEY)
    return shared_text_server()


@pytest.fixture
async def engine(server: RunningTextServer) -> AsyncIterator[OpenAiEngine]:
    engine = text_engine(server)
    await engine.start()
    await engine.load_model("m", Tier.ACTIVE)
    yield engine
    await engine.stop()


def hello(answer: int = 5, **fields: Any) -> ChatPrompt:
    return ChatPrompt(messages=({"role": "system", "content": "be kind"}, {"role": "user", "content": f"hello [{answer} words]"}), **fields)


async def test_a_chat_is_sent_to_the_chat_endpoint(server: RunningTextServer, engine: OpenAiEngine) -> None:
    answers = Answers(engine)
    await engine.add(run("text", prompt=TextPrompt(text="hello [5 words]")))
    await engine.add(run("chat", prompt=hello()))
    await answers.end("text")
    await answers.end("chat")
    assert answers.text["chat"] == answers.text["text"] != ""
    assert answers.ends["chat"].finish is FinishReason.STOP
    assert json.loads((await calls(server))[-1]) == list(hello().messages)


async def test_a_chat_continues_where_its_server_can(server: RunningTextServer) -> None:
    for continues in (False, True):
        engine = text_engine(server, continues_chats=continues)
        await engine.start()
        await engine.load_model("m", Tier.ACTIVE)
        answers = Answers(engine)
        await engine.add(run("whole", prompt=hello(30)))
        await answers.end("whole")
        half = tuple(f" {word}" for word in answers.text["whole"].split(" ")[1:13])
        await engine.add(run("half", prompt=hello(30), produced_pieces=half))
        await engine.add(run("tools", prompt=hello(variables={"tools": []})))
        end = await answers.end("half")
        if continues:
            assert "".join(half) + answers.text["half"] == answers.text["whole"]
        else:
            assert end.failure is not None
            assert (end.failure.kind, "continues_chats" in end.failure.message) == (FailureKind.REFUSED, True)
        refused = (await answers.end("tools")).failure
        assert refused is not None
        assert "tools" in refused.message
        await engine.stop()


@pytest.mark.parametrize("prompt", [TextPrompt(text="a b c d e f g h [5 words]"), hello(), TextPrompt(text="x " * 1800 + "[5 words]")])
async def test_a_limit_that_the_context_has_no_room_for_is_made_smaller(
    server: RunningTextServer, engine: OpenAiEngine, prompt: TextPrompt | ChatPrompt
) -> None:
    """A gateway counts text as a quarter of its bytes, here a prompt's words are twice that or more."""
    await fault(server, "strict", count=20)
    answers = Answers(engine)
    await engine.add(run("long", prompt=prompt, prompt_tokens=1, output_tokens_max=CONTEXT_WORDS))
    assert (await answers.end("long")).finish is FinishReason.STOP
    assert len(answers.text["long"].split()) == 5
    await fault(server, "refused")
    await engine.add(run("wrong", prompt=prompt, prompt_tokens=1, output_tokens_max=CONTEXT_WORDS))
    failure = (await answers.end("wrong")).failure
    assert failure is not None
    assert (failure.kind, "no such thing" in failure.message) == (FailureKind.REFUSED, True)
