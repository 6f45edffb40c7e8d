"""The openai engine on a server that fails: every fault ends a run with the right kind of failure, and the engine continues."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp
import pytest

from qlm_agent.engines.openai import run as run_module
from qlm_agent.engines.openai.engine import OpenAiEngine
from qlm_agent.engines.port import (
    EngineFailure,
    FailureKind,
    FinishReason,
    ModelLoadFailed,
    Sampling,
    Tier,
    TokenPrompt,
)
from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.errors import ConfigError
from running_text_server import RunningTextServer, shared_text_server
from text_server import KEY, LIMITED_S, MODEL

from .openai_rig import DEADLINE_S, Answers, fault, run, text_engine

SHORT_S = 1.0
"""For what must not answer in time: never for what must."""


@pytest.fixture
def server() -> RunningTextServer:
    return shared_text_server()


@pytest.fixture
def own_server() -> Iterator[RunningTextServer]:
    """To be killed."""
    server = RunningTextServer().start()
    yield server
    server.kill()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, server: RunningTextServer) -> Callable[..., OpenAiEngine]:
    monkeypatch.setenv("SERVER_KEY", KEY)

    def make(**settings: object) -> OpenAiEngine:
        return text_engine(server, **settings)

    return make


@pytest.fixture
async def engine(make: Callable[..., OpenAiEngine]) -> AsyncIterator[OpenAiEngine]:
    engine = make()
    await engine.start()
    await engine.load_model("m", Tier.ACTIVE)
    yield engine
    await engine.stop()


async def still_open(server: RunningTextServer) -> int:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{server.url}/open") as answer:
        found = (await answer.json())["open"]
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize(
    ("name", "count", "kind", "said"),
    [
        ("refused", 1, FailureKind.REFUSED, "no such thing"),
        ("broken", 1, FailureKind.BROKEN, "out of order"),
        ("busy", 3, FailureKind.AWAY, "overloaded"),
        ("refuse_connection", 3, FailureKind.BROKEN, "/v1/completions"),
        ("drop", 1, FailureKind.BROKEN, "/v1/completions"),
        ("nonsense", 1, FailureKind.BROKEN, "invalid answer"),
        ("no_choice", 1, FailureKind.BROKEN, "chunk without text"),
        ("error_event", 1, FailureKind.BROKEN, "it broke"),
        ("abort", 1, FailureKind.BROKEN, "abort"),
        ("no_finish", 1, FailureKind.BROKEN, "finish"),
    ],
)
async def test_a_fault_fails_its_run_alone(
    server: RunningTextServer, engine: OpenAiEngine, name: str, count: int, kind: FailureKind, said: str
) -> None:
    answers = Answers(engine)
    await fault(server, name, count)
    await engine.add(run("bad"))
    failure = (await answers.end("bad")).failure
    assert failure is not None
    assert (failure.kind, said in failure.message) == (kind, True), failure
    await engine.add(run("good"))
    assert (await answers.end("good")).finish is FinishReason.STOP
    assert len(answers.text["good"].split()) == 20
    assert answers.text["good"].startswith(answers.text.get("bad", ""))


@pytest.mark.parametrize(("name", "setting"), [("silent", "first_token_timeout_s"), ("stall", "stall_timeout_s")])
async def test_silence_is_not_waited_for(server: RunningTextServer, make: Callable[..., OpenAiEngine], name: str, setting: str) -> None:
    engine = make(**{setting: SHORT_S})
    await engine.start()
    await engine.load_model("m", Tier.ACTIVE)
    await fault(server, name)
    await engine.add(run("bad"))
    failure = (await Answers(engine).end("bad")).failure
    assert failure is not None
    assert (failure.kind, "silent" in failure.message) == (FailureKind.BROKEN, True), failure
    await engine.stop()


@pytest.mark.parametrize("name", ["busy", "limited", "refuse_connection"])
async def test_a_passing_fault_is_retried(server: RunningTextServer, engine: OpenAiEngine, name: str) -> None:
    answers = Answers(engine)
    await fault(server, name, 2)
    await engine.add(run("r"))
    assert (await answers.end("r")).finish is FinishReason.STOP
    assert len(answers.text["r"].split()) == 20


async def test_the_pause_that_a_server_requests_is_kept(
    server: RunningTextServer, engine: OpenAiEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "RETRY_MIN_S", 0.001)
    monkeypatch.setattr(run_module, "RETRY_MAX_S", 0.001)
    answers = Answers(engine)
    await fault(server, "limited", 2)
    began_s = time.monotonic()
    await engine.add(run("r"))
    assert (await answers.end("r")).finish is FinishReason.STOP
    assert time.monotonic() - began_s >= 2 * LIMITED_S


async def test_a_bug_breaks_its_run_alone(engine: OpenAiEngine) -> None:
    answers = Answers(engine)
    await engine.add(run("bug", sampling=Sampling(stop=(7,))))  # type: ignore[arg-type]
    failure = (await answers.end("bug")).failure
    assert failure is not None
    assert (failure.kind, "TypeError" in failure.message) == (FailureKind.BROKEN, True)
    await engine.add(run("good"))
    assert (await answers.end("good")).finish is FinishReason.STOP


async def test_aborting_closes_the_connection(server: RunningTextServer, make: Callable[..., OpenAiEngine]) -> None:
    engine = make(stall_timeout_s=600.0)
    await engine.start()
    await engine.load_model("m", Tier.ACTIVE)
    answers = Answers(engine)
    await fault(server, "stall", count=5)  # they would never end by themselves
    for number in range(5):
        await engine.add(run(f"r{number}"))
    await answers.until(lambda: len(answers.text) == 5)
    assert await still_open(server) == 5
    await engine.abort([f"r{number}" for number in range(5)])
    async with asyncio.timeout(DEADLINE_S):
        while await still_open(server):
            await asyncio.sleep(0.05)
    await engine.stop()


async def test_output_ends_before_a_stop_string(engine: OpenAiEngine) -> None:
    answers = Answers(engine)
    await engine.add(run("whole", answer=30))
    await answers.end("whole")
    words = answers.text["whole"].split(" ")[1:]
    stop = f"{words[9]} {words[10]}"
    await engine.add(run("cut", answer=30, sampling=Sampling(stop=("never", stop))))
    assert (await answers.end("cut")).finish is FinishReason.STOP
    assert answers.text["cut"] == answers.text["whole"][: answers.text["whole"].index(stop)]
    earlier = tuple(f" {word}" for word in words[:9])
    await engine.add(run("seam", answer=30, produced_pieces=earlier, sampling=Sampling(stop=(stop,))))
    assert (await answers.end("seam")).finish is FinishReason.STOP
    assert "".join(earlier) + answers.text["seam"] == answers.text["cut"]


async def test_requests_that_it_cannot_serve_are_refused(engine: OpenAiEngine) -> None:
    answers = Answers(engine)
    chat = ChatPrompt(messages=({"role": "user", "content": "hello [5 words]"},))
    await engine.add(run("ids", prompt=TokenPrompt(ids=(1, 2, 3))))
    await engine.add(run("extra", sampling=Sampling(top_k=4)))
    await engine.add(run("chat", prompt=chat))
    for run_id, said in (("ids", "output=tokens"), ("extra", "top_k")):
        failure = (await answers.end(run_id)).failure
        assert isinstance(failure, EngineFailure)
        assert (failure.kind, said in failure.message) == (FailureKind.REFUSED, True), failure
    assert (await answers.end("chat")).failure is None


async def test_a_model_is_loaded_where_its_server_has_it(make: Callable[..., OpenAiEngine]) -> None:
    engine = make(models={"n": {"remote": "another"}, "m": {"remote": MODEL}})
    await engine.start()
    assert engine.tier("m") is Tier.COLD
    await engine.load_model("m", Tier.ACTIVE)
    with pytest.raises(ModelLoadFailed, match=f"no model another, but {MODEL}"):
        await engine.load_model("n", Tier.ACTIVE)
    assert (engine.tier("m"), engine.tier("n"), engine.stats().active_model) == (Tier.ACTIVE, Tier.COLD, "m")
    await engine.stop()


async def test_a_key_may_be_from_a_file_with_a_newline(make: Callable[..., OpenAiEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", f"{KEY}\n")
    engine = make()
    await engine.start()
    await engine.load_model("m", Tier.ACTIVE)
    await engine.stop()


async def test_a_name_that_cannot_be_looked_up_is_a_server_that_is_not_there(make: Callable[..., OpenAiEngine]) -> None:
    engine = make(base_url="http://a..b")
    await engine.start()
    with pytest.raises(ModelLoadFailed, match=r"http://a\.\.b/v1/models: "):
        await engine.load_model("m", Tier.ACTIVE)
    await engine.stop()


async def loaded(engine: OpenAiEngine) -> None:
    """Loads its model as the agent does: again and again."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await engine.load_model("m", Tier.ACTIVE)
            except ModelLoadFailed:
                await asyncio.sleep(0.1)
            else:
                return


