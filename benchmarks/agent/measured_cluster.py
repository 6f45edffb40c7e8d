"""A `qlm up` cluster of one agent on vLLM, whose estimator gets the row measured just before.

`qlm profile` measures the engine alone; then a cluster serves a load with other sizes and another seed than the judged one, and the
estimator learns how much slower the engine is there, where it shares its cores with the services (`serving_load`). The planner's solver is
compiled before: in the first cluster of a fresh checkout that takes a core for half a minute, and an engine beside it is a fifth slower.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import yaml

from benchmarks.agent.model_config import INSTANCE, agent_config, made_up_prompt, settings_of, vocabulary_of
from benchmarks.agent.own_agent import NotServed
from benchmarks.agent.parts import Plan, apart
from benchmarks.agent.serving_load import RUNS_LEAST, Learned, ServedRow, learned_row, measure_serving, wait_until_settled
from qlm import AsyncClient
from qlm.api.v1 import estimator_pb2
from qlm.api.v1.estimator_pb2_grpc import EstimatorStub
from qlm_agent.config import AgentConfig
from qlm_agent.profiling.rows import table_text
from qlm_agent.profiling.session import profile_engine
from qlm_cli.profiles.exchange import read_profiles
from qlm_core.profiles.hardware_profile import HardwareProfile
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_load.demo.cluster import Cluster
from qlm_planner import search
from qlm_process.profile_file import parse_profiles
from qlm_process.wire import profile as profile_wire

MODEL = "m"
SEATS = 8
PROMPT_TOKENS = 64
OUTPUT_TOKENS = (100, 300)
CONTEXT_TOKENS = 1024
KV_GB = 0.5
PROFILE_LIMIT_S = 60.0
PROFILE_LIMIT_LEAST_S = 30.0
SERVING_LOAD_S = 90.0
SERVING_LOAD_LEAST_S = 15.0
"""A minimum for any number of repetitions."""
SERVING_SEED = 10_000
"""Above the seeds of the judged runs."""
START_S = 240.0
CALL_S = 20.0
WARM_UP_TOKENS, WARM_UP_S = 50, 300.0


FILE = "cluster.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAgent:
    """An agent's settings, and its engine's measurements. `served`: the row from serving; a cluster starts from the engine's own row if it
    is None."""

    config: AgentConfig
    row: HardwareProfile
    profiles: ProfileSnapshot
    served: ServedRow | None = None

    @property
    def request_s(self) -> float:
        """The engine's time for a request, in a full batch: seconds between two ends at saturation."""
        mean_tokens = sum(OUTPUT_TOKENS) / 2
        step_s = self.row.decode_step_s(SEATS, SEATS * (PROMPT_TOKENS + mean_tokens / 2))
        return mean_tokens * step_s / SEATS + self.row.prefill_work_s(PROMPT_TOKENS)

    @property
    def calibration(self) -> dict[str, object]:
        """Origin of the row, for a report."""
        if self.served is None:
            return {"profile": asdict(self.row)}
        served = {"runs": self.served.runs, "times_as_slow_as_by_itself": self.served.factor, "load_s": SERVING_LOAD_S}
        return {"profile": asdict(self.row), "by_itself": asdict(self.served.before), "serving": served}

    def write(self, folder: Path) -> Path:
        """Writes the cluster's file, in a new folder. Its path."""
        agent = self.config.agent.model_dump(mode="json", include={"name", "gpu", "engine", "batch_max", "vllm"})
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
class RunningCluster:
    """`estimator`: its address."""

    client: AsyncClient
    estimator: str

    @property
    def learned(self) -> Learned:
        """Reads from its estimator."""
        return lambda: asyncio.to_thread(read_profiles, self.estimator, ())


async def measured_agent(plan: Plan, folder: Path) -> MeasuredAgent:
    """Measures the engine as `qlm profile` does, first alone and then in a cluster in `folder`, which is stopped."""
    await asyncio.to_thread(apart, _compile_solver)
    config = agent_config({MODEL: plan.model}, CONTEXT_TOKENS, SEATS, settings_of(plan, kv_cache_gb=KV_GB))
    limit_s = max(PROFILE_LIMIT_LEAST_S, PROFILE_LIMIT_S * plan.scale)
    found = await profile_engine(config, shipped_snapshot(), [], limit_s=limit_s, say=plan.say, clock=time.monotonic)
    alone = MeasuredAgent(config=config, row=found[0].row, profiles=parse_profiles(table_text(found)))
    async with serving(alone, folder, vocabulary_of(plan.model)) as cluster:
        served = await measure_serving(
            cluster.client,
            cluster.learned,
            config.models[0].spec(),
            instance=INSTANCE,
            seats=SEATS,
            load_s=max(SERVING_LOAD_LEAST_S, SERVING_LOAD_S * plan.scale),
            seed=SERVING_SEED + plan.seed,
        )
    plan.say(f"{served.evidence} ({served.completed} requests in all)")
    return MeasuredAgent(config=config, row=served.row, profiles=_snapshot(served.row), served=served)


def _snapshot(row: HardwareProfile) -> ProfileSnapshot:
    return ProfileSnapshot(version=0, made_s=0.0, hardware=(row,))


async def slowed_row(measured: MeasuredAgent, cluster: RunningCluster) -> HardwareProfile | None:
    """The row of `measured`, scaled by the slowness of the cluster's runs that started from it; None if they were fewer than RUNS_LEAST."""
    row = learned_row(await wait_until_settled(cluster.learned), INSTANCE, measured.config.models[0].spec())
    return None if row is None or row.samples < RUNS_LEAST else row.as_measured()


@asynccontextmanager
async def serving(measured: MeasuredAgent, folder: Path, vocabulary: int) -> AsyncIterator[RunningCluster]:
    """Starts the cluster in `folder`, imports the row, has a batch served, and stops. Raises Unavailable and NotServed."""
    cluster = Cluster(folder, str(measured.write(folder)), {})
    try:
        state = await cluster.start(START_S)
        estimator = state.of("estimator")[0].address
        await asyncio.to_thread(_import, estimator, measured.profiles)
        async with AsyncClient(state.of("gateway")[0].address) as client:
            await asyncio.gather(*(_warm_up(client, made_up_prompt(vocabulary, number, PROMPT_TOKENS)) for number in range(SEATS)))
            yield RunningCluster(client=client, estimator=estimator)
    finally:
        await cluster.stop()


def _compile_solver() -> None:
    """Compiles for all later processes with this code."""
    search.warm_up()


def _import(estimator: str, profiles: ProfileSnapshot) -> None:
    request = estimator_pb2.ImportProfilesRequest(profiles=profile_wire.to_proto(profiles))
    with grpc.insecure_channel(estimator) as channel:
        EstimatorStub(channel).ImportProfiles(request, timeout=CALL_S)


async def _warm_up(client: AsyncClient, prompt: list[int]) -> None:
    accepted = await client.submit(MODEL, prompt, slo_s=WARM_UP_S, max_tokens=WARM_UP_TOKENS, temperature=0.0, ignore_eos=True)
    if await client.result(accepted.request_id, WARM_UP_S) is None:
        raise NotServed(f"the cluster served nothing within {WARM_UP_S:g} s")
