"""What an agent tells the queue of where its models are, for those who predict waits."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider

from qlm_agent.effects import Register
from qlm_agent.server_calls import ServerCalls
from qlm_agent.telemetry import AgentMetrics, AgentTelemetry
from qlm_core.instance import InstanceFacts
from qlm_process.queue_views import instances_in
from qlm_queue.memory_queue import MemoryQueue
from qlm_queue.values import Bounds


async def test_a_model_is_told_as_loading_from_when_it_began_until_it_is_active() -> None:
    now_s = 1_000.0
    queue = MemoryQueue("test", Bounds(), lambda: now_s)
    facts = InstanceFacts(name="a", incarnation="", gpu="A10", n_gpu=1, engine="simulated", models=("m", "n"))
    telemetry = AgentTelemetry("a", AgentMetrics(), TracerProvider(), lambda event: None)
    calls = ServerCalls(queue, facts, {}, telemetry, now_s=lambda: now_s, tells_text=False, lease_ttl_s=1e6, lease_renew_s=1e5)
    await calls.tell_models("", "m", ())  # before there is anybody to tell
    await calls.perform(Register(call=1, nonce_number=0), ())

    async def told(active: str, swapping_to: str, *warm: str) -> tuple[str, tuple[str, ...], float]:
        await calls.tell_models(active, swapping_to, warm)
        (found,) = instances_in(await queue.overview())
        assert found == calls.facts
        return found.active_model, found.warm_models, found.loading_since_s

    try:
        assert await told("", "m") == ("m", (), 1_000.0)
        now_s = 1_002.0
        assert await told("", "m") == ("m", (), 1_000.0)
        assert await told("m", "") == ("m", (), 0.0)
        assert await told("m", "", "n") == ("m", ("n",), 0.0)
        assert await told("", "n", "n", "m") == ("n", ("n", "m"), 1_002.0)
        now_s = 1_003.0
        assert await told("", "m", "n", "m") == ("m", ("n", "m"), 1_003.0)
    finally:
        await calls.stop()
