"""The openai engine reads a server's metrics: the load of others is what they report above its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import aiohttp
import pytest

from qlm_agent.engines.openai.build import openai_engine
from qlm_agent.engines.openai.engine import OpenAiEngine
from qlm_agent.engines.openai.load_watch import Load, LoadWatch
from qlm_agent.engines.openai.server import OpenAiServer
from qlm_agent.engines.openai.settings import OpenAiSettings
from qlm_agent.engines.port import EngineRequest, TextPrompt, Tier
from qlm_core.vocabulary.model import ModelSpec
from running_text_server import RunningTextServer
from text_server import KEY, MODEL, text_prompt

DEADLINE_S = 60.0
HEADERS = {"Authorization": f"Bearer {KEY}"}
KV_TOKENS = 100 * 32


@pytest.fixture(scope="module")
def server() -> Iterator[RunningTextServer]:
    server = RunningTextServer().start()
    yield server
    server.kill()


async def set_metrics(server: RunningTextServer, metrics: str) -> None:
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        await session.post(f"{server.url}/metrics", data=metrics)


async def say(server: RunningTextServer, *, running: int, waiting: int, kv_usage: float) -> None:
    """Has the server report a load, by vLLM's names."""
    metrics = f"""
vllm:num_requests_running {running}
vllm:num_requests_waiting {waiting}
vllm:kv_cache_usage_perc {kv_usage}
vllm:cache_config_info{{block_size="32",num_gpu_blocks="100"}} 1.0
"""
    await set_metrics(server, metrics)


@pytest.fixture(autouse=True)
async def _without_metrics(server: RunningTextServer) -> None:
    """The server has none before a test says some."""
    await set_metrics(server, "")


@pytest.fixture
async def engine_of(server: RunningTextServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Awaitable[OpenAiEngine]]]:
    """Starts an engine for model m with these settings; it is stopped after the test."""
    monkeypatch.setenv("SERVER_KEY", KEY)
    started: list[OpenAiEngine] = []

    async def start(**settings: object) -> OpenAiEngine:
        of_server = {"base_url": server.url, "api_key_env": "SERVER_KEY", "output": "text", "models": {"m": {"remote": MODEL}}}
        specs = {"m": ModelSpec(name="m", profile="Mistral-7B", context_tokens_max=2048)}
        started.append(openai_engine(OpenAiSettings.model_validate(of_server | settings), specs, {"m": 10_000}, 32))
        await started[-1].start()
        return started[-1]

    yield start
    for engine in started:
        await engine.stop()


def long_run() -> EngineRequest:
    prompt = TextPrompt(text=text_prompt(1, 10, 1900))
    return EngineRequest(run_id="own", model="m", prompt=prompt, prompt_tokens=10, output_tokens_max=1900)


@pytest.fixture
def changes() -> list[None]:
    """One for each change that was reported."""
    return []


@pytest.fixture
async def watch_of(server: RunningTextServer, changes: list[None]) -> AsyncIterator[Callable[[Load], LoadWatch]]:
    """Makes watches over the server beside runs of one's own."""
    remote = OpenAiServer(server.url, KEY, OpenAiSettings(call_timeout_s=20.0))
    await remote.open()
    yield lambda own: LoadWatch(remote, poll_s=600.0, own=lambda: own, changed=lambda: changes.append(None))
    await remote.close()


async def test_load_beyond_ones_own_is_of_others(server: RunningTextServer, watch_of: Callable[[Load], LoadWatch]) -> None:
    watch = watch_of(Load(runs=2, kv_tokens=600))
    await say(server, running=4, waiting=3, kv_usage=0.5)
    await watch.poll()
    await watch.poll()
    assert watch.others == Load(runs=5, kv_tokens=KV_TOKENS // 2 - 600 - 2 * 31)  # a block of 32 may hold one token
    await say(server, running=1, waiting=0, kv_usage=0.0)  # it lags
    await watch.poll()
    assert watch.others == Load()


async def test_load_of_one_reading_alone_is_a_run_that_just_ended(server: RunningTextServer, watch_of: Callable[[Load], LoadWatch]) -> None:
    watch = watch_of(Load())
    for running in (0, 3, 0):
        await say(server, running=running, waiting=0, kv_usage=running / 10)
        await watch.poll()
        assert watch.others == Load()


async def test_kv_that_nobody_else_runs_for_is_the_rounding_of_blocks(
    server: RunningTextServer, watch_of: Callable[[Load], LoadWatch]
) -> None:
    watch = watch_of(Load(runs=2, kv_tokens=600))
    await say(server, running=2, waiting=0, kv_usage=0.5)
    await watch.poll()
    assert watch.others == Load()


async def test_without_metrics_nobody_else_is_there(server: RunningTextServer, watch_of: Callable[[Load], LoadWatch]) -> None:
    watch = watch_of(Load(runs=2, kv_tokens=600))
    await watch.poll()
    assert (watch.up, watch.last, watch.others) == (True, None, Load())


async def test_it_reports_when_the_load_of_others_changed(
    server: RunningTextServer, watch_of: Callable[[Load], LoadWatch], changes: list[None]
) -> None:
    watch = watch_of(Load())
    for running, changed in ((0, 0), (3, 0), (3, 1), (3, 1), (0, 2)):
        await say(server, running=running, waiting=0, kv_usage=running / 10)
        await watch.poll()
        assert len(changes) == changed


async def test_it_is_reported_beside_the_output_of_ones_own(
    server: RunningTextServer, engine_of: Callable[..., Awaitable[OpenAiEngine]]
) -> None:
    engine = await engine_of(poll_s=0.05, tell_every_s=0.001)
    await say(server, running=5, waiting=0, kv_usage=0.5)
    await engine.load_model("m", Tier.ACTIVE)
    await engine.add(long_run())
    for running in (4, 9):
        await say(server, running=running, waiting=0, kv_usage=0.5)
        async with asyncio.timeout(DEADLINE_S):
            while await engine.outputs() or engine.stats().others_runs != running - 1:
                pass
        assert engine.stats().active_model == "m"


async def test_the_load_of_others_takes_seats_and_kv(server: RunningTextServer, engine_of: Callable[..., Awaitable[OpenAiEngine]]) -> None:
    engine = await engine_of(poll_s=0.05)
    await engine.load_model("m", Tier.ACTIVE)
    assert engine.stats().kv_capacity_tokens == 10_000
    await engine.add(long_run())
    await engine.outputs()
    await say(server, running=4, waiting=0, kv_usage=0.9)
    async with asyncio.timeout(DEADLINE_S):
        while engine.stats().running < 4:
            await asyncio.sleep(0.01)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_capacity_tokens, stats.others_runs) == (4, 0, KV_TOKENS, 3)
    assert stats.kv_used_tokens > KV_TOKENS // 10, "only its own run counts"


@pytest.mark.parametrize(("setting", "capacity"), [(0, KV_TOKENS), (1_000, 1_000)])
async def test_the_setting_overrides_the_metrics_of_the_server(
    server: RunningTextServer, engine_of: Callable[..., Awaitable[OpenAiEngine]], setting: int, capacity: int
) -> None:
    await say(server, running=0, waiting=0, kv_usage=0.0)
    engine = await engine_of(kv_capacity_tokens=setting)
    await engine.load_model("m", Tier.ACTIVE)
    assert engine.stats().kv_capacity_tokens == capacity
