"""A queue on a server of its own, filled with groups of many models as gateways and a planner leave them, whose agents run something."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.queue.bulk_queue import LEASE_S, BulkQueue, acceptance_of, bulk_queue
from qlm.api.v1 import request_pb2
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.request import RequestFacts, RequestKey, Slo, SloKind
from qlm_planner.board.group import group_id_of, to_meta, traits_of
from qlm_process.wire.instance import to_body
from qlm_queue.values import BATCH_MAX, Acceptance, GroupPlacement, PullBudget, RequestPlacement

QUEUE = "bench"
MODELS = tuple(f"model-{number:02d}" for number in range(12))
PROFILES = ("Mistral-7B", "Vicuna-13B")
"""Profiles of the models in turn."""
GPUS = ("A100-80GB", "H100-80GB")
"""GPUs of the instances in turn."""
SLOS_S = (900.0, 1_800.0, 3_600.0, 7_200.0, 14_400.0)
PROMPTS_TOKENS = (60, 250, 900)
OUTPUT_TOKENS_MAX = 256
RUNNING = 40
"""Requests that each instance runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is queued; `requests` in all groups together."""

    instances: int
    groups: int
    requests: int


@asynccontextmanager
async def live_queue(folder: Path, size: Size, seed: int) -> AsyncIterator[BulkQueue]:
    """A filled queue; the planner's lease is free."""
    async with bulk_queue(folder, QUEUE) as queue:
        await _fill(queue, size, random.Random(seed))
        yield queue


async def _fill(queue: BulkQueue, size: Size, chance: random.Random) -> None:
    names = [f"gpu-{number:03d}" for number in range(size.instances)]
    leases = []
    for number, name in enumerate(names):
        facts = InstanceFacts(
            name=name,
            incarnation="",
            gpu=GPUS[number % len(GPUS)],
            n_gpu=1,
            engine="simulated",
            models=MODELS,
            active_model=MODELS[number % 12],
        )
        leases.append((await queue.register(name, "bench", to_body(facts), LEASE_S))[1])
    planner = await queue.planner_lease()
    each = size.requests // size.groups
    kinds = [(chance.choice(SLOS_S), chance.choice(MODELS), chance.choice(PROMPTS_TOKENS)) for _ in range(size.groups)]
    # The first group of each queue is of its active model, so that it runs.
    kinds[: len(names)] = [(slo_s, MODELS[number % 12], tokens) for number, (slo_s, _, tokens) in enumerate(kinds[: len(names)])]
    receipts = await queue.accept_all(lambda index: acceptance(f"req-{index}", *kinds[index // each]), each * size.groups)
    while await queue.read_arrivals(0.0, BATCH_MAX):
        pass
    now_s = time.time()

    def placed(group: int) -> tuple[GroupPlacement, list[RequestPlacement]]:
        slo_s, model, tokens = kinds[group]
        placement = GroupPlacement(
            group_id=group_id_of(0, group + 1),
            instance=names[group % len(names)],
            before="",
            first_deadline_s=now_s + slo_s * (0.4 + 0.6 * group / size.groups),
            meta=to_meta(traits_of(_facts(model, slo_s, tokens)), 0),
        )
        members = range(group * each, (group + 1) * each)
        return placement, [
            RequestPlacement(queue_id=receipts[index].queue_id, key=RequestKey("bench", f"req-{index}"), group_id=placement.group_id)
            for index in members
        ]

    await queue.place_all(planner, map(placed, range(size.groups)))
    budget = PullBudget(requests_max=min(RUNNING, max(1, each // 2)), kv_tokens=1 << 40, output_reserve_tokens=0)
    for number, lease in enumerate(leases):
        await queue.pull(lease, MODELS[number % 12], budget)
    await queue.release_lease(planner)


def _facts(model: str, slo_s: float, prompt_tokens: int) -> RequestFacts:
    return RequestFacts(
        queue_id="0-0",
        key=RequestKey("bench", "any"),
        acceptance_number=0,
        accepted_s=0.0,
        model=model,
        slo=Slo(kind=SloKind.COMPLETION, seconds=slo_s),
        prompt_tokens=prompt_tokens,
        output_tokens_max=OUTPUT_TOKENS_MAX,
    )


def acceptance(request_id: str, slo_s: float, model: str, prompt_tokens: int) -> Acceptance:
    slo = request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=slo_s)
    admission = request_pb2.Admission(prompt_tokens=prompt_tokens, output_tokens_max=OUTPUT_TOKENS_MAX, slo=slo)
    return acceptance_of(request_pb2.Request(model=model, text="x", tenant="bench", request_id=request_id, admission=admission))


SMALL = Size(instances=8, groups=1_000, requests=40_000)
MEDIUM = Size(instances=100, groups=2_000, requests=400_000)
LARGE = Size(instances=100, groups=10_000, requests=400_000)
ONE_QUEUE = Size(instances=1, groups=10_000, requests=400_000)


def shrunk(size: Size, share: float) -> Size:
    """With fewer requests in each group."""
    return replace(size, requests=max(size.groups, int(size.requests * share)))
