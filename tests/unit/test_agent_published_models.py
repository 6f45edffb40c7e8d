"""An agent's reports to the queue of its models and runs, for predictions of waits."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider

from qlm_agent.decisions.effects import Register
from qlm_agent.shell.server_calls import ServerCalls
from qlm_agent.telemetry.metrics import AgentMetrics, AgentTelemetry
from qlm_core.prediction.reported_runs import GroupRuns, ReportedRuns
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_process.queue.instances import instances_in
from qlm_process.wire.running import from_body
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.values import Bounds


async def test_a_model_is_published_as_loading_from_its_start_until_it_is_active() -> None:
    now_s = 1_000.0
    queue = MemoryQueue("test", Bounds(), lambda: now_s)
    facts = InstanceFacts(name="a", incarnation="", gpu="A10", n_gpu=1, engine="simulated", models=("m", "n"))
    telemetry = AgentTelemetry("a", AgentMetrics(), TracerProvider(), lambda event: None)
    calls = ServerCalls(queue, facts, {}, telemetry, now_s=lambda: now_s, text_output=False, lease_ttl_s=1e6, lease_renew_s=1e5)
    await calls.publish("", "m", (), 0, None)  # before its registration
    await calls.perform(Register(call=1, nonce_number=0), ())

    async def published(active: str, swapping_to: str, *warm: str) -> tuple[str, tuple[str, ...], float]:
        await calls.publish(active, swapping_to, warm, 32, None)
        (found,) = instances_in(await queue.overview())
        assert found == calls.facts
        assert found.batch == 32
        return found.active_model, found.warm_models, found.loading_since_s

    try:
        assert await published("", "m") == ("m", (), 1_000.0)
        now_s = 1_002.0
        assert await published("", "m") == ("m", (), 1_000.0)
        assert await published("m", "") == ("m", (), 0.0)
        assert await published("m", "", "n") == ("m", ("n",), 0.0)
        assert await published("", "n", "n", "m") == ("n", ("n", "m"), 1_002.0)
        now_s = 1_003.0
        assert await published("", "m", "n", "m") == ("m", ("n", "m"), 1_003.0)
    finally:
        await calls.stop()


async def test_runs_are_published_each_time_and_once_more_when_none_is_left() -> None:
    queue = MemoryQueue("test", Bounds(), lambda: 1_000.0)
    facts = InstanceFacts(name="a", incarnation="", gpu="A10", n_gpu=1, engine="simulated", models=("m",))
    telemetry = AgentTelemetry("a", AgentMetrics(), TracerProvider(), lambda event: None)
    calls = ServerCalls(queue, facts, {}, telemetry, now_s=lambda: 1_000.0, text_output=False, lease_ttl_s=1e6, lease_renew_s=1e5)
    await calls.perform(Register(call=1, nonce_number=0), ())

    async def stored(at_s: float, *made: int) -> ReportedRuns | None:
        groups = {"g": GroupRuns(output_tokens=made, prompt_tokens=1)} if made else {}
        await calls.publish("m", "", (), 32, ReportedRuns(at_s=at_s, token_s=0.1, groups=groups))
        (record,) = (await queue.overview()).instances
        return from_body(record.body)

    try:
        for at_s, made in ((1.0, (3,)), (2.0, (3,)), (3.0, (4, 5)), (4.0, ())):
            reported = await stored(at_s, *made)
            assert reported is not None
            assert (reported.at_s, [runs.output_tokens for runs in reported.groups.values()]) == (at_s, [made] if made else [])
        reported = await stored(5.0)
        assert reported is not None
        assert reported.at_s == 4.0, "nothing is new"
    finally:
        await calls.stop()
