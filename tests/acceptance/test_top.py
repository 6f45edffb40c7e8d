"""`qlm top`, `qlm health` and the page for operators on real clusters, whole and with parts of them away."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import qlm
from browser import Tab, opened_tab
from running_cluster import RunningCluster, qlm_command, wait_until

pytestmark = pytest.mark.xdist_group("cluster")

COMMAND_TIMEOUT_S = 60
ANSWER_S = 60.0
MODELS = ("mistral-7b", "mistral-7b-code", "vicuna-13b")
SLOW = {"agent.simulated.time_scale": "0.02"}
"""An engine step takes so long that nothing ends by itself while a test looks."""
NOWHERE = "127.0.0.1:1"
HOSTILE = '"><script>document.title=1</script>'
TEXTS = "[...document.querySelectorAll({query!r})].map((each) => each.textContent)"


def seen(address: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(qlm_command("top", "--json", "--address", address).stdout)
    return document


def problems(document: dict[str, Any]) -> list[str]:
    parts = (*document["parts"], *(instance["part"] for instance in document["instances"]))
    return [part["problem"] for part in parts if part["problem"]]


def placed(address: str) -> str:
    """Output of `qlm status` for a request that waits on a virtual queue; the queue shows it at once, the estimator half a second later."""
    with qlm.Client(address) as client:

        def waiting() -> list[str]:
            found = {name: client.status(name).request for name in (f"w{number}" for number in reversed(range(24)))}
            return [name for name, each in found.items() if each and each.state is qlm.RequestState.PLACED and each.prediction]

        wait_until(lambda: bool(waiting()), ANSWER_S, "a request waits, with a prediction")
        done = qlm_command("status", waiting()[0], "--address", address)
        assert done.exit_code == 0, done.stderr
        return done.stdout


def test_events_are_reported_as_json_and_in_a_frame(cluster: RunningCluster) -> None:
    address = cluster.address
    with qlm.Client(address) as client:
        # Nothing is predicted before the gateway has seen the instances, perhaps after it is ready.
        wait_until(lambda: all(model.instances for model in client.models()), ANSWER_S, "the gateway knows who can serve")
        for number in range(30):
            slo_s = 20.0 if number % 2 else 600.0
            client.submit(MODELS[number % 3], f"Prompt {number}.", slo_s=slo_s, max_tokens=20, request_id=f"top{number}")
        for number in range(30):
            assert client.result(f"top{number}", wait_s=ANSWER_S) is not None
    wait_until(lambda: seen(address)["outcomes"]["completed"] >= 30 and not seen(address)["live"], ANSWER_S, "the estimator has read all")
    # Predictions given to clients arrive every half second, after short requests have ended.
    wait_until(lambda: seen(address)["outcomes"]["calibration"], ANSWER_S, "a prediction was judged")

    wait_until(lambda: not problems(seen(address)), ANSWER_S, "all parts are reached, also those that another test killed")
    document = seen(address)
    assert (document["queue"], document["live"], document["unplaced"], document["running"]) == ("default", 0, 0, 0)
    assert [part["name"] for part in document["parts"]] == ["gateway", "planner", "estimator"]
    instances = {instance["name"]: instance for instance in document["instances"]}
    assert set(instances) == {"a100-0", "h100-0"}
    for instance in instances.values():
        assert instance["alive"]
        assert instance["agent"]["incarnation"].startswith(instance["name"])
    agents = [instance["agent"] for instance in instances.values()]
    assert sum(agent["completed"] for agent in agents) >= 30
    assert sum(agent["operations"]["models_activated"] for agent in agents) >= len(MODELS) - 1
    serving = [agent for agent in agents if agent["active_model"]]  # the faster one may have served all
    assert serving
    assert all(agent["eviction_choice"].startswith(("KV swap ", "evict ")) for agent in serving)
    outcomes = document["outcomes"]
    assert 0.0 < outcomes["window_s"] <= 300.0
    assert outcomes["accepted"] >= 30
    assert outcomes["output_tokens"] > 0
    assert outcomes["operations"]["pulled"] >= 30
    classes = {each["slo_class"]: each for each in outcomes["classes"]}
    for name in ("32s", "1024s"):
        assert classes[name]["judged"] >= classes[name]["completed"] >= 15
    assert classes["1024s"]["attained"] >= 15
    rows = outcomes["calibration"]
    assert {(row["time"], row["depth"]) for row in rows} >= {(time, "") for time in ("wait", "completion")}
    assert all(row["samples"] > 0 and 0.0 <= row["within_p50"] <= row["within_p90"] <= row["within_p99"] <= 1.0 for row in rows)

    shown = qlm_command("top", "--address", address, width=150).stdout
    words = ("queue default", "0 live = 0 not placed", "a100-0", "h100-0", "1 x A100-80GB, simulated", "nothing waits", "SLO attainment")
    for expected in (*words, "predicted against actual"):
        assert expected in " ".join(shown.split())
    assert re.search(r"32s\s+\d+\s+\d+\.\d%", shown)
    assert re.search(r"any\s+completion\s+\d+", shown)
    assert re.search(r"pulled\s+\d", shown)


def test_health_follows_the_process(cluster: RunningCluster) -> None:
    for process in [process for process in cluster.state.processes if process.service != "server"]:
        done = qlm_command("health", process.address, "--service", f"qlm.api.v1.{process.service.capitalize()}")
        assert (done.exit_code, done.stdout) == (0, f"{process.address}: SERVING\n")
    away = qlm_command("health", NOWHERE)
    assert (away.exit_code, away.stdout) == (1, f"{NOWHERE}: UNAVAILABLE\n")
    assert qlm_command("health", cluster.address, "--service", "no.such.Service").exit_code == 1


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A slow cluster with requests that run and wait."""
    with RunningCluster(tmp_path_factory.mktemp("loaded") / "state", SLOW) as cluster:
        with qlm.Client(cluster.address) as client:
            for number in range(24):
                client.submit(MODELS[number % 3], "A prompt. " * 400, slo_s=600.0, max_tokens=400, request_id=f"w{number}")
            client.submit(MODELS[0], "A prompt. " * 400, slo_s=600.0, max_tokens=400, request_id="w1", tenant=HOSTILE)
        yield cluster


