"""An urgent request on an engine full of long work, through real processes: it runs before all of it, others are evicted, and no output
suffers (QLM section 5)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import qlm
from qlm.api.v1.request_pb2 import Result
from qlm.messages import logprobs_value
from qlm_agent.engines.port import EngineRequest, Sampling, TokenPrompt
from qlm_agent.engines.simulated.answers import answer_to
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.simulated_model import LENGTH_TOKEN_BASE, TOKEN_BYTES, answer_tokens, prompt_digest
from running_cluster import RunningCluster

pytestmark = pytest.mark.xdist_group("preemption")

MODEL, OTHER_MODEL = "mistral-7b", "mistral-7b-code"
VOCABULARY_SIZE = 32_000
BATCH = 8
TOP = 2
"""Likeliest tokens whose log probabilities every second request wants."""
LONG_TOKENS = 4_000  # about 10 s at this speed
URGENT_TOKENS = 100
URGENT_SLO_S = 5.0
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Without host memory for KV, so that who makes room is evicted."""
    settings = {
        "agents": f"[{{name: gpu, gpu: A100-80GB, batch_max: {BATCH}}}]",
        "agent.simulated.time_scale": "4",
        "agent.simulated.host_kv_gb": "0",
    }
    with RunningCluster(tmp_path_factory.mktemp("eviction") / "state", settings) as cluster:
        yield cluster


class Request:
    """One streamed request."""

    def __init__(self, client: qlm.AsyncClient, model: str, number: int, output_tokens: int, slo_s: float) -> None:
        self.prompt = [number, 17, LENGTH_TOKEN_BASE + output_tokens]
        self.model = model
        self.output_tokens = output_tokens
        self.tokens: list[int] = []
        self.logprobs: list[qlm.TokenLogprobs] = []
        self.top = TOP if number % 2 else None
        self._stream = client.generate(model, self.prompt, slo_s=slo_s, logprobs=self.top)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> qlm.Result:
        async for chunk in self._stream:
            assert chunk.offset == len(self.tokens)
            self.tokens.extend(chunk.token_ids)
            self.logprobs.extend(chunk.logprobs)
        assert self._stream.result is not None
        return self._stream.result

    @property
    def undisturbed(self) -> list[int]:
        """Answer of an engine that serves nothing else."""
        answer = answer_tokens(prompt_digest(self.model, self.prompt), 0, self.output_tokens, VOCABULARY_SIZE)
        return [int.from_bytes(answer[at : at + TOKEN_BYTES], "little") for at in range(0, len(answer), TOKEN_BYTES)]

    @property
    def undisturbed_logprobs(self) -> list[qlm.TokenLogprobs]:
        """The same of log probabilities."""
        if self.top is None:
            return []
        run = EngineRequest(
            run_id="",
            model=self.model,
            prompt=TokenPrompt(ids=self.prompt),
            prompt_tokens=3,
            output_tokens_max=self.output_tokens,
            sampling=Sampling(logprobs=self.top),
        )
        answer = answer_to(run, ModelSpec(name=self.model, profile="", context_tokens_max=32_768, vocabulary_size=VOCABULARY_SIZE))
        return list(logprobs_value(Result.FromString(answer.records(0, self.output_tokens)).logprobs))


async def full_engine(client: qlm.AsyncClient, count: int) -> list[Request]:
    """Long requests with an hour of time, of which a batch runs."""
    long = [Request(client, MODEL, number, LONG_TOKENS, 3_600.0) for number in range(count)]
    async with asyncio.timeout(PATIENCE_S):
        while sum(bool(request.tokens) for request in long) < BATCH:
            await asyncio.sleep(0.02)
    return long


async def ends(*requests: Request) -> list[qlm.Result]:
    async with asyncio.timeout(PATIENCE_S):
        results = [await request.task for request in requests]
    for request in requests:
        assert request.tokens == request.undisturbed, request.prompt
        assert request.logprobs == request.undisturbed_logprobs, request.prompt
    return results


async def test_of_the_same_model(cluster: RunningCluster) -> None:
    async with qlm.AsyncClient(cluster.address) as client:
        long = await full_engine(client, BATCH + 4)
        await ends(Request(client, MODEL, 100, URGENT_TOKENS, URGENT_SLO_S))
        assert not any(request.task.done() for request in long), "nobody ended and made room"
        results = await ends(*long)
        assert sum(each.attempts - 1 for each in results) == 1


async def test_of_another_model(cluster: RunningCluster) -> None:
    async with qlm.AsyncClient(cluster.address) as client:
        long = await full_engine(client, BATCH)
        await ends(Request(client, OTHER_MODEL, 100, URGENT_TOKENS, URGENT_SLO_S))
        assert not any(request.task.done() for request in long)
        results = await ends(*long)
        assert {each.attempts for each in results} == {2}