async def test_a_server_that_dies_has_no_active_model_until_it_is_back(
    own_server: RunningTextServer, make: Callable[..., OpenAiEngine]
) -> None:
    server, engine = own_server, make(base_url=own_server.url)
    await engine.start()
    await engine.load_model("m", Tier.ACTIVE)
    answers = Answers(engine)
    await engine.add(run("r", answer=1900, output_tokens_max=1900))
    await answers.until(lambda: "r" in answers.text)
    server.kill()
    failure = (await answers.end("r")).failure
    assert failure is not None
    assert failure.kind is FailureKind.BROKEN
    await answers.until(lambda: engine.stats().active_model == "")
    with pytest.raises(ModelLoadFailed, match=server.url):
        await engine.load_model("m", Tier.ACTIVE)
    await engine.add(run("early"))
    assert (await answers.end("early")).failure is not None
    server.start()
    await loaded(engine)
    await engine.add(run("again"))
    assert (await answers.end("again")).finish is FinishReason.STOP
    await engine.stop()


@pytest.mark.parametrize("status", [401, 404, 500])
async def test_a_server_that_is_there_and_serves_nobody_is_lost_through_no_fault_of_the_runs(
    own_server: RunningTextServer, make: Callable[..., OpenAiEngine], status: int
) -> None:
    server, engine = own_server, make(base_url=own_server.url)
    await engine.start()
    await engine.load_model("m", Tier.ACTIVE)
    answers = Answers(engine)
    await engine.add(run("before", answer=1900, output_tokens_max=1900))
    await answers.until(lambda: "before" in answers.text)
    await fault(server, "sick", status=status)
    for number in range(20):
        await engine.add(run(f"r{number}"))
    await answers.until(lambda: len(answers.ends) == 21)
    assert {end.failure and end.failure.kind for end in answers.ends.values()} == {FailureKind.AWAY}
    assert engine.stats().active_model == ""
    with pytest.raises(ModelLoadFailed, match=f"answers {status}"):
        await engine.load_model("m", Tier.ACTIVE)
    await fault(server, "none", 0)
    await loaded(engine)
    await engine.add(run("again"))
    assert (await answers.end("again")).finish is FinishReason.STOP
    await engine.stop()


