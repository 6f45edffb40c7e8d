"""A request's outlook at acceptance: from a queue that was read, on the memory twin of its server."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import replace

import pytest
from opentelemetry.trace import NoOpTracer

from published_waits import publish_waits
from qlm.api.v1.gateway_pb2 import Accepted
from qlm.api.v1.instance_pb2 import Instance
from qlm.api.v1.request_pb2 import SLO_KIND_COMPLETION, SLO_KIND_FIRST_TOKEN, Request, Slo, TokenPrompt
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.statistics.length_features import LengthFacts, features_of
from qlm_core.statistics.length_model import LengthModel, LengthScore
from qlm_core.vocabulary.errors import QueueFull
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.request import RequestKey, SloKind
from qlm_core.vocabulary.request import Slo as CoreSlo
from qlm_gateway.admission.catalogue import ModelEntry
from qlm_gateway.admission.entry import Entry
from qlm_gateway.admission.rules import AdmissionLimits
from qlm_gateway.front.status import request_message
from qlm_gateway.metrics import GatewayMetrics
from qlm_gateway.outlook.drain_rate import PRIOR_PER_S
from qlm_gateway.outlook.watch import AWAY_AFTER_S, WAITS_AGE_MAX_S, QueueWatch
from qlm_gateway.text.model_text import ApproximateText
from qlm_process.wire.profile import to_body
from qlm_queue.bounds import bytes_full
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.values import ESTIMATOR_ROLE, PLANNER_ROLE, Bounds, GroupPlacement, Lease, RequestPlacement

MODEL = "m"
SPEC = ModelSpec(name=MODEL, profile="Mistral-7B", context_tokens_max=8_192)
LONG_AHEAD_S = 1_000.0


class World:
    """A gateway's entry, and instances with their requests."""

    def __init__(self, *, refuse_late: bool = False, profiles: ProfileSnapshot | None = None, bounds: Bounds | None = None) -> None:
        self.now_s = 1_000.0
        self.queue = MemoryQueue("test", bounds or Bounds(), lambda: self.now_s)
        self.metrics, ids = (metrics := GatewayMetrics()), itertools.count()
        self.planner: Lease | None = None
        self.profiles = shipped = profiles or shipped_snapshot()
        self.watch = QueueWatch(self.queue, {MODEL: SPEC}, metrics, lambda: self.now_s, lambda: self.now_s, lambda: 0.5, shipped=shipped)
        limits = AdmissionLimits(default_slo=CoreSlo(kind=SloKind.COMPLETION, seconds=60.0))
        catalogue = {MODEL: ModelEntry(spec=SPEC)}
        self.entry = Entry(
            self.queue,
            catalogue,
            {MODEL: ApproximateText()},
            limits,
            self.watch,
            metrics,
            NoOpTracer(),
            lambda: f"id{next(ids)}",
            lambda: self.now_s,
            refuse_late=refuse_late,
        )

    async def instances(self, *waiting: int) -> None:
        """One for each number: so many requests wait there."""
        self.planner = planner = await self.queue.acquire_lease(PLANNER_ROLE, "p", LONG_AHEAD_S, "")
        assert planner is not None
        for number, count in enumerate(waiting):
            name, group_id = f"a100-{number}", f"g{number}"
            facts = Instance(name=name, gpu="A100-80GB", n_gpu=1, engine="simulated", models=[MODEL], time_scale=1.0)
            await self.queue.register(name, name, facts.SerializeToString(), LONG_AHEAD_S)
            meta = {"model": MODEL, "slo_kind": "completion", "slo_class": "32s", "token_class": "256"}
            group = GroupPlacement(group_id=group_id, instance=name, before="", first_deadline_s=self.now_s, meta=meta, slo_least_s=1.0)
            for begin in range(0, count, 500):
                placements = []
                for at in range(begin, min(begin + 500, count)):
                    entered = await self.entry.enter(self.request(f"{name}/{at}", 1e6), (), "")
                    placements.append(RequestPlacement(queue_id=entered.receipt.queue_id, key=entered.key, group_id=group_id))
                await self.queue.place(planner, [group], placements)
        await self.read_waits()

    async def read_waits(self) -> None:
        """The planner publishes, and the gateway reads that."""
        if self.planner is not None:
            await publish_waits(self.queue, self.planner, {MODEL: SPEC}, self.watch.profiles)
        await self.watch.read_waits()

    def request(self, request_id: str, slo_s: float) -> Request:
        slo = Slo(kind=SLO_KIND_COMPLETION, seconds=slo_s)
        return Request(model=MODEL, tokens=TokenPrompt(ids=[1, 2, 3]), request_id=request_id, slo=slo)

    async def enter(self, request_id: str, slo_s: float) -> Accepted:
        return (await self.entry.enter(self.request(request_id, slo_s), (), "")).message


