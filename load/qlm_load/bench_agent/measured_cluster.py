"""A `qlm up` cluster of one agent on vLLM, whose estimator is given the row that `qlm profile` measured of the engine just before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import yaml

from qlm import AsyncClient
from qlm.api.v1 import estimator_pb2
from qlm.api.v1.estimator_pb2_grpc import EstimatorStub
from qlm_agent.config import AgentConfig
from qlm_agent.profiling.rows import table_text
from qlm_agent.profiling.session import profile_engine
from qlm_core.hardware_profile import HardwareProfile
from qlm_core.profile import ProfileSnapshot
from qlm_core.shipped_profiles import shipped_snapshot
from qlm_load.bench_agent.model_config import agent_config, made_up_prompt, settings_of
from qlm_load.bench_agent.own_agent import NotServed
from qlm_load.bench_agent.parts import Plan
from qlm_load.cluster import Cluster
from qlm_process import profile_wire
from qlm_process.profile_file import parse_profiles

MODEL = "m"
SEATS = 8
PROMPT_TOKENS = 64
OUTPUT_TOKENS = (100, 300)
CONTEXT_TOKENS = 1024
KV_GB = 0.5
PROFILE_LIMIT_S = 60.0
START_S = 240.0
CALL_S = 20.0
WARM_UP_TOKENS, WARM_UP_S = 50, 300.0


FILE = "cluster.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAgent:
    """An agent's settings, and what was measured of its engine."""

    config: AgentConfig
    row: HardwareProfile
    profiles: ProfileSnapshot

    @property
    def request_s(self) -> float:
        """The engine's time for a request, of a full batch's: seconds between two ends at saturation."""
        mean_tokens = sum(OUTPUT_TOKENS) / 2
        step_s = self.row.decode_step_s(SEATS, SEATS * (PROMPT_TOKENS + mean_tokens / 2))
        return mean_tokens * step_s / SEATS + self.row.prefill_work_s(PROMPT_TOKENS)

    def write(self, folder: Path) -> Path:
        """The cluster's file, in a folder that is made. Its path."""
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


async def measured_agent(plan: Plan) -> MeasuredAgent:
    """Measures the engine as `qlm profile` does it."""
    config = agent_config({MODEL: plan.model}, CONTEXT_TOKENS, SEATS, settings_of(plan, kv_cache_gb=KV_GB))
    limit_s = max(30.0, PROFILE_LIMIT_S * plan.scale)
    found = await profile_engine(config, shipped_snapshot(), [], limit_s=limit_s, say=plan.say, clock=time.monotonic)
    return MeasuredAgent(config=config, row=found[0].row, profiles=parse_profiles(table_text(found)))


@asynccontextmanager
async def serving(measured: MeasuredAgent, folder: Path, vocabulary: int) -> AsyncIterator[AsyncClient]:
    """Starts the cluster in `folder`, imports the row, has a batch served, and stops. Raises Unavailable and NotServed."""
    cluster = Cluster(folder, str(measured.write(folder)), {})
    try:
        state = await cluster.start(START_S)
        await asyncio.to_thread(_import, state.of("estimator")[0].address, measured.profiles)
        async with AsyncClient(state.of("gateway")[0].address) as client:
            await asyncio.gather(*(_warm_up(client, made_up_prompt(vocabulary, number, PROMPT_TOKENS)) for number in range(SEATS)))
            yield client
    finally:
        await cluster.stop()


def _import(estimator: str, profiles: ProfileSnapshot) -> None:
    request = estimator_pb2.ImportProfilesRequest(profiles=profile_wire.to_proto(profiles))
    with grpc.insecure_channel(estimator) as channel:
        EstimatorStub(channel).ImportProfiles(request, timeout=CALL_S)


async def _warm_up(client: AsyncClient, prompt: list[int]) -> None:
    accepted = await client.submit(MODEL, prompt, slo_s=WARM_UP_S, max_tokens=WARM_UP_TOKENS, temperature=0.0, ignore_eos=True)
    if await client.result(accepted.request_id, WARM_UP_S) is None:
        raise NotServed(f"the cluster served nothing within {WARM_UP_S:g} s")
