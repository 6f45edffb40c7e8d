"""The page for operators in a real browser, on a real cluster that is loaded, and then on what is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import qlm
from browser import Tab, opened_tab
from running_cluster import RunningCluster

MODELS = ("mistral-7b", "mistral-7b-code", "vicuna-13b")
SLOW = {"agent.simulated.time_scale": "0.02"}
"""An engine step takes so long that nothing ends by itself while a test looks."""
HOSTILE = '"><script>document.title=1</script>'
TEXTS = "[...document.querySelectorAll({query!r})].map((each) => each.textContent)"


async def texts(tab: Tab, query: str) -> list[str]:
    found: list[str] = await tab.evaluate(TEXTS.format(query=query))
    return found


async def test_a_browser_shows_the_cluster_under_load(tmp_path: Path) -> None:
    with RunningCluster(tmp_path / "state", SLOW) as cluster:
        await asyncio.to_thread(_load, cluster.address)
        state = cluster.state
        async with opened_tab(tmp_path) as tab:
            await tab.resize(1400, 1200)
            await tab.open(f"{state.of('gateway')[0].http}/page")
            await tab.until("document.querySelectorAll('#queues tbody tr').length > 1", "groups wait")
            assert sorted(await texts(tab, "#queues h3")) == ["a100-0", "h100-0"]
            assert await texts(tab, "#parts li") == ["gateway", "planner", "estimator"]
            assert await texts(tab, "#models tbody td:first-child") == list(MODELS)
            await tab.until(
                "[...document.querySelectorAll('#queues .meter')].some((each) => each.textContent.startsWith('KV'))", "KV is told"
            )
            colours = await tab.evaluate(
                "[...document.querySelectorAll('#legend .model')].map((each) => getComputedStyle(each, '::before').backgroundColor)"
            )
            assert len(set(colours)) == len(MODELS), "each model has its colour"
            light = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
            await tab.prefer("dark")
            assert await tab.evaluate("getComputedStyle(document.body).backgroundColor") != light
            unnamed = await tab.evaluate("[...document.querySelectorAll('input')].filter((each) => !each.labels.length).length")
            assert unnamed == 0

            await tab.evaluate("document.getElementById('find-id').focus()")
            await tab.type("w1")
            await tab.press("Tab")
            await tab.type(HOSTILE)
            await tab.press("Enter")
            story = await tab.until("document.querySelector('#story table') && document.getElementById('story').innerText", "a timeline")
            assert "accepted" in story
            assert HOSTILE in story
            assert await tab.evaluate("document.title") == "QLM"
            assert tab.problems == []

            # An agent and the planner die, and are not back yet: a frozen supervisor starts nobody.
            cluster.send(signal.SIGSTOP)
            try:
                agent = state.of("agent")[0]
                for process in (*state.of("planner"), agent):
                    os.kill(process.pid, signal.SIGKILL)
                await tab.until("document.querySelector('#parts .away')?.textContent.startsWith('planner')", "the planner is away")
                await tab.until(f"document.querySelector('#queues .away')?.textContent === {agent.name!r}", "the agent is away")
                os.kill(state.of("gateway")[0].pid, signal.SIGKILL)
                await tab.until("document.getElementById('down').textContent.startsWith('The gateway is not reachable')", "it is away")
                assert not await tab.evaluate("document.getElementById('down').hidden")
            finally:
                cluster.send(signal.SIGCONT)


def _load(address: str) -> None:
    options: dict[str, Any] = {"slo_s": 600.0, "max_tokens": 400, "tenant": HOSTILE}
    with qlm.Client(address) as client:
        for number in range(24):
            client.submit(MODELS[number % 3], "A prompt. " * 400, request_id=f"w{number}", **options)
