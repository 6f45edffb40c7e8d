"""What clients are told about their wait, against what comes, on a `qlm up` cluster whose agent runs vLLM.

First the engine is measured as `qlm profile` does it, and the cluster's estimator is given the row. Then more arrives than is served, so
that waits grow from nothing to many batches. Predicted: the median of the wait as the gateway told it at acceptance. Real: from acceptance
until the engine began.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import numpy as np
import yaml

from qlm import AsyncClient, RequestState
from qlm.api.v1 import estimator_pb2
from qlm.api.v1.estimator_pb2_grpc import EstimatorStub
from qlm_agent.config import AgentConfig
from qlm_agent.profiling.rows import table_text
from qlm_agent.profiling.session import profile_engine
from qlm_core.hardware_profile import HardwareProfile
from qlm_core.shipped_profiles import shipped_snapshot
from qlm_load.bench.figures import Values
from qlm_load.bench_agent.model_config import agent_config, made_up_prompt, run_quietly, spread, vllm_settings, vocabulary_of
from qlm_load.bench_agent.own_agent import NotServed
from qlm_load.bench_agent.parts import Measured, Plan
from qlm_load.bench_estimator.scores import r2
from qlm_load.cluster import Cluster
from qlm_process import profile_wire
from qlm_process.profile_file import parse_profiles

MODEL = "m"
SEATS = 8
REQUESTS = 300
OVERLOAD = 1.3
"""Arrivals over what the profile says is served."""
PROMPT_TOKENS = 64
OUTPUT_TOKENS = (100, 300)
CONTEXT_TOKENS = 1024
KV_GB = 0.5
PROFILE_LIMIT_S = 60.0
SLO_S = 3_600.0
START_S = 240.0
ANSWER_S = 900.0
CALL_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Seconds from acceptance: as told, and as it came."""

    predicted_s: float
    actual_s: float


def measure(plan: Plan) -> Measured:
    with TemporaryDirectory(prefix="qlm-bench-cluster-") as scratch:
        row, waits = run_quietly(_waits(plan, Path(scratch)))
    predicted, actual = np.array([wait.predicted_s for wait in waits]), np.array([wait.actual_s for wait in waits])
    score = r2(predicted, actual)
    plan.say(f"waits: R² {score:.4f} over {len(waits)} requests")
    values: Values = {"r2_wait": score}
    details: dict[str, object] = {
        "requests": len(waits),
        "actual_s": {**spread(actual.tolist()), "max": float(actual.max())},
        "bias_s": float((predicted - actual).mean()),
        "r2_with_one_factor": r2(predicted * float((predicted @ actual) / max(1e-9, predicted @ predicted)), actual),
        "profile": asdict(row),
        "seats": SEATS,
        "overload": OVERLOAD,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }
    return Measured(values=values, details=details)


async def _waits(plan: Plan, folder: Path) -> tuple[HardwareProfile, list[Wait]]:
    config = agent_config({MODEL: plan.model}, CONTEXT_TOKENS, SEATS, vllm_settings(dtype=plan.dtype, kv_cache_gb=KV_GB))
    limit_s = max(10.0, PROFILE_LIMIT_S * plan.scale)
    found = await profile_engine(config, shipped_snapshot(), [], limit_s=limit_s, say=plan.say, clock=time.monotonic)
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(_cluster_of(config), sort_keys=False), encoding="utf-8")
    cluster = Cluster(folder, str(path), {})
    try:
        state = await cluster.start(START_S)
        await asyncio.to_thread(_import, state.of("estimator")[0].address, table_text(found))
        async with AsyncClient(state.of("gateway")[0].address) as client:
            return found[0].row, await _in_an_overload(plan, client, found[0].row)
    finally:
        await cluster.stop()


def _cluster_of(config: AgentConfig) -> dict[str, object]:
    """The same agent in a file for `qlm up`."""
    agent = config.agent.model_dump(mode="json", include={"name", "gpu", "engine", "batch_max", "vllm"})
    return {
        "queue": {"name": config.queue.name},
        "models": [model.model_dump(mode="json", exclude_none=True, exclude_defaults=True) for model in config.models],
        "gateways": [{"name": "gateway-0", "listen": "127.0.0.1:0"}],
        "agents": [{**agent, "models": [MODEL]}],
    }


def _import(estimator: str, profiles: str) -> None:
    request = estimator_pb2.ImportProfilesRequest(profiles=profile_wire.to_proto(parse_profiles(profiles)))
    with grpc.insecure_channel(estimator) as channel:
        EstimatorStub(channel).ImportProfiles(request, timeout=CALL_S)


async def _in_an_overload(plan: Plan, client: AsyncClient, row: HardwareProfile) -> list[Wait]:
    dice = random.Random(plan.seed)
    vocabulary = vocabulary_of(plan.model)
    mean_tokens = sum(OUTPUT_TOKENS) / 2
    step_s = row.decode_step_s(SEATS, SEATS * (PROMPT_TOKENS + mean_tokens / 2))
    gap_s = (mean_tokens * step_s / SEATS + row.prefill_work_s(PROMPT_TOKENS)) / OVERLOAD
    await asyncio.gather(*(_wait(client, made_up_prompt(vocabulary, number, PROMPT_TOKENS), 50) for number in range(SEATS)))
    plan.say(f"waits: the cluster serves; a request every {gap_s:.3f} s comes")
    tasks = []
    for number in range(plan.some(REQUESTS)):
        prompt = made_up_prompt(vocabulary, 1_000 + number, PROMPT_TOKENS)
        tasks.append(asyncio.create_task(_wait(client, prompt, dice.randint(*OUTPUT_TOKENS))))
        await asyncio.sleep(dice.expovariate(1.0 / gap_s))
    waits: Sequence[Wait | None] = await asyncio.gather(*tasks)
    return [wait for wait in waits if wait is not None]


async def _wait(client: AsyncClient, prompt: list[int], output_tokens: int) -> Wait | None:
    """None where nothing was predicted. Raises NotServed."""
    accepted = await client.submit(MODEL, prompt, slo_s=SLO_S, max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    result = await client.result(accepted.request_id, ANSWER_S)
    if result is None or result.state is not RequestState.COMPLETED:
        raise NotServed(f"request {accepted.request_id} was not completed: {result and result.error_message}")
    if accepted.prediction is None:
        return None
    return Wait(predicted_s=accepted.prediction.wait_p50_s, actual_s=result.timing.started_s - result.timing.accepted_s)
