"""Streams of real processes, of which some are killed in the middle: every token arrives once, in order, and is the right one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest

import qlm
from qlm_core.vocabulary.simulated_model import LENGTH_TOKEN_BASE, TOKEN_BYTES, answer_tokens, prompt_digest
from qlm_process.cluster.state import ClusterState
from running_cluster import RunningCluster, wait_until

pytestmark = pytest.mark.xdist_group("resume")

MODEL = "mistral-7b"
VOCABULARY_SIZE = 32_000
OUTPUT_TOKENS = 700
UNDER_WAY_TOKENS = 40
STREAMS = 10
PATIENCE_S = 60.0
SETTINGS = {
    "gateways": '[{name: gateway-0, listen: "127.0.0.1:0"}, {name: gateway-1, listen: "127.0.0.1:0"}]',
    # 700 tokens take some seconds: long enough to be killed in the middle, on instances that both serve the model.
    "agent.simulated.time_scale": "3",
    "gateway.drain_grace_s": "0.5",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path_factory.mktemp("resume") / "state", SETTINGS) as cluster:
        yield cluster


def prompt_of(number: int) -> list[int]:
    return [number, 11, LENGTH_TOKEN_BASE + OUTPUT_TOKENS]


def expected(prompt: list[int]) -> list[int]:
    answer = answer_tokens(prompt_digest(MODEL, prompt), 0, OUTPUT_TOKENS, VOCABULARY_SIZE)
    return [int.from_bytes(answer[at : at + TOKEN_BYTES], "little") for at in range(0, len(answer), TOKEN_BYTES)]


class Synchronous:
    """A stream of the synchronous client, read by a thread."""

    def __init__(self, addresses: list[str], prompt: list[int]) -> None:
        self.expected = expected(prompt)
        self.tokens: list[int] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, args=(addresses, prompt))
        self._thread.start()

    def _read(self, addresses: list[str], prompt: list[int]) -> None:
        try:
            with qlm.Client(addresses) as client, client.generate(MODEL, prompt, slo_s=PATIENCE_S) as stream:
                for chunk in stream:
                    assert chunk.offset == len(self.tokens)
                    self.tokens.extend(chunk.token_ids)
        except BaseException as error:
            self.error = error

    async def end(self) -> None:
        await asyncio.to_thread(self._thread.join, PATIENCE_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


async def collect(stream: qlm.TokenStream) -> list[int]:
    tokens: list[int] = []
    async for chunk in stream:
        assert chunk.offset == len(tokens)
        tokens.extend(chunk.token_ids)
    return tokens


def pids_of(state: ClusterState, target: str, address: str) -> list[int]:
    """`gateway`: the one that streams; `agents`: all of them; else a process's name."""
    if target == "gateway":
        return [process.pid for process in state.of("gateway") if process.address == address]
    if target == "agents":
        return [process.pid for process in state.of("agent")]
    return [process.pid for process in state.processes if process.name == target]


async def test_streams_go_on_exactly_when_processes_are_killed_in_the_middle(cluster: RunningCluster) -> None:
    await _strike(cluster, ["gateway-0", "gateway-1", "agents", "server", "planner-0"], signal.SIGKILL)


async def test_streams_go_on_exactly_when_their_gateway_drains(cluster: RunningCluster) -> None:
    await _strike(cluster, ["gateway"], signal.SIGTERM)


async def _strike(cluster: RunningCluster, targets: list[str], number: signal.Signals) -> None:
    state = await asyncio.to_thread(cluster.wait_for, _all_serve)
    addresses = [process.address for process in state.of("gateway")]
    synchronous = Synchronous(addresses, prompt_of(1_000))
    try:
        async with qlm.AsyncClient(addresses) as client:
            prompts = [prompt_of(stream) for stream in range(STREAMS)]
            streams = [client.generate(MODEL, prompt, slo_s=PATIENCE_S) for prompt in prompts]
            tasks = [asyncio.create_task(collect(stream)) for stream in streams]
            await asyncio.to_thread(
                wait_until,
                lambda: all(stream.offset > UNDER_WAY_TOKENS for stream in streams) and len(synchronous.tokens) > UNDER_WAY_TOKENS,
                PATIENCE_S,
                "all streams under way",
            )
            assert all(stream.offset < OUTPUT_TOKENS for stream in streams), "the strike is in the middle"
            struck = [pid for target in targets for pid in pids_of(state, target, streams[0].address)]
            for pid in struck:
                os.kill(pid, number)
            async with asyncio.timeout(PATIENCE_S):
                assert await asyncio.gather(*tasks) == [expected(prompt) for prompt in prompts]
        if any(target.startswith("gateway") for target in targets):
            assert all(stream.resumes >= 1 for stream in streams)
        results = [stream.result for stream in streams]
        assert all(result is not None and result.output_tokens == OUTPUT_TOKENS for result in results)
        if "agents" in targets:
            assert all(result is not None and result.attempts >= 2 for result in results)
    finally:
        await synchronous.end()
    assert synchronous.tokens == synchronous.expected
    assert len(struck) >= len(targets)
    await asyncio.to_thread(cluster.wait_for, lambda state: not set(struck) & {process.pid for process in state.processes})


def _all_serve(state: ClusterState) -> bool:
    return state.ready and all(process.serving and process.pid for process in state.processes)
