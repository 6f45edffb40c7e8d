"""Models that sleep and wake, each on a server of its own: nothing that a server says of itself is believed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from structlog.testing import capture_logs

from qlm_agent.engines.openai.build import openai_engine
from qlm_agent.engines.openai.engine import OpenAiEngine
from qlm_agent.engines.openai.settings import OpenAiSettings
from qlm_agent.engines.port import ModelLoadFailed, Tier
from qlm_core.vocabulary.model import ModelSpec
from running_text_server import RunningTextServer
from text_server import KEY, MODEL

DEADLINE_S = 60.0


class Site:
    """Servers, and an engine on them."""

    def __init__(self, names: str, *options: str) -> None:
        self.servers = {name: RunningTextServer(*options).start() for name in names}
        settings = {
            "api_key_env": "SERVER_KEY",
            "output": "text",
            "sleep": True,
            "models": {name: {"remote": MODEL, "base_url": server.url} for name, server in self.servers.items()},
            "call_timeout_s": 20.0,
            "swap_timeout_s": 2.0,
            "poll_s": 0.05,
        }
        specs = {name: ModelSpec(name=name, profile="Mistral-7B", context_tokens_max=2048) for name in self.servers}
        self.engine: OpenAiEngine = openai_engine(OpenAiSettings.model_validate(settings), specs, dict.fromkeys(specs, 10_000), 32)

    async def fault(self, name: str, fault: str) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:
            await session.post(f"{self.servers[name].url}/fault", json={"name": fault})

    async def die(self, name: str) -> None:
        """A server that is gone, and known to be."""
        self.servers[name].kill()
        async with asyncio.timeout(DEADLINE_S):
            while self.engine.stats().active_model == name:
                await asyncio.sleep(0.01)

    async def post(self, name: str, path: str) -> None:
        """A call by another client of a server."""
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:
            await session.post(self.servers[name].url + path)

    async def calls(self, name: str) -> list[str]:
        """Calls that a server received."""
        headers = {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{self.servers[name].url}/calls") as answer:
            calls: list[str] = (await answer.json())["calls"]
        return calls


@pytest.fixture
def options() -> tuple[str, ...]:
    return ()


@pytest.fixture
def names() -> str:
    return "ab"


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, names: str, options: tuple[str, ...]) -> Iterator[Site]:
    monkeypatch.setenv("SERVER_KEY", KEY)
    site = Site(names, *options)
    yield site
    for server in site.servers.values():
        server.kill()


@pytest.fixture
async def site(servers: Site) -> AsyncIterator[Site]:
    await servers.engine.start()
    yield servers
    await servers.engine.stop()


async def test_one_is_awake_and_is_restored_from_host_memory(site: Site) -> None:
    await site.engine.load_model("a", Tier.ACTIVE)
    assert (await site.calls("a"), await site.calls("b")) == ([], ["/sleep?level=1"])
    await site.engine.load_model("b", Tier.ACTIVE)
    assert (site.engine.tier("a"), site.engine.tier("b")) == (Tier.WARM, Tier.ACTIVE)
    assert (await site.calls("a"), await site.calls("b")) == (["/sleep?level=1"], ["/sleep?level=1", "/wake_up"])


async def test_weights_that_were_dropped_are_read_again(site: Site) -> None:
    await site.engine.load_model("a", Tier.ACTIVE)
    assert site.engine.tier("b") is Tier.WARM
    with pytest.raises(ModelLoadFailed, match="sleeps already"):
        await site.engine.load_model("b", Tier.COLD)
    await site.engine.load_model("b", Tier.ACTIVE)
    await site.engine.load_model("b", Tier.COLD)
    assert (site.engine.tier("a"), site.engine.tier("b"), site.engine.stats().active_model) == (Tier.WARM, Tier.COLD, "")
    await site.engine.load_model("b", Tier.ACTIVE)
    dropped = ["/sleep?level=1", "/wake_up", "/sleep?level=2"]
    woken = ["/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache", "/reset_prefix_cache"]
    assert await site.calls("b") == [*dropped, *woken]


@pytest.mark.parametrize(("fault", "said"), [("wake_fails", "out of memory"), ("wakes_broken", "no weights")])
async def test_a_failed_wake_leaves_the_other_model_active(site: Site, fault: str, said: str) -> None:
    await site.engine.load_model("a", Tier.ACTIVE)
    await site.fault("b", fault)
    with pytest.raises(ModelLoadFailed, match=said):
        await site.engine.load_model("b", Tier.ACTIVE)
    assert (site.engine.tier("a"), site.engine.stats().active_model) == (Tier.ACTIVE, "a")
    assert (await site.calls("a"))[-1] == "/wake_up"


async def test_a_server_that_woke_broken_gives_the_memory_back_and_reads_its_weights_again(site: Site) -> None:
    await site.engine.load_model("a", Tier.ACTIVE)
    await site.fault("b", "wakes_broken")
    with pytest.raises(ModelLoadFailed, match="no weights"):
        await site.engine.load_model("b", Tier.ACTIVE)
    slept = ["/sleep?level=1", "/wake_up", "/sleep?level=1"]
    assert await site.calls("b") == slept, "a needs the memory that it took"
    await site.fault("b", "")
    await site.engine.load_model("b", Tier.ACTIVE)
    woken = ["/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache", "/reset_prefix_cache"]
    assert await site.calls("b") == [*slept, *woken], "what it took to host memory may be broken"


async def test_a_server_that_only_says_that_it_sleeps_is_found_out(site: Site) -> None:
    await site.engine.load_model("a", Tier.ACTIVE)
    await site.fault("a", "sleepless")
    with pytest.raises(ModelLoadFailed, match="called to sleep"):
        await site.engine.load_model("b", Tier.ACTIVE)
    assert site.engine.stats().active_model == "a"


async def test_a_server_that_fell_asleep_all_the_same_is_woken_again(site: Site) -> None:
    await site.engine.load_model("a", Tier.ACTIVE)
    await site.fault("a", "sleep_says_no")
    with pytest.raises(ModelLoadFailed, match="it says no"):
        await site.engine.load_model("b", Tier.ACTIVE)
    assert site.engine.stats().active_model == "a"
    assert "/wake_up?tags=kv_cache" in await site.calls("a"), "runs would wait for a server that sleeps"


@pytest.mark.parametrize("options", [("--no-sleep-mode",)])
async def test_a_server_that_frees_nothing_is_refused(site: Site) -> None:
    with pytest.raises(ModelLoadFailed, match="without --enable-sleep-mode"):
        await site.engine.load_model("a", Tier.ACTIVE)
    assert site.engine.tier("a") is Tier.COLD


@pytest.mark.parametrize("level", [1, 2])
async def test_a_server_that_slept_before_is_warm_and_its_weights_are_read_when_it_wakes(site: Site, level: int) -> None:
    await site.post("b", f"/sleep?level={level}")
    await site.engine.load_model("b", Tier.WARM)
    assert site.engine.tier("b") is Tier.WARM
    with pytest.raises(ModelLoadFailed, match="an unknown level"):
        await site.engine.load_model("b", Tier.COLD)
    await site.engine.load_model("b", Tier.ACTIVE)
    woken = ["/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache", "/reset_prefix_cache"]
    assert await site.calls("b") == [f"/sleep?level={level}", *woken], "it may have dropped them"


async def test_a_server_that_slept_before_needs_no_warming_of_its_own(site: Site) -> None:
    await site.post("b", "/sleep?level=1")
    await site.engine.load_model("a", Tier.ACTIVE)
    assert site.engine.tier("b") is Tier.WARM


@pytest.mark.parametrize("names", ["abc"])
async def test_a_server_that_died_holds_up_no_other_and_sleeps_when_it_is_back(site: Site) -> None:
    await site.engine.load_model("a", Tier.ACTIVE)
    await site.die("a")
    with capture_logs() as logs:
        await site.engine.load_model("b", Tier.ACTIVE)
    assert [log["model"] for log in logs if log["event"] == "engine_server_skipped"] == ["a"]
    assert (site.engine.tier("a"), site.engine.tier("b"), site.engine.tier("c")) == (Tier.COLD, Tier.ACTIVE, Tier.WARM)
    site.servers["a"].start()  # awake, as servers start
    await site.engine.load_model("c", Tier.ACTIVE)
    assert await site.calls("a") == ["/sleep?level=1"], "c needs the memory that it took meanwhile"
    await site.engine.load_model("a", Tier.ACTIVE)
    assert (site.engine.tier("a"), site.engine.tier("c")) == (Tier.ACTIVE, Tier.WARM)


async def test_a_wake_that_fails_beside_a_server_that_starts_is_reported(site: Site) -> None:
    await site.engine.load_model("a", Tier.ACTIVE)
    await site.die("a")
    await site.fault("b", "wake_fails")
    with pytest.raises(ModelLoadFailed, match="out of memory"):
        await site.engine.load_model("b", Tier.ACTIVE)
    assert site.engine.stats().active_model == ""
    await site.fault("b", "")
    await site.engine.load_model("b", Tier.ACTIVE)
    assert site.engine.stats().active_model == "b"


async def test_a_server_that_does_not_answer_holds_up_the_others(site: Site) -> None:
    """It lives, so it may hold the memory."""
    await site.fault("b", "no_info")
    with pytest.raises(ModelLoadFailed, match="out of order"):
        await site.engine.load_model("a", Tier.ACTIVE)
    assert site.engine.stats().active_model == ""