async def refused_for_s(*waiting: int) -> tuple[float, int]:
    """When a request that would be late may be sent again, and how many were ahead of it."""
    world = World(refuse_late=True)
    await world.instances(*waiting)
    with pytest.raises(QueueFull) as refused:
        await world.enter("late", 10.0)
    assert refused.value.reason == "WOULD_BE_LATE"
    assert refused.value.retry_after_s is not None
    return refused.value.retry_after_s, (await world.queue.overview()).live


async def test_who_would_be_late_waits_for_what_its_instance_ends() -> None:
    """Four instances with as much each end four times as many requests as one, and a request waits behind those of one only."""
    one_s, one = await refused_for_s(800)
    four_s, four = await refused_for_s(800, 800, 800, 800)
    assert (one, four) == (800, 3_200)
    assert 1.0 < one_s <= one / PRIOR_PER_S
    # The same rate for all of them together is a fourth for each.
    assert four_s == pytest.approx(4.0 * one_s, rel=0.05)


async def test_a_scrape_reports_the_oldest_request_and_what_a_bound_has_left() -> None:
    world = World(bounds=Bounds(tenant_bytes_max=10_000))
    oldest, held = world.metrics.oldest_request, world.metrics.held_ratio
    await world.watch.model_loads()
    assert (oldest._value.get(), held._value.get()) == (0.0, 0.0)
    for name in ("first", "second"):
        await world.enter(name, 60.0)
        world.now_s += 30.0
    await world.watch.model_loads()
    assert oldest._value.get() == pytest.approx(60.0)
    (tenant,) = (each for each in await world.queue.held() if each.bound == "tenant")
    assert held._value.get() == tenant.held / 10_000 > 0.1
    await world.queue.erase(RequestKey("default", "first"), b"")
    await world.watch.model_loads()
    assert oldest._value.get() == pytest.approx(30.0)


async def test_an_old_look_is_no_prediction_and_refuses_nobody() -> None:
    world = World(refuse_late=True)
    await world.instances(800)
    with pytest.raises(QueueFull):
        await world.enter("late", 10.0)
    world.now_s += AWAY_AFTER_S
    accepted = await world.enter("r", 10_000.0)
    assert accepted.HasField("prediction")
    world.now_s += 0.01
    assert not (await world.enter("unpredicted", 10.0)).HasField("prediction")
    await world.read_waits()
    assert (await world.enter("again", 10_000.0)).HasField("prediction")
    assert await world.queue.find(RequestKey("default", "unpredicted"))


async def test_waits_of_a_planner_that_is_gone_predict_nothing() -> None:
    world = World(refuse_late=True)
    await world.instances(800)
    for elapsed_s, predicted in ((WAITS_AGE_MAX_S, True), (0.001, False)):
        world.now_s += elapsed_s
        await world.watch.read_waits()
        assert (await world.enter(f"after {elapsed_s}", 10_000.0)).HasField("prediction") is predicted
    assert not (await world.enter("late", 10.0)).HasField("prediction")


async def test_outlooks_follow_the_length_that_was_predicted() -> None:
    """Thirty times as many tokens as of the tenant that says little, by the length model: at acceptance and while it waits."""
    facts = {tenant: LengthFacts(model=MODEL, tenant=tenant, prompt_tokens=3) for tenant in ("terse", "verbose")}
    weights = {features_of(facts["terse"])[0]: 0.0, features_of(facts["verbose"])[1]: math.log(30.0)}
    score = LengthScore(model=MODEL, used=True, samples=100, median_error_tokens=10.0, model_error_tokens=8.0)
    model = LengthModel(features=tuple(weights), weights=tuple(weights.values()), curvatures=(1.0, 1.0), scores=(score,))
    world = World(profiles=replace(shipped_snapshot(), length_model=model))
    await world.instances(0)
    completion_s = {}
    for tenant in facts:
        request = world.request(tenant, 1e6)
        request.tenant = tenant
        entered = await world.entry.enter(request, (), "")
        now = await request_message(world.queue, entered.key, world.watch.recent, world.now_s)
        completion_s[tenant] = (entered.message.prediction.completion_p50_s, now.prediction.completion_p50_s)
    for terse_s, verbose_s in zip(completion_s["terse"], completion_s["verbose"], strict=True):
        assert verbose_s > 4.0 * terse_s


