"""Model swaps by tier on engine vllm, and whether an agent hides the warming of the next model behind the running batch.

The times are those of the engine's own `load_model`, with nothing running: two models of one shape take turns. On CUDA a model that was
warmed beside another has its files in host memory alone, so activating it from there has a time of its own; and "in place" is a wake from
sleep level 2. For the share, an agent serves more models than host memory holds, so that each has to be warmed anew before its turn; its
virtual queue names them one after the other, each with work for about `TURN_S`. A warming is hidden if it is done before the end of the
last request of the model before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.agent.model_config import (
    agent_config,
    engine_models,
    made_up_prompt,
    run_quietly,
    settings_of,
    spread,
    vocabulary_of,
    weights_gb_of,
)
from benchmarks.agent.own_agent import GreedyRequest, own_agent
from benchmarks.agent.parts import Plan
from benchmarks.figures import Values
from benchmarks.parts import Measured
from qlm.internal.v1 import events_pb2
from qlm_agent.engines.port import Tier
from qlm_agent.engines.vllm.engine import VllmEngine
from qlm_agent.engines.vllm.plans import environment
from qlm_agent.engines.vllm.process.template import Template
from qlm_agent.profiling.runs import ProfilingRuns

TIMES = ("active_from_warm", "active_from_cold", "active_from_cold_in_place", "warm_from_cold")
REPETITIONS = 12
SWAPS = 20
"""Planned model swaps in the share, with a warming each."""
MODELS = 4
TURN_S = 10.0
TURN_MIN_S = 1.0
SEATS = 8
PROMPT_TOKENS = 32
OUTPUT_TOKENS_MAX = 800
PACE_TOKENS = 40
CONTEXT_TOKENS = 1024
KV_GB = 0.3
SILENCE_S = 120.0
"""Longest wait for output."""
HELD = 2.5
"""Models whose weights host memory holds: the active one, and the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModelSwap:
    """From one model to the next, on the queue's clock. `warmed_s`: end of the model's last earlier warming, None for none; `emptied_s`:
    end of the last request of the model before; `swapped_s`: when the model was active."""

    model: str
    warmed_s: float | None
    emptied_s: float
    swapped_s: float

    @property
    def hidden(self) -> bool:
        return self.warmed_s is not None and self.warmed_s <= self.emptied_s

    @property
    def gap_ms(self) -> float:
        """Seconds without work for the GPU."""
        return 1e3 * (self.swapped_s - self.emptied_s)


def planned_model_swaps(events: Sequence[events_pb2.RequestEvent]) -> list[PlannedModelSwap]:
    """All model swaps in one agent's events, in order; each needs a warming of its own."""
    warmed_s: dict[str, float] = {}
    ended_s: dict[str, float] = {}
    found = []
    for event in sorted(events, key=lambda event: event.finished_s):
        match event.kind:
            case events_pb2.EVENT_KIND_MODEL_WARMED:
                warmed_s[event.model] = event.finished_s
            case events_pb2.EVENT_KIND_COMPLETED:
                ended_s[event.model] = event.finished_s
            case events_pb2.EVENT_KIND_MODEL_SWAPPED:
                warmed = warmed_s.pop(event.model, None)
                if event.from_model and event.from_model in ended_s:
                    emptied_s = ended_s[event.from_model]
                    found.append(PlannedModelSwap(model=event.model, warmed_s=warmed, emptied_s=emptied_s, swapped_s=event.finished_s))
    return found


def measure(plan: Plan) -> Measured:
    times, step_s = run_quietly(_by_tier(plan))
    for name, each in times.items():
        plan.say(f"model swap, {name}: {1e3 * spread(each)['median']:.1f} ms")
    swaps = run_quietly(_in_a_row(plan, step_s))
    share = sum(swap.hidden for swap in swaps) / len(swaps)
    plan.say(f"model swap: the warming of {share:.0%} of {len(swaps)} planned model swaps was hidden")
    values: Values = {
        "swap_ms": {
            **{name: 1e3 * spread(times[name])["median"] for name in TIMES},
            "warm_hidden_share": share,
        }
    }
    details: dict[str, object] = {
        **{f"{name}_ms": spread([1e3 * each for each in found]) for name, found in times.items()},
        "weights_mb": 1e3 * weights_gb_of(plan.model),
        "planned_swaps": len(swaps),
        "warming_hidden": sum(swap.hidden for swap in swaps),
        "never_warmed": sum(swap.warmed_s is None for swap in swaps),
        "gap_ms": spread([swap.gap_ms for swap in swaps]),
        "done_before_the_batch_s": spread([swap.emptied_s - swap.warmed_s for swap in swaps if swap.warmed_s is not None] or [0.0]),
        "models": MODELS,
        "held": HELD,
        "turn_s": TURN_S,
        "decode_step_ms": 1e3 * step_s,
    }
    return Measured(values=values, details=details)


