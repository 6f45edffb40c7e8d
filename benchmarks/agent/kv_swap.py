"""Cost of making room to a request: its KV to host memory and back, or all of it computed again, by its context.

Both ways are measured on one run in an otherwise idle engine, from the decision to its next token, without the time of a decode step, which
it needs in any case. (There and back is one figure, as QLM compares it: `qlm_core.operations.preemption`.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

import numpy as np

from benchmarks.agent.figures import CONTEXTS
from benchmarks.agent.parts import Plan, apart
from benchmarks.agent.stepped_engine import EnginePlan, SteppedEngine
from benchmarks.figures import Values
from benchmarks.parts import Measured

REPETITIONS = 20
PRODUCED = 8
"""Tokens of a run before it is offloaded or evicted."""
DECODE_STEPS = 20
ANSWER_TOKENS = PRODUCED + DECODE_STEPS + 20
HOST_KV_BYTES = 512 << 20


@dataclass(slots=True)
class KvTimes:
    """Milliseconds at one context, by repetition: until the next token after a KV swap there and back, after recomputation, and of a decode
    step."""

    swap: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)

    @property
    def swap_ms(self) -> float:
        return max(0.0, median(self.swap) - median(self.decode))

    @property
    def recompute_ms(self) -> float:
        return max(0.0, median(self.again) - median(self.decode))


def measure(plan: Plan) -> Measured:
    times = apart(_times_of, EnginePlan.of(plan, 4, context_tokens=2048, host_kv_bytes=HOST_KV_BYTES), plan.some(REPETITIONS))
    lines = {
        "kv_swap": _line([times[context].swap_ms for context in CONTEXTS]),
        "recompute": _line([times[context].recompute_ms for context in CONTEXTS]),
    }
    found: dict[str, float | int | None] = {"switch_over_tokens": switch_over(lines["kv_swap"], lines["recompute"])}
    details: dict[str, object] = {"repetitions": plan.some(REPETITIONS), "produced_tokens": PRODUCED}
    for context, at in times.items():
        found |= {f"kv_swap_ms_at_{context}": at.swap_ms, f"recompute_ms_at_{context}": at.recompute_ms}
        details[f"at_{context}"] = {
            **{f"{name}_ms": {"min": min(each), "median": median(each)} for name, each in asdict(at).items()},
            "cheaper": "kv_swap" if at.swap_ms < at.recompute_ms else "recompute",
        }
        plan.say(f"KV swap at {context} tokens: {at.swap_ms:.2f} ms there and back, {at.recompute_ms:.2f} ms to compute it again")
    swap_us, recompute_us = (1e3 * lines[way][1] for way in ("kv_swap", "recompute"))
    details |= {
        "kv_swap_us_per_token_both_ways": swap_us,
        "recompute_us_per_token": recompute_us,
        "kv_swap_fixed_ms": lines["kv_swap"][0],
        "recompute_fixed_ms": lines["recompute"][0],
        "qlm_chooses": "kv_swap" if swap_us < recompute_us else "recompute",
    }
    values: Values = {"kv_swap_vs_recompute": found}
    return Measured(values=values, details=details)


def switch_over(swap: tuple[float, float], recompute: tuple[float, float]) -> int | None:
    """The least context at which KV swap is cheaper; each way is (milliseconds at no context, milliseconds a token). None for never."""
    ahead_ms, gain_ms = swap[0] - recompute[0], recompute[1] - swap[1]
    if gain_ms <= 0.0:
        return 0 if ahead_ms < 0.0 and gain_ms == 0.0 else None
    return max(0, round(ahead_ms / gain_ms))


def _line(medians_ms: Sequence[float]) -> tuple[float, float]:
    slope, base = np.polyfit(CONTEXTS, medians_ms, 1)
    return float(base), float(slope)


def _times_of(engine_plan: EnginePlan, repetitions: int) -> dict[int, KvTimes]:
    engine = SteppedEngine(engine_plan)
    _make_room(engine, CONTEXTS[-1], 0, KvTimes())  # warm-up
    times = {context: KvTimes() for context in CONTEXTS}
    for repetition in range(1, repetitions + 1):
        for context in CONTEXTS:
            _make_room(engine, context, repetition, times[context])
    return times


def _make_room(engine: SteppedEngine, context: int, repetition: int, times: KvTimes) -> None:
    """One run is offloaded and evicted, one after the other."""
    engine.clear()
    name = f"r-{context}-{repetition}"
    prompt = engine.prompt(context + 10_000 * repetition, context - PRODUCED)
    engine.add(name, prompt, ANSWER_TOKENS)
    engine.until(lambda: engine.produced[name] >= PRODUCED)

    out_ms = _timed_ms(lambda: _leave(engine, name))
    engine.forget_prefixes()
    times.swap.append(out_ms + _timed_ms(lambda: _restore(engine, name)))
    times.decode.append(median(_timed_ms(engine.step) for _ in range(DECODE_STEPS)))

    engine.abort(name)
    engine.step()
    engine.forget_prefixes()
    again = f"{name}-again"
    engine.add(again, [*prompt, *engine.prompt(repetition, PRODUCED)], 2)
    times.again.append(1e3 * engine.until(lambda: engine.produced[again] > 0))


def _leave(engine: SteppedEngine, name: str) -> None:
    assert engine.scheduler.offload([name]) == [name]
    engine.until(lambda: name in engine.scheduler.offloaded())


def _restore(engine: SteppedEngine, name: str) -> None:
    made = engine.produced[name]
    assert engine.scheduler.restore([name]) == [name]
    engine.until(lambda: engine.produced[name] > made)


def _timed_ms(call: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began_s)