async def read_profiles(world: World) -> None:
    """One turn of the loop that reads them."""
    loops = world.watch.loops()
    reading = asyncio.create_task(loops.pop("profiles"))
    for other in loops.values():
        other.close()
    await asyncio.sleep(0)
    assert not reading.done(), reading
    reading.cancel()


async def test_predictions_rest_on_what_was_published_last_and_can_be_read() -> None:
    """The estimator may be away or of another version: its last profiles stay, and its next ones are taken."""
    world = World()
    await world.instances(0)
    lease = await world.queue.acquire_lease(ESTIMATOR_ROLE, "e", LONG_AHEAD_S, "")
    assert lease is not None
    pair = shipped_snapshot().hardware_of_pair("A100-80GB", 1, SPEC)
    assert pair is not None
    slow = replace(shipped_snapshot(), hardware=(pair, replace(pair, instance="a100-0", slowdown=3.0)))
    bodies = {0: b"", 5: to_body(replace(slow, version=5)), 6: b"\xff\xff\xff", 7: to_body(replace(shipped_snapshot(), version=7))}
    predicted: list[tuple[int, float]] = []
    for version, body in bodies.items():
        if version:
            await world.queue.publish_profiles(lease, version, body)
        await read_profiles(world)
        world.now_s += 1.0
        await world.read_waits()
        found = (await world.enter(f"v{version}", 1e6)).prediction
        predicted.append((found.profile_version, found.completion_p50_s))
        await world.queue.cancel(RequestKey("default", f"v{version}"), b"")
    assert [version for version, _ in predicted] == [0, 5, 5, 7]
    load_s = pair.swap_s(warm=False)  # is first, and as fast as it was
    assert predicted[1][1] - load_s == pytest.approx(3.0 * (predicted[0][1] - load_s), rel=0.01)


async def test_the_time_since_acceptance_counts_for_who_waits() -> None:
    world = World()
    await world.instances(0)
    accepted = await world.enter("r", 100.0)
    assert accepted.prediction.probability_late < 0.01
    world.now_s += 99.9
    await world.read_waits()
    message = await request_message(world.queue, RequestKey("default", "r"), world.watch.recent, world.now_s)
    assert message.prediction.probability_late > 0.99
    assert message.prediction.completion_p50_s == pytest.approx(accepted.prediction.completion_p50_s, rel=0.05)


async def test_the_drain_rate_is_of_those_that_ended() -> None:
    """Twenty requests arrive in a second and five of them end."""
    world = World()
    await world.read_waits()
    for second in range(200):
        world.now_s += 1.0
        for number in range(20):
            await world.enter(f"{second}/{number}", 1e6)
        for number in range(5):
            await world.queue.cancel(RequestKey("default", f"{second}/{number}"), b"")
        await world.read_waits()
    assert world.watch.drain_rate.per_s == pytest.approx(5.0, rel=0.05)
    full = QueueFull("full", details={"bound": "queue", "limit": "3000"})
    assert world.watch.retry_after_s(full, "") == pytest.approx(0.2, rel=0.05)
    # A tenant with a tenth of all that live waits for a tenth of the ends.
    tenant = QueueFull("full", details={"bound": "tenant", "limit": "300"})
    assert [world.watch.retry_after_s(tenant, "a") for _ in range(2)] == pytest.approx([2.0, 4.0], rel=0.05)
    # Bytes that results hold are free when the first of them goes, those of requests as they end.
    results = QueueFull("full", details={"bound": "tenant_bytes", "limit": "300", "retry_after_s": "12.5"})
    assert world.watch.retry_after_s(results, "a") == 12.5
    assert world.watch.retry_after_s(bytes_full("queue", 300, 290, 3600.0), "") == 300.0
    assert world.watch.retry_after_s(bytes_full("queue", 300, 290, None), "") == pytest.approx(0.2, rel=0.05)


async def test_an_objective_for_the_first_token_is_judged_by_the_wait() -> None:
    """Between the start that is expected and the end: in time for the first token, and late for the last."""
    world = World()
    await world.instances(0)
    expected = (await world.enter("r", 60.0)).prediction
    slo_s = (expected.wait_p90_s + expected.completion_p50_s) / 2.0
    request = world.request("first token", slo_s)
    request.slo.kind = SLO_KIND_FIRST_TOKEN
    first = (await world.entry.enter(request, (), "")).message.prediction
    assert first.probability_late < 0.1
    assert (await world.enter("completion", slo_s)).prediction.probability_late > 0.5
