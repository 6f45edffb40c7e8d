"""A `qlm up` cluster of one agent on vLLM, whose estimator gets the row measured just before.

`qlm profile` measures the engine alone; then a cluster serves a load with other sizes and another seed than the judged one, and the
estimator learns how much slower the engine is there, where it shares its cores with the services: all of them, and enough of the load waits
that no seat is empty for want of work. The first runs of an engine are slow, and so is a new queue: by the end of the load the estimator
has forgotten them. The planner's solver is compiled before: in the first cluster of a fresh checkout that takes a core for half a minute,
and an engine beside it is a fifth slower.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc
import yaml

from benchmarks.agent.model_config import INSTANCE, agent_config, made_up_prompt, settings_of, vocabulary_of
from benchmarks.agent.own_agent import NotServed
from benchmarks.agent.parts import Plan, apart
from qlm import AsyncClient, RequestState
from qlm.api.v1 import estimator_pb2
from qlm.api.v1.estimator_pb2_grpc import EstimatorStub
from qlm.values import Timing
from qlm_agent.config import AgentConfig
from qlm_agent.profiling.session import profile_engine
from qlm_cli.profiles.exchange import read_profiles
from qlm_core.profiles.hardware_profile import HardwareProfile
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.errors import QlmError
from qlm_core.vocabulary.model import ModelSpec
from qlm_load.demo.cluster import Cluster
from qlm_process.wire import profile as profile_wire

MODEL = "m"
SEATS = 8
PROMPT_TOKENS = 64
OUTPUT_TOKENS = (100, 300)
CONTEXT_TOKENS = 1024
KV_GB = 0.5
PROFILE_LIMIT_S = 60.0
PROFILE_LIMIT_LEAST_S = 30.0
START_S = 240.0
CALL_S = 20.0
ANSWER_S = 900.0
WARM_UP_TOKENS, WARM_UP_S = 50, 300.0

LOAD_S = 90.0
LOAD_LEAST_S = 15.0
"""A minimum for any number of repetitions."""
LOAD_SEED = 10_000
"""Above the seeds of the judged runs."""
LOAD_PROMPT_TOKENS = (32, 64, 128, 256)
LOAD_OUTPUT_TOKENS = (64, 256)
"""Each prompt of the load is of one of these lengths, each answer of one between these."""
LOAD_CLIENTS = 8 * SEATS
LOAD_SLO_S = 86_400.0
RUNS_LEAST = 20
"""Least runs behind a learned row."""
LOOK_S = 1.5
SETTLES_S = 20.0
"""The estimator has read all ends when two readings, so far apart, agree; the most time for that."""

FILE = "cluster.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAgent:
    """An agent's settings; its engine's row `alone`; and `row`, from which a cluster starts: the same, scaled by the slowness of so many
    `runs` as it served."""

    config: AgentConfig
    alone: HardwareProfile
    row: HardwareProfile
    runs: int = 0

    @property
    def profiles(self) -> ProfileSnapshot:
        return ProfileSnapshot(version=0, made_s=0.0, hardware=(self.row,))

    @property
    def request_s(self) -> float:
        """The engine's time for a request, in a full batch: seconds between two ends at saturation."""
        mean_tokens = sum(OUTPUT_TOKENS) / 2
        step_s = self.row.decode_step_s(SEATS, SEATS * (PROMPT_TOKENS + mean_tokens / 2))
        return mean_tokens * step_s / SEATS + self.row.prefill_work_s(PROMPT_TOKENS)

    @property
    def calibration(self) -> dict[str, object]:
        """Origin of the row, for a report."""
        times = self.row.decode_a_ms / self.alone.decode_a_ms
        serving = {"runs": self.runs, "times_as_slow_as_by_itself": times, "load_s": LOAD_S}
        return {"profile": asdict(self.row), "by_itself": asdict(self.alone), "serving": serving}

    def write(self, folder: Path) -> Path:
        """Writes the cluster's file, in a new folder. Its path."""
        agent = self.config.agent.model_dump(mode="json", include={"name", "gpu", "engine", "batch_max", "batch", "vllm"})
        document = {
            "queue": {"name": self.config.queue.name},
            "models": [model.model_dump(mode="json", exclude_none=True, exclude_defaults=True) for model in self.config.models],
            "gateways": [{"name": "gateway-0", "listen": "127.0.0.1:0"}],
            "agents": [{**agent, "models": [MODEL]}],
            "up": {"start_timeout_s": START_S},
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRequest:
    """One request, `at_s` after the start."""

    at_s: float
    output_tokens: int
    slo_s: float


async def replayed(client: AsyncClient, timed: Sequence[TimedRequest], vocabulary: int) -> list[tuple[float | None, Timing]]:
    """Sends the requests; of each the median of the wait that was predicted at acceptance, if any, and its times. Raises NotServed."""

    async def served(request: TimedRequest, prompt: list[int]) -> tuple[float | None, Timing]:
        tokens = request.output_tokens
        accepted = await client.submit(MODEL, prompt, slo_s=request.slo_s, max_tokens=tokens, temperature=0.0, ignore_eos=True)
        result = await client.result(accepted.request_id, ANSWER_S)
        if result is None or result.state is not RequestState.COMPLETED:
            raise NotServed(f"request {accepted.request_id} was not completed: {result and result.error_message}")
        return None if accepted.prediction is None else accepted.prediction.wait_p50_s, result.timing

    loop = asyncio.get_running_loop()
    start_s = loop.time()
    tasks = []
    for number, request in enumerate(timed):
        await asyncio.sleep(max(0.0, start_s + request.at_s - loop.time()))
        tasks.append(asyncio.create_task(served(request, made_up_prompt(vocabulary, 1_000 + number, PROMPT_TOKENS))))
    return list(await asyncio.gather(*tasks))


async def measured_agent(plan: Plan, folder: Path) -> MeasuredAgent:
    """Measures the engine as `qlm profile` does, first alone and then in a cluster in `folder`, which is stopped. Raises QlmError."""
    await asyncio.to_thread(apart, _compile_solver)
    config = agent_config({MODEL: plan.model}, CONTEXT_TOKENS, SEATS, settings_of(plan, kv_cache_gb=KV_GB))
    limit_s = max(PROFILE_LIMIT_LEAST_S, PROFILE_LIMIT_S * plan.scale)
    (found,) = await profile_engine(config, shipped_snapshot(), [], limit_s=limit_s, say=plan.say, clock=time.monotonic)
    alone = MeasuredAgent(config=config, alone=found.row, row=found.row)
    async with serving(alone, folder, vocabulary_of(plan.model)) as (client, estimator):
        dice = random.Random(LOAD_SEED + plan.seed)
        completed = await _load(client, config.models[0].spec(), max(LOAD_LEAST_S, LOAD_S * plan.scale), dice)
        rows = await _settled(estimator)
    learned = next((row for row in rows.hardware if row.instance == INSTANCE and row.model == found.row.model), None)
    if learned is None or learned.samples < RUNS_LEAST:
        runs = 0 if learned is None else learned.samples
        raise NotServed(f"the estimator has learned from {runs} runs of {completed}, and at least {RUNS_LEAST} are needed")
    measured = replace(alone, row=learned.as_measured(), runs=learned.samples)
    plan.say(f"measured as it serves: {measured.calibration['serving']}")
    return measured


@asynccontextmanager
async def serving(measured: MeasuredAgent, folder: Path, vocabulary: int) -> AsyncIterator[tuple[AsyncClient, str]]:
    """Starts the cluster in `folder`, imports the row, has a batch served, and stops. Yields a client, and the estimator's address. Raises
    Unavailable and NotServed."""
    cluster = Cluster(folder, str(measured.write(folder)), {})
    try:
        state = await cluster.start(START_S)
        estimator = state.of("estimator")[0].address
        await asyncio.to_thread(_import, estimator, measured.profiles)
        async with AsyncClient(state.of("gateway")[0].address) as client:
            await asyncio.gather(*(_warm_up(client, made_up_prompt(vocabulary, number, PROMPT_TOKENS)) for number in range(SEATS)))
            yield client, estimator
    finally:
        await cluster.stop()


def _compile_solver() -> None:
    """Compiles for all later processes with this code. vLLM cannot start in a process that has loaded the compiler."""
    from qlm_planner.shell.warm_up import warm_up

    warm_up()


def _import(estimator: str, profiles: ProfileSnapshot) -> None:
    request = estimator_pb2.ImportProfilesRequest(profiles=profile_wire.to_proto(profiles))
    with grpc.insecure_channel(estimator) as channel:
        EstimatorStub(channel).ImportProfiles(request, timeout=CALL_S)


async def _warm_up(client: AsyncClient, prompt: list[int]) -> None:
    accepted = await client.submit(MODEL, prompt, slo_s=WARM_UP_S, max_tokens=WARM_UP_TOKENS, temperature=0.0, ignore_eos=True)
    if await client.result(accepted.request_id, WARM_UP_S) is None:
        raise NotServed(f"the cluster served nothing within {WARM_UP_S:g} s")


async def _load(client: AsyncClient, spec: ModelSpec, load_s: float, dice: random.Random) -> int:
    """LOAD_CLIENTS clients of one request at a time, for so long. Returns the number of completed requests; cancels the rest."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + load_s
    open_ids: set[str] = set()
    completed = 0

    async def send_repeatedly() -> None:
        nonlocal completed
        while loop.time() < until_s:
            prompt = made_up_prompt(spec.vocabulary_size, dice.randrange(10**6), dice.choice(LOAD_PROMPT_TOKENS))
            tokens = dice.randint(*LOAD_OUTPUT_TOKENS)
            accepted = await client.submit(MODEL, prompt, slo_s=LOAD_SLO_S, max_tokens=tokens, temperature=0.0, ignore_eos=True)
            open_ids.add(accepted.request_id)
            result = await client.result(accepted.request_id, max(0.0, until_s - loop.time()))
            if result is None:
                return
            open_ids.discard(accepted.request_id)
            if result.state is not RequestState.COMPLETED:
                raise NotServed(f"a request of the load ended {result.state}: {result.error_message}")
            completed += 1

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(LOAD_CLIENTS):
                group.create_task(send_repeatedly())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    finally:
        for request_id in open_ids:
            with suppress(QlmError):
                await client.cancel(request_id)
    return completed


async def _settled(estimator: str) -> ProfileSnapshot:
    """The estimator's rows once it has read all ends, or after SETTLES_S."""
    deadline_s = time.monotonic() + SETTLES_S
    before = await asyncio.to_thread(read_profiles, estimator, ())
    while True:
        await asyncio.sleep(LOOK_S)
        now = await asyncio.to_thread(read_profiles, estimator, ())
        if now.hardware == before.hardware or time.monotonic() > deadline_s:
            return now
        before = now