# By tier --------------------------------------------------------------------------------------------------------------


async def _by_tier(plan: Plan) -> tuple[dict[str, list[float]], float]:
    """Seconds of each kind of move, and of a decode step of a full batch."""
    times: dict[str, list[float]] = {name: [] for name in TIMES}
    weights_gb = weights_gb_of(plan.model)
    warmed = "active_from_read_ahead" if plan.device == "cuda" else "active_from_warm"
    both = settings_of(plan, kv_cache_gb=KV_GB, host_memory_gb=HELD * weights_gb)
    one = settings_of(plan, kv_cache_gb=KV_GB, host_memory_gb=1.5 * weights_gb)
    models = engine_models({"a": plan.model, "b": plan.model}, CONTEXT_TOKENS)
    template = Template(both.python, environment(both), both.load_timeout_s)
    async with AsyncExitStack() as stack:
        engine = VllmEngine(models, both, batch_max=SEATS, template=template)
        stack.push_async_callback(engine.stop)
        await engine.start()
        await engine.load_model("a", Tier.ACTIVE)
        step_s = await _step_s(plan, engine)
        for repetition in range(plan.some(REPETITIONS)):
            there, back = ("b", "a") if repetition % 2 == 0 else ("a", "b")
            times["active_from_cold"].append(await engine.load_model(there, Tier.ACTIVE))
            times["active_from_warm"].append(await engine.load_model(back, Tier.ACTIVE))
            await engine.load_model(there, Tier.COLD)
            times["warm_from_cold"].append(await engine.load_model(there, Tier.WARM))
            times.setdefault(warmed, []).append(await engine.load_model(there, Tier.ACTIVE))
            await engine.load_model(back, Tier.COLD)
        await engine.load_model("a", Tier.COLD)
        await engine.load_model("b", Tier.COLD)
        small = VllmEngine(models, one, batch_max=SEATS, template=template)
        stack.push_async_callback(small.stop)
        await small.start()
        await small.load_model("a", Tier.ACTIVE)
        for _ in range(plan.some(REPETITIONS) // 2):
            for model in ("b", "a"):
                times["active_from_cold_in_place"].append(await small.load_model(model, Tier.ACTIVE))
    return times, step_s


async def _step_s(plan: Plan, engine: VllmEngine) -> float:
    runs = ProfilingRuns(engine, "a", vocabulary_of(plan.model), "pace", SILENCE_S)
    async with runs.reading():
        started = [await runs.start(PROMPT_TOKENS, PACE_TOKENS) for _ in range(SEATS)]
        await runs.until(lambda: all(run.tokens >= 2 for run in started))
        began_s = time.perf_counter()
        await runs.ends(started)
        return (time.perf_counter() - began_s) / (PACE_TOKENS - 2)


# An agent with more models than host memory holds ---------------------------------------------------------------------


async def _in_a_row(plan: Plan, step_s: float) -> list[PlannedModelSwap]:
    names = [f"m{number}" for number in range(MODELS)]
    folders = dict.fromkeys(names, plan.model)
    settings = settings_of(plan, kv_cache_gb=KV_GB, host_memory_gb=HELD * weights_gb_of(plan.model))
    config = agent_config(folders, CONTEXT_TOKENS, SEATS, settings)
    vocabulary = vocabulary_of(plan.model)
    turn_s = max(TURN_MIN_S, TURN_S * plan.scale)
    tokens = round(turn_s / step_s)
    waves = -(-tokens // OUTPUT_TOKENS_MAX)
    count = SEATS * waves
    with TemporaryDirectory(prefix="qlm-bench-queue-") as scratch:
        async with own_agent(config, Path(scratch)) as agent:
            placed = 0
            for turn in range(plan.some(SWAPS) + 1):
                model = names[turn % MODELS]
                requests = [
                    GreedyRequest(
                        prompt=made_up_prompt(vocabulary, 1 + turn * 1_000 + number, PROMPT_TOKENS),
                        output_tokens=max(2, tokens // waves),
                    )
                    for number in range(count)
                ]
                await agent.place(model, await agent.accept(model, requests))
                placed += len(requests)
            await agent.until_ended(placed)
            return planned_model_swaps(agent.events)
