"""An agent whose engine is a server of its own process, which dies and restarts: nothing is lost, and nothing is pulled in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from qlm.api.v1 import request_pb2
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.request import RequestState
from qlm_process.wire.profile import to_body
from qlm_queue.values import ESTIMATOR_ROLE, LiveRequest, TerminalRecord
from running_text_server import RunningTextServer
from text_server import KEY, MODEL, OTHER_MODEL, answer_word, text_prompt

from .rig import Rig, RunningAgent, until

ANSWER = 600


@pytest.fixture
def text_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningTextServer]:
    monkeypatch.setenv("SERVER_KEY", KEY)
    server = RunningTextServer().start()
    yield server
    server.kill()


async def serving(rig: Rig, server: RunningTextServer, **settings: Any) -> RunningAgent:
    openai = {
        "base_url": server.url,
        "api_key_env": "SERVER_KEY",
        "output": "text",
        "models": {"m": {"remote": MODEL}, "n": {"remote": OTHER_MODEL}},
        "poll_s": 0.2,
    }
    return await rig.agent(engine="openai", openai=openai, **{"batch_max": 4, **settings})


async def accept_text(rig: Rig, count: int, answer: int, *, slo_s: float = 600.0) -> list[str]:
    slo = request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=slo_s)
    names = [f"text{number}" for number in range(count)]
    for number, name in enumerate(names):
        body = request_pb2.Request(
            model="m",
            text=text_prompt(number, 10, answer),
            tenant="t",
            request_id=name,
            admission=request_pb2.Admission(prompt_tokens=10, output_tokens_max=1800, slo=slo),
        )
        await rig.accept_body(name, body.SerializeToString(), 10)
    return names


async def test_requests_survive_the_death_of_the_server(rig: Rig, text_server: RunningTextServer) -> None:
    agent = await serving(rig, text_server)
    names = await accept_text(rig, 8, ANSWER)
    await rig.place(names)
    await until(lambda: agent.value("qlm_agent_emitted_tokens_total") > 40, "the first requests are under way")
    text_server.kill()
    await until(lambda: agent.owned == 0, "the agent gives back what the server ran")
    # An agent that did not know would pull the other four, and fail them.
    states = [await rig.request(name) for name in names]
    assert all(isinstance(state, LiveRequest) and state.state is RequestState.PLACED for state in states)
    text_server.start()
    results = await rig.results_of(names)
    assert {result.state for result in results} == {request_pb2.REQUEST_STATE_COMPLETED}
    for number, name in enumerate(names):
        record = await rig.request(name)
        assert isinstance(record, TerminalRecord)
        result = request_pb2.Result.FromString(record.result)
        head = text_prompt(number, 10, ANSWER).split("[")[0]
        assert list(result.output_pieces) == [answer_word(MODEL, head, place) for place in range(ANSWER)]
        assert result.attempts <= 2


async def test_a_server_whose_kv_nobody_knows_says_so_and_fails_no_request(rig: Rig, text_server: RunningTextServer) -> None:
    with capture_logs() as logs:
        agent = await serving(rig, text_server, gpu="a GPU that nobody knows", models=["m", "n"])
        names = await accept_text(rig, 2, 20)
        await rig.place(names)

        def failed() -> float:
            return agent.value("qlm_agent_ended_requests_total", state="FAILED")

        await until(lambda: failed() or any(log["event"] == "model_not_loaded" for log in logs), "it is tried")
    assert not failed(), "no request is to blame"
    (why,) = {log["error"] for log in logs if log["event"] == "model_not_loaded"}
    assert "agent.openai.kv_capacity_tokens" in why


async def test_capacity_of_other_clients_of_the_server_is_not_pulled_into(rig: Rig, text_server: RunningTextServer) -> None:
    """With lookahead 0 nothing waits in the server: four seats, of which others have all, and then two."""
    await say_running(text_server, 4)
    agent = await serving(rig, text_server)
    names = await accept_text(rig, 6, ANSWER)
    await rig.place(names)
    await until(lambda: agent.value("qlm_agent_model_swaps_total", model="m"), "the model is active")
    shell = agent.process.shell
    await until(lambda: shell.machine.runs.others_runs == 4 and shell.machine.pull.head is not None, "it knows of both")
    assert agent.owned == 0
    await say_running(text_server, 2)
    await until(lambda: agent.owned == 2, "what fits is pulled")
    await say_running(text_server, 0)
    results = await rig.results_of(names)
    assert {result.state for result in results} == {request_pb2.REQUEST_STATE_COMPLETED}
    assert {result.attempts for result in results} == {1}


async def test_as_many_run_as_the_servers_measured_speed_lets_end_in_time(rig: Rig, text_server: RunningTextServer) -> None:
    """Its row says 40 ms a step and 10 ms more for each request, so that a few end within their 20 s; it makes a word in a millisecond."""
    shipped = next(row for row in shipped_snapshot().hardware if row.key == ("H100-80GB", 1, "Mistral-7B"))
    slow = ProfileSnapshot(version=1, made_s=1.0, hardware=(replace(shipped, decode_a_ms=40.0, decode_b_ms_per_seq=10.0),))
    lease = await rig.queue.acquire_lease(ESTIMATOR_ROLE, "e", 600.0, "")
    assert lease is not None
    await rig.queue.publish_profiles(lease, 1, to_body(slow))
    agent = await serving(rig, text_server, batch_max=16, batch="slo")
    names = await accept_text(rig, 200, 600, slo_s=20.0)
    await rig.place(names, slo_s=20.0)
    await until(lambda: agent.owned, "the first are pulled")
    size = agent.process.shell.machine.batch_size
    assert agent.owned <= size.limit < 8, "by the row"
    async with asyncio.timeout(20.0):  # before all are late, when throughput decides
        await until(lambda: agent.owned == 16, "by the times of tokens")


async def say_running(server: RunningTextServer, running: int) -> None:
    """Has the server report so many of others."""
    metrics = f"""
vllm:num_requests_running {running}
vllm:num_requests_waiting 0
vllm:kv_cache_usage_perc {running / 10}
vllm:cache_config_info{{block_size="16",num_gpu_blocks="10000"}} 1.0
"""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:
        await session.post(f"{server.url}/metrics", data=metrics)
