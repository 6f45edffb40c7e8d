"""The load of other clients of an engine's server is reported when it changes: before a model is active, and as zero after it is lost."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, cast

from opentelemetry.sdk.trace import TracerProvider

from qlm_agent.decisions.effects import LoadModel
from qlm_agent.decisions.events import EngineProgress, Event, ModelLoaded, ModelNotLoaded, OtherLoad
from qlm_agent.engines.driver import EngineDriver
from qlm_agent.engines.port import Engine, EngineStats, ModelLoadFailed, Tier
from qlm_agent.telemetry.metrics import AgentMetrics, AgentTelemetry


class SharedEngine:
    """One whose server others use too."""

    def __init__(self) -> None:
        self.active = ""
        self.fails = False
        self.others = (0, 0)

    def tier(self, model: str) -> Tier:
        return Tier.ACTIVE if model == self.active else Tier.COLD

    async def load_model(self, model: str, _tier: Tier) -> float:
        if self.fails:
            raise ModelLoadFailed("no")
        self.active = model
        return 1.0

    def stats(self) -> EngineStats:
        runs, kv_tokens = self.others if self.active else (0, 0)
        return EngineStats(
            active_model=self.active,
            warm_models=(),
            running=runs,
            waiting=0,
            batch_max=8,
            kv_used_tokens=kv_tokens,
            kv_capacity_tokens=1_000,
            preemptions=0,
            others_runs=runs,
            others_kv_tokens=kv_tokens,
        )


class Driven:
    """A driver over it; `events`: the events that the machine received."""

    def __init__(self) -> None:
        self.engine = SharedEngine()
        self.events: list[Event] = []
        telemetry = AgentTelemetry("a", AgentMetrics(), TracerProvider(), lambda _event: None)
        self.driver = EngineDriver(cast(Engine, self.engine), {}, telemetry, now_s=lambda: 0.0, step=self.events.append)

    async def load(self, model: str) -> None:
        works: list[Coroutine[Any, Any, None]] = []
        await self.driver.perform(LoadModel(model=model, tier=Tier.ACTIVE), works.append)
        for work in works:
            await work

    def new_events(self) -> list[object]:
        """Since the last call: the load of others, and the kinds of all else."""
        events, self.events[:] = list(self.events), []
        return [(event.runs, event.kv_tokens) if isinstance(event, OtherLoad) else type(event) for event in events]


async def test_it_is_reported_before_a_model_is_active() -> None:
    driven = Driven()
    driven.engine.others = (3, 600)
    await driven.load("m")
    assert driven.new_events() == [(3, 600), ModelLoaded]
    driven.engine.others = (0, 0)
    await driven.load("n")
    assert driven.new_events() == [(0, 0), ModelLoaded]


async def test_load_of_others_is_reported_when_it_changes() -> None:
    driven = Driven()
    await driven.load("m")
    assert driven.new_events() == [ModelLoaded]
    driven.driver.report_outputs([])
    assert driven.new_events() == [EngineProgress]
    driven.engine.others = (1, 50)
    driven.driver.report_outputs([])
    driven.driver.report_outputs([])
    assert driven.new_events() == [(1, 50), EngineProgress, EngineProgress]


async def test_with_a_model_that_is_lost_it_is_nothing() -> None:
    driven = Driven()
    driven.engine.others = (3, 600)
    await driven.load("m")
    driven.new_events()
    driven.engine.active = ""
    driven.driver.report_outputs([])
    assert driven.new_events() == [ModelNotLoaded, (0, 0), EngineProgress], "nothing is pulled for it meanwhile"
    driven.engine.fails = True
    await driven.load("m")
    assert driven.new_events() == [ModelNotLoaded]
