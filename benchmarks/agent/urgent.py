"""The first token of an urgent request while the batch is full, over that of an idle engine: vLLM alone, and with QLM's scheduler.

The batch is kept full of requests of a later band, with `LOOKAHEAD` more of them waiting in the engine; each end is followed by a new one.
Each repetition measures the idle engine and the full one, with prompts never seen before, so the two share the machine's noise.
"""

from __future__ import annotations

import random
from statistics import median

from benchmarks.agent.figures import SCHEDULERS
from benchmarks.agent.parts import Plan, apart
from benchmarks.agent.stepped_engine import EnginePlan, SteppedEngine
from benchmarks.figures import Values
from benchmarks.parts import Measured

SEATS, LOOKAHEAD = 8, 2
PROMPT_TOKENS, ANSWER_TOKENS = 128, 200
URGENT_BAND, OTHER_BAND = 0, 5
REPETITIONS = 30
WARM_UP_STEPS = 40


def measure(plan: Plan) -> Measured:
    """Medians over the repetitions, one engine after the other, each in its own process."""
    repetitions = plan.some(REPETITIONS)
    ratios: dict[str, float] = {}
    details: dict[str, object] = {
        "seats": SEATS,
        "lookahead_requests": LOOKAHEAD,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "repetitions": repetitions,
    }
    for name in SCHEDULERS:
        engine = EnginePlan.of(plan, SEATS, scheduler=name.removeprefix("stock_"))
        idle_ms, full_ms = apart(_first_tokens_ms, engine, repetitions, plan.seed)
        ratios[name] = median(full_ms) / median(idle_ms)
        details[name] = {
            "idle_ms": {"min": min(idle_ms), "median": median(idle_ms)},
            "full_ms": {"min": min(full_ms), "median": median(full_ms), "max": max(full_ms)},
        }
        plan.say(f"urgent, {name}: {median(full_ms):.1f} ms with the batch full, {median(idle_ms):.1f} ms idle: {ratios[name]:.2f} times")
    values: Values = {"urgent_ttft_ratio": {**ratios}}
    return Measured(values=values, details=details)


def _first_tokens_ms(engine_plan: EnginePlan, repetitions: int, seed: int) -> tuple[list[float], list[float]]:
    engine = SteppedEngine(engine_plan)
    crowd = _Background(engine, random.Random(seed))
    crowd.fill(WARM_UP_STEPS)
    _first_token_ms(engine, "warm-up", 1_000_000)
    idle_ms, full_ms = [], []
    for repetition in range(repetitions):
        engine.clear()
        idle_ms.append(_first_token_ms(engine, f"idle-{repetition}", 2_000_000 + repetition))
        engine.clear()
        crowd.fill(crowd.dice.randint(WARM_UP_STEPS, 3 * WARM_UP_STEPS))
        full_ms.append(_first_token_ms(engine, f"full-{repetition}", 3_000_000 + repetition))
    return idle_ms, full_ms


def _first_token_ms(engine: SteppedEngine, run_id: str, number: int) -> float:
    prompt = engine.prompt(number, PROMPT_TOKENS)
    engine.add(run_id, prompt, 2, priority=URGENT_BAND)
    return 1e3 * engine.until(lambda: engine.produced[run_id] > 0)


class _Background:
    """Requests of a later band: one a seat, and those of the lookahead."""

    def __init__(self, engine: SteppedEngine, dice: random.Random) -> None:
        self.dice = dice
        self._engine = engine
        self._count = 0

    def fill(self, steps: int) -> None:
        """Keeps the engine full for a while; the first have shorter answers, so that they do not all end at once."""
        while len(self._engine.running) < SEATS:
            self._add(self.dice.randint(ANSWER_TOKENS // 4, ANSWER_TOKENS))
        for _ in range(steps):
            while len(self._engine.running) < SEATS + LOOKAHEAD:
                self._add(ANSWER_TOKENS)
            self._engine.step()

    def _add(self, answer: int) -> None:
        self._count += 1
        self._engine.add(f"crowd-{self._count}", self._engine.prompt(self._count, PROMPT_TOKENS), answer, priority=OTHER_BAND)
