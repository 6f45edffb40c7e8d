"""The real command: ready line, health, metrics, SIGTERM."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from qlm_core.vocabulary.request import RequestState
from qlm_queue.values import LiveRequest

from .rig import DEADLINE_S, QUEUE, Rig

CONFIG = """
queue: {{name: {queue}, url: "{url}"}}
models: [{{name: m, profile: Mistral-7B}}]
agents: [{{name: a, gpu: H100-80GB, drain_finish_s: 0, simulated: {{time_scale: {time_scale}}}}}]
telemetry: {{log_format: json}}
"""


def write_config(path: Path, url: str, time_scale: float = 20.0) -> None:
    path.write_text(CONFIG.format(queue=QUEUE, url=url, time_scale=time_scale))


async def start(path: Path, *more: str) -> asyncio.subprocess.Process:
    arguments = ["-m", "qlm_agent", "--config", str(path), "--name", "a", *more]
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )


async def ready_line(process: asyncio.subprocess.Process) -> dict[str, object]:
    assert process.stdout is not None
    seen: list[bytes] = []
    async with asyncio.timeout(DEADLINE_S):
        async for line in process.stdout:
            seen.append(line)
            record: dict[str, object] = json.loads(line) if line.startswith(b"{") else {}
            if record.get("event") == "ready":
                return record
    raise AssertionError(b"".join(seen).decode())


async def serving(address: str, status: int = health_pb2.HealthCheckResponse.SERVING) -> None:
    """Waits until its health is `status`."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(DEADLINE_S):
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=20.0)
            if answer.status == status:
                return
            await asyncio.sleep(0.01)


async def scrape(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return text


async def test_a_process_serves_and_leaves_on_sigterm(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "qlm.yaml"
    write_config(path, rig.url)
    process = await start(path)
    ready = await ready_line(process)
    await serving(str(ready["address"]))
    names = await rig.accept(10)
    await rig.place(names)
    await rig.results_of(names)
    await rig.assert_whole(names)
    assert 'qlm_agent_lso_total{lso="pull"} 10.0' in await scrape(int(str(ready["metrics_port"])))
    long = await rig.accept(3, answer=4000)
    await rig.place(long)
    await rig.read_until(lambda: all(rig.outputs.get(name) for name in long), "all run")
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(DEADLINE_S):
        await process.communicate()
    assert process.returncode == 0
    overview = await rig.queue.overview()
    assert not overview.incarnations
    assert [record.running for record in overview.virtual_queues if record.instance == "a"] == [0]
    assert sum(group.waiting for group in overview.groups.values()) == 3


async def test_on_sigterm_it_takes_no_more_is_not_ready_and_finishes_its_runs(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "qlm.yaml"
    write_config(path, rig.url, time_scale=3.0)
    process = await start(path, "--set", "agent.drain_finish_s=60")
    address = str((await ready_line(process))["address"])
    await serving(address)
    running = await rig.accept(3, answer=1500)
    await rig.place(running)
    await rig.read_until(lambda: all(rig.outputs.get(name) for name in running), "all run")
    process.send_signal(signal.SIGTERM)
    await serving(address, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert not rig.results, "it still runs them"
    late = await rig.accept(2)
    await rig.place(late, group="late")
    results = await rig.results_of(running)
    await rig.assert_whole(running)
    assert {(result.incarnation, result.attempts) for result in results} == {("a/1", 1)}
    async with asyncio.timeout(DEADLINE_S):
        await process.communicate()
    assert process.returncode == 0
    overview = await rig.queue.overview()
    assert not overview.incarnations, "it left at once, its lease did not have to run out"
    for name in late:
        live = await rig.request(name)
        assert isinstance(live, LiveRequest)
        assert (live.state, live.attempt) == (RequestState.PLACED, 0)


async def test_on_sigterm_unfinished_requests_are_requeued_with_their_progress(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "qlm.yaml"
    write_config(path, rig.url, time_scale=3.0)
    process = await start(path, "--set", "agent.drain_finish_s=1")
    await serving(str((await ready_line(process))["address"]))
    short, long = await rig.accept(2, answer=150), await rig.accept(2, answer=3500)
    await rig.place(long + short)
    await rig.read_until(lambda: all(rig.outputs.get(name) for name in short + long), "all run")
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(DEADLINE_S):
        await process.communicate()
    assert process.returncode == 0
    await rig.results_of(short)
    shown = {name: len(rig.outputs[name]) for name in long}
    for name in long:
        live = await rig.request(name)
        assert isinstance(live, LiveRequest)
        assert (live.state, live.failed_attempts) == (RequestState.PLACED, 0)
    again = await rig.agent()
    results = await rig.results_of(long)
    await rig.assert_whole(short + long)
    assert {(result.incarnation, result.attempts) for result in results} == {(again.incarnation, 2)}
    resumed = again.value("qlm_agent_emitted_tokens_total")
    assert resumed <= sum(3500 - tokens for tokens in shown.values()), "it did not make again what had been stored"


async def test_a_killed_process_leaves_its_runs_to_the_planner(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "qlm.yaml"
    write_config(path, rig.url)
    process = await start(path)
    await serving(str((await ready_line(process))["address"]))  # registered: its virtual queue is there
    names = await rig.accept(3, answer=4000)
    await rig.place(names)
    await rig.read_until(lambda: all(rig.outputs.get(name) for name in names), "all run")
    process.kill()
    await process.communicate()
    again = await start(path)  # the same instance, its lease still alive: a new incarnation takes over the queue at once
    await ready_line(again)
    await rig.expire_lease("a/1")
    assert await rig.reclaim("a/1") == 3
    results = await rig.results_of(names)
    await rig.assert_whole(names)
    assert {(result.incarnation, result.attempts) for result in results} == {("a/2", 2)}
    again.terminate()
    await again.communicate()
    assert again.returncode == 0
