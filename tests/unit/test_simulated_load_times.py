"""A simulated engine whose loads and KV moves take longer than the profile says: what it tells puts predictions right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predicted_times import group_times
from qlm_agent.engines.policy import FirstComeFirstServed
from qlm_agent.engines.port import EngineRequest, Tier, TokenPrompt
from qlm_agent.engines.simulated.core import SimulatedCore, SimulatedLimits, SimulatedModel
from qlm_agent.engines.simulated.operations import OperationEnded
from qlm_agent.engines.simulated.timing import InstanceNoise
from qlm_core.instance import InstanceFacts
from qlm_core.model import ModelSpec
from qlm_core.prediction_views import GroupView, QueueView
from qlm_core.profile import ProfileSnapshot
from qlm_core.shipped_profiles import shipped_snapshot
from qlm_core.simulated_model import LENGTH_TOKEN_BASE
from qlm_estimator.events import EntryRead, OperationKind, OperationTold, QueueSeen, Tick
from qlm_estimator.machine import EstimatorMachine, Learning

SHIPPED = shipped_snapshot()
NAMES = {"a": "Mistral-7B", "b": "Vicuna-13B"}
CATALOGUE = {name: ModelSpec(name=name, profile=profile, context_tokens_max=8_192) for name, profile in NAMES.items()}
INSTANCE = InstanceFacts(
    name="i", incarnation="i/1", gpu="A100-80GB", n_gpu=1, engine="simulated", models=tuple(NAMES), active_model="a", time_scale=4.0
)
ROWS = {name: row for name, spec in CATALOGUE.items() if (row := SHIPPED.hardware_of_pair("A100-80GB", 1, spec)) is not None}
TIMES = ("load_disk_to_cpu_s", "load_cpu_to_gpu_s", "kv_swap_us_per_token", "kv_swap_base_ms")
BEGAN_S = 1_700_000_000.0


class World:
    """The engine, and an estimator that is told what its agent would tell."""

    def __init__(self, slowdown: float) -> None:
        slow = {name: replace(row, **{field: slowdown * getattr(row, field) for field in TIMES}) for name, row in ROWS.items()}
        models = {name: SimulatedModel(spec=CATALOGUE[name], profile=row) for name, row in slow.items()}
        noise = InstanceNoise(seed=5, instance="i", step_noise=0.05, bias_max=0.0)
        limits = SimulatedLimits(tell_every_s=0.0, time_scale=INSTANCE.time_scale, host_memory_gb=100.0, host_kv_gb=32.0)
        self.core = SimulatedCore(models, noise, FirstComeFirstServed(), limits)
        self.now_s = 0.0
        self.estimator = EstimatorMachine(learning=Learning(), catalogue=CATALOGUE, shipped=SHIPPED.hardware)
        self._told = 0
        self.estimator.step(BEGAN_S, QueueSeen(last_event=(0, 0), instances=(INSTANCE,), running={}, groups={}))

    def end_of(self, number: int) -> OperationEnded:
        while True:
            self.core.advance(self.now_s)
            self.core.outputs(self.now_s)
            for ended in self.core.ended():
                if ended.number == number:
                    return ended
            due_s = self.core.next_due_s
            assert due_s is not None
            self.now_s = max(self.now_s, due_s)

    def load(self, model: str, tier: Tier = Tier.ACTIVE) -> float:
        from_warm = self.core.tier(model) is Tier.WARM
        ended = self.end_of(self.core.load(self.now_s, model, tier))
        if tier is not Tier.COLD:
            swapped = OperationKind.SWAPPED_WARM if from_warm else OperationKind.SWAPPED_COLD
            self.tell(OperationKind.WARMED if tier is Tier.WARM else swapped, model, ended.took_s)
        return ended.took_s

    def tell(self, kind: OperationKind, model: str, took_s: float, requests: int = 0, tokens: int = 0) -> None:
        self._told += 1
        at = (round(1e3 * (BEGAN_S + self.now_s)), self._told)
        told = OperationTold(
            kind=kind, entry_id=at, index=0, incarnation="i/1", model=model, took_s=took_s, requests=requests, tokens=tokens
        )
        self.estimator.step(BEGAN_S + self.now_s, told)
        self.estimator.step(BEGAN_S + self.now_s, EntryRead(entry_id=at))

    def snapshot(self) -> ProfileSnapshot:
        self.estimator.step(BEGAN_S + self.now_s + 1_000.0, Tick())
        return self.estimator.snapshot

    def run(self, run_id: str, model: str, tokens: int, answer: int) -> None:
        ids = TokenPrompt(ids=[1] * (tokens - 1) + [LENGTH_TOKEN_BASE + answer])
        request = EngineRequest(run_id=run_id, model=model, prompt=ids, prompt_tokens=tokens, output_tokens_max=answer)
        self.core.add(self.now_s, request)


def waits_behind_a_swap_s(snapshot: ProfileSnapshot, *, warm: bool) -> float:
    """Of the first request of model b on the idle instance, where a is active."""
    group = GroupView(group_id="g", model="b", slo_class="", token_class="", waiting=1, waiting_prompt_tokens=100, first_deadline_s=1e9)
    view = QueueView(instance=INSTANCE, active_model="a", running=0, groups=(group,), warm_models=("b",) if warm else ())
    (time,) = group_times(view, CATALOGUE, snapshot)
    return time.wait.mean


@pytest.mark.parametrize("slowdown", [2.0, 0.6, 1.0])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_waits_behind_a_swap_become_right(slowdown: float, warm: bool) -> None:
    world = World(slowdown)
    before_s = waits_behind_a_swap_s(SHIPPED, warm=warm)
    took_s = []
    for _ in range(12):
        world.load("a")
        if not warm:
            world.load("b", Tier.COLD)
        elif world.core.tier("b") is not Tier.WARM:
            world.load("b", Tier.WARM)
        took_s.append(world.load("b"))
    mean_s = sum(took_s) / len(took_s)
    assert before_s == pytest.approx(mean_s / slowdown, rel=0.05)
    assert waits_behind_a_swap_s(world.snapshot(), warm=warm) == pytest.approx(mean_s, rel=0.08)


def test_the_way_back_of_offloaded_runs_becomes_right() -> None:
    """Runs whose KV is in host memory stand before the head, and have to be copied back first."""
    world = World(2.0)
    world.load("a")
    for number in range(4):
        world.run(str(number), "a", 6_000, 2_000)
    world.now_s += 12.0 / INSTANCE.time_scale
    names = [str(number) for number in range(4)]
    for _ in range(6):
        world.core.advance(world.now_s)
        for move in (world.core.offload, world.core.restore):
            ended = world.end_of(move(world.now_s, names))
            moved = len(ended.run_ids)  # who came back last joins at the next step
            assert moved >= 3
            world.tell(OperationKind.KV_MOVED, "a", ended.took_s, requests=moved, tokens=moved * 6_700)
    row = world.snapshot().hardware_for(INSTANCE, CATALOGUE["a"])
    assert row is not None
    assert row.kv_swap.samples == 12
    assert row.kv_swap_s(4_000) == pytest.approx(2.0 * ROWS["a"].kv_swap_s(4_000) / INSTANCE.time_scale, rel=0.12)
