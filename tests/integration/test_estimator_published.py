"""What a new leader makes of the last publication: it reads on exactly where that ended, and predicts with its length model; and of what a
context holds."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from qlm.api.v1 import request_pb2
from qlm_core.length_features import LengthFacts, features_of, hint_feature
from qlm_core.length_model import LengthModel, LengthScore
from qlm_core.profile import ProfileSnapshot, WorkloadProfile
from qlm_core.shipped_profiles import shipped_snapshot
from qlm_process.wire import profile as profile_wire
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import ESTIMATOR_ROLE

from .estimator_rig import LEASE_S, Estimator, Rig, learned, until

CHAT: dict[str, Any] = {
    "model": "chat",
    "slo_class": "64s",
    "prompt_tokens_mean": 500.0,
    "prompt_tokens_variance": 0.0,
    "output_tokens_variance": 1.0,
    "samples": 10_000,
}


@pytest.fixture
async def rig(server: EmbeddedServer) -> AsyncIterator[Rig]:
    rig = Rig(RedisQueue(server.url))
    await rig.start()
    yield rig
    await rig.queue.stop()


async def publish(rig: Rig, snapshot: ProfileSnapshot) -> None:
    """As a leader that goes away then."""
    lease = await rig.queue.acquire_lease(ESTIMATOR_ROLE, "other", LEASE_S, "")
    assert lease is not None
    await rig.queue.publish_profiles(lease, snapshot.version, profile_wire.to_body(snapshot))
    await rig.queue.release_lease(lease)


@pytest.mark.parametrize("told", [True, False], ids=["it says what it read", "it does not"])
async def test_a_new_leader_reads_on_after_the_last_entry_that_was_learned(server: EmbeddedServer, rig: Rig, told: bool) -> None:
    """A publication holds what was read by then; its time is later than events that it had still to read."""
    await rig.serve(15, 64)
    entries = await rig.queue.read_events("0", 0.0, 10_000)
    await rig.serve(10, 64)
    now_s = await rig.queue.server_time_s()
    last = entries[-1].entry_id if told else ""
    snapshot = ProfileSnapshot(version=1, made_s=now_s + 0.001, hardware=(), last_event_id=last)
    await publish(rig, snapshot)
    estimator = Estimator(server.url)
    await estimator.start()
    await rig.serve(5, 64)

    async def read() -> bool:
        return (estimator.metric("qlm_estimator_length_samples_total") or 0) >= (15 if told else 5)

    await until(read, "what was told since")
    assert round((await learned(estimator, 14 if told else 4)).samples) == (15 if told else 5)
    found = profile_wire.from_proto(await estimator.profiles())
    assert found.last_event_id == (await rig.queue.read_events(last or "0", 0.0, 10_000))[-1].entry_id
    assert estimator.metric("qlm_estimator_repeated_events_total") == 0
    await estimator.stop()


async def test_a_prediction_goes_by_what_tenant_and_hint_tell_of_the_output(server: EmbeddedServer, rig: Rig) -> None:
    """A published length model that knows two tenants and trusts the hints of one; a gateway would accept requests by the same classes."""
    facts = {tenant: LengthFacts(model="chat", tenant=tenant, prompt_tokens=500) for tenant in ("terse", "verbose")}
    known = {features_of(facts["terse"])[0]: 0.0, hint_feature(facts["terse"]): 1.0}
    known |= {features_of(facts["terse"])[1]: math.log(0.2), features_of(facts["verbose"])[1]: math.log(8.0)}
    model = LengthModel(
        features=tuple(known),
        weights=tuple(known.values()),
        curvatures=(1.0,) * len(known),
        scores=(LengthScore(model="chat", used=True, samples=500, median_error_tokens=300.0, model_error_tokens=100.0),),
    )
    rows = [WorkloadProfile(**CHAT, token_class=f"1024/o{2 ** (2 * at)}", output_tokens_mean=3.0 * 4.0 ** (at - 1)) for at in range(2, 7)]
    snapshot = ProfileSnapshot(version=1, made_s=1.0, hardware=shipped_snapshot().hardware, workload=tuple(rows), length_model=model)
    await publish(rig, snapshot)
    estimator = Estimator(server.url)
    await estimator.start()
    slo = request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=60.0)
    asked: dict[str, Any] = {"slo": slo, "output_tokens_max": 4_000}
    terse = await estimator.predict(tenant="terse", **asked)
    verbose = await estimator.predict(tenant="verbose", **asked)
    hinted = await estimator.predict(tenant="terse", expected_output_tokens=800, **asked)
    not_trusted = await estimator.predict(tenant="verbose", expected_output_tokens=3, **asked)
    assert verbose.completion_p50_s > 4.0 * terse.completion_p50_s
    assert hinted.completion_p50_s == pytest.approx(verbose.completion_p50_s, rel=0.01)
    assert not_trusted.completion_p50_s == pytest.approx(verbose.completion_p50_s, rel=0.01)
    await estimator.stop()


async def test_no_more_output_is_expected_than_the_context_holds_beside_the_prompt(rig: Rig, server: EmbeddedServer) -> None:
    """As a gateway limits it."""
    estimator = Estimator(server.url)
    await estimator.start()
    room, more = [await estimator.predict(prompt_tokens=8_182, output_tokens_max=most) for most in (10, 4_000)]
    assert more.completion_p50_s == pytest.approx(room.completion_p50_s)
    await estimator.stop()