async def test_a_server_that_hangs_is_given_up(own_server: RunningTextServer, make: Callable[..., OpenAiEngine]) -> None:
    server, engine = own_server, make(base_url=own_server.url, call_timeout_s=SHORT_S, stall_timeout_s=600.0)
    await engine.start()
    await loaded(engine)
    answers = Answers(engine)
    await engine.add(run("r", answer=1900, output_tokens_max=1900))
    await answers.until(lambda: "r" in answers.text)
    os.kill(server.pid, signal.SIGSTOP)
    failure = (await answers.end("r")).failure
    assert failure is not None
    assert failure.kind is FailureKind.BROKEN
    assert engine.stats().active_model == ""
    os.kill(server.pid, signal.SIGCONT)
    await loaded(engine)
    await engine.stop()


async def test_settings_that_do_not_fit_are_named(make: Callable[..., OpenAiEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"agent\.openai\.models: other"):
        make(models={"other": {}})
    with pytest.raises(ConfigError, match=r"agent\.openai\.sleep"):
        make(sleep=True)
    for url in ("http://127.0.0.1/v1", "http://127.0.0.1/base/v1/"):
        with pytest.raises(ConfigError, match=r"agent\.openai\.base_url: without /v1"):
            make(base_url=url)
    with pytest.raises(ConfigError, match=r"agent\.openai\.base_url: it names a user"):
        make(base_url="http://user:word@127.0.0.1")
    monkeypatch.setenv("SERVER_KEY", "two\nlines")
    with pytest.raises(ConfigError, match="SERVER_KEY has characters"):
        make()
    monkeypatch.delenv("SERVER_KEY")
    with pytest.raises(ConfigError, match="SERVER_KEY"):
        make()