@pytest.fixture
def loaded(started: RunningCluster) -> RunningCluster:
    """The slow cluster; all of its processes serve."""
    started.wait_for(lambda state: state.ready and all(process.serving and process.pid for process in state.processes))
    return started


@contextmanager
def without_an_agent_and_the_planner(cluster: RunningCluster) -> Iterator[str]:
    """The name of an agent that died, with the planner: a frozen supervisor starts nobody."""
    (planner,), agent = cluster.state.of("planner"), cluster.state.of("agent")[0]
    cluster.send(signal.SIGSTOP)
    try:
        for process in (planner, agent):
            os.kill(process.pid, signal.SIGKILL)
        yield agent.name
    finally:
        cluster.send(signal.SIGCONT)


def test_waiting_requests_are_shown_in_order_with_predictions(loaded: RunningCluster) -> None:
    wait_until(lambda: any(instance["groups"] for instance in seen(loaded.address)["instances"]), ANSWER_S, "a group waits")
    document = seen(loaded.address)
    groups = [group for instance in document["instances"] for group in instance["groups"]]
    assert all(group["model"] in MODELS and group["slo_class"] == "1024s" and group["waiting"] > 0 for group in groups)
    predicted = [group for group in groups if group["completion_p50_s"] is not None]
    assert predicted
    assert all(document["at_s"] < group["completion_p50_s"] <= group["completion_p90_s"] for group in predicted)
    shown = placed(loaded.address)
    for words in ("placed", "completion in 600 s", "due", "served before it", "starts in", "ends in", "with probability"):
        assert words in shown
    frame = qlm_command("top", "--once", "--address", loaded.address, width=150).stdout
    assert re.search(r"head\s+\S+\s+completion 1024s\s+\d+\s+[\d,]+ s \([\d,]+ s\)\s+\d+ s", frame)

    with without_an_agent_and_the_planner(loaded) as agent:
        done = qlm_command("top", "--once", "--address", loaded.address, width=150)
        assert done.exit_code == 0, done.stderr
        assert re.search(r"✗ planner (down|not known)", done.stdout)
        assert re.search(rf"✗ {agent}.* (down|not known)", done.stdout)
        assert "● gateway" in done.stdout


async def texts(tab: Tab, query: str) -> list[str]:
    found: list[str] = await tab.evaluate(TEXTS.format(query=query))
    return found


async def test_a_browser_shows_the_cluster_under_load(loaded: RunningCluster, tmp_path: Path) -> None:
    state = loaded.state
    async with opened_tab(tmp_path) as tab:
        await tab.resize(1400, 1200)
        await tab.open(f"{state.of('gateway')[0].http}/page")
        await tab.until("document.querySelectorAll('#queues tbody tr').length > 1", "groups wait")
        assert sorted(await texts(tab, "#queues h3")) == ["a100-0", "h100-0"]
        parts = TEXTS.format(query="#parts li")
        await tab.until(f"{parts}.join() === 'gateway,planner,estimator'", "the planner, killed by another test, is reached again")
        assert await texts(tab, "#models tbody td:first-child") == list(MODELS)
        await tab.until("[...document.querySelectorAll('#queues .meter')].some((each) => each.textContent.startsWith('KV'))", "KV is shown")
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

        with without_an_agent_and_the_planner(loaded) as agent:
            await tab.until("document.querySelector('#parts .away')?.textContent.startsWith('planner')", "the planner is away")
            await tab.until(f"document.querySelector('#queues .away')?.textContent === {agent!r}", "the agent is away")
            os.kill(state.of("gateway")[0].pid, signal.SIGKILL)
            await tab.until("document.getElementById('down').textContent.startsWith('The gateway is not reachable')", "it is away")
            assert not await tab.evaluate("document.getElementById('down').hidden")


def test_without_any_gateway_it_says_so_and_fails() -> None:
    once, document = qlm_command("top", "--once", "--address", NOWHERE, width=150), qlm_command("top", "--json", "--address", NOWHERE)
    assert (once.exit_code, document.exit_code) == (1, 1)
    assert f"✗ gateway down {NOWHERE}" in once.stdout
    assert [part["problem"] for part in json.loads(document.stdout)["parts"]] == ["down", "not known", "not known"]


def test_a_wrong_address_is_no_traceback() -> None:
    assert qlm_command("top", "--once", "--address", "nowhere").exit_code == 1
