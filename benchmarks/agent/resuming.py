"""Evicted requests against undisturbed ones: aborted at a random token, resumed on a random instance as prompt + produced tokens.

Two instances of one model in float32, greedy. First all requests are answered undisturbed; then the engines are loaded anew, so that no
prefix cache has those answers, and each request is evicted once. Batches are full and mixed meanwhile, and never the same in the two
rounds.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.agent.model_config import engine_models, made_up_prompt, run_quietly, settings_of, vocabulary_of
from benchmarks.agent.parts import Plan
from benchmarks.figures import Values
from benchmarks.parts import Measured
from qlm_agent.engines.port import Tier, TokenPrompt
from qlm_agent.engines.vllm.engine import VllmEngine
from qlm_agent.engines.vllm.plans import environment
from qlm_agent.engines.vllm.process.template import Template
from qlm_agent.profiling.runs import ProfiledRun, ProfilingRuns
from qlm_core.vocabulary.simulated_model import TOKEN_BYTES

Found = TypeVar("Found")

DTYPE = "float32"
EVICTIONS = 200
INSTANCES = 2
SEATS = 8
AT_ONCE = 2 * INSTANCES * SEATS
PROMPT_TOKENS = (16, 200)
OUTPUT_TOKENS = (24, 96)
LEFT_TOKENS = 4
"""Least tokens between an eviction and the end, so that it precedes the end."""
TRIES_MAX = 5
CONTEXT_TOKENS = 1024
KV_GB = 0.3
SILENCE_S = 120.0
"""Longest wait for output."""
MODEL = "m"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionCase:
    """A request, and its eviction: after how many tokens, from which instance, and to which one."""

    number: int
    prompt: Sequence[int]
    output_tokens: int
    evict_at: int
    first: int
    then: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionResult:
    """Result of a case: the whole answer, of which `produced` bytes precede the eviction; 0 without one."""

    answer: bytes
    produced: int


def draw_cases(seed: int, count: int, vocabulary: int) -> list[EvictionCase]:
    dice = random.Random(seed)
    cases = []
    for number in range(count):
        output_tokens = dice.randint(*OUTPUT_TOKENS)
        cases.append(
            EvictionCase(
                number=number,
                prompt=made_up_prompt(vocabulary, number, dice.randint(*PROMPT_TOKENS)),
                output_tokens=output_tokens,
                evict_at=dice.randint(1, output_tokens - LEFT_TOKENS),
                first=dice.randrange(INSTANCES),
                then=dice.randrange(INSTANCES),
            )
        )
    return cases


def differences(undisturbed: Sequence[bytes], evicted: Sequence[EvictionResult]) -> list[dict[str, int]]:
    """Cases whose answer is not the undisturbed one, by number: the first token that differs (if one answer is a part of the other, the end
    of the shorter), and the number of tokens before the eviction."""
    found = []
    for number, (expected, case) in enumerate(zip(undisturbed, evicted, strict=True)):
        if expected == case.answer:
            continue
        places = range(0, min(len(expected), len(case.answer)), TOKEN_BYTES)
        shorter = min(len(expected), len(case.answer))
        at = next((place for place in places if expected[place : place + TOKEN_BYTES] != case.answer[place : place + TOKEN_BYTES]), shorter)
        found.append({"case": number, "token": at // TOKEN_BYTES, "produced": case.produced // TOKEN_BYTES})
    return found


def measure(plan: Plan) -> Measured:
    cases = draw_cases(plan.seed, plan.some(EVICTIONS), vocabulary_of(plan.model))
    undisturbed, evicted = run_quietly(_both_rounds(plan, cases))
    wrong = differences(undisturbed, evicted)
    evictions = sum(case.produced > 0 for case in evicted)
    different = sum(evicted[each["case"]].produced > 0 for each in wrong)
    plan.say(f"resume: {evictions - different} of {evictions} evicted requests have the undisturbed answer")
    values: Values = {"resume_equal": evictions - different}
    details: dict[str, object] = {
        "evictions": evictions,
        "requests": len(cases),
        "on_the_other_instance": sum(case.first != case.then for case in cases),
        "instances": INSTANCES,
        "dtype": DTYPE,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "different": wrong,
        "answers_that_differ_from_each_other": len(set(undisturbed)),
    }
    return Measured(values=values, details=details)


async def _both_rounds(plan: Plan, cases: Sequence[EvictionCase]) -> tuple[list[bytes], list[EvictionResult]]:
    settings = settings_of(plan, dtype=DTYPE, kv_cache_gb=KV_GB)
    models = engine_models({MODEL: plan.model}, CONTEXT_TOKENS)
    template = Template(settings.python, environment(settings), settings.load_timeout_s)
    engines = [VllmEngine(models, settings, batch_max=SEATS, template=template) for _ in range(INSTANCES)]
    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.stop)
            await engine.start()
            await engine.load_model(MODEL, Tier.ACTIVE)
        plan.say(f"resume: {INSTANCES} instances are up")
        vocabulary = vocabulary_of(plan.model)
        runs = [ProfilingRuns(engine, MODEL, vocabulary, f"instance-{place}", SILENCE_S) for place, engine in enumerate(engines)]
        for each in runs:
            await stack.enter_async_context(each.reading())
        undisturbed = await _at_once([_undisturbed(runs, case) for case in cases])
        plan.say("resume: all are answered undisturbed")
        for engine in engines:
            await engine.load_model(MODEL, Tier.COLD)
            await engine.load_model(MODEL, Tier.ACTIVE)
        return undisturbed, await _at_once([_evicted(runs, case) for case in cases])


async def _at_once(cases: Sequence[Coroutine[Any, Any, Found]]) -> list[Found]:
    seats = asyncio.Semaphore(AT_ONCE)

    async def one(case: Coroutine[Any, Any, Found]) -> Found:
        async with seats:
            return await case

    return list(await asyncio.gather(*(one(case) for case in cases)))


async def _started(runs: ProfilingRuns, case: EvictionCase, produced: bytes = b"") -> ProfiledRun:
    return await runs.add(TokenPrompt(ids=case.prompt), len(case.prompt), case.output_tokens, produced)


async def _undisturbed(runs: Sequence[ProfilingRuns], case: EvictionCase) -> bytes:
    run = await _started(runs[case.first], case)
    await runs[case.first].ends([run])
    return run.made


async def _evicted(runs: Sequence[ProfilingRuns], case: EvictionCase) -> EvictionResult:
    """A request that ended before its eviction is run again."""
    first, then = runs[case.first], runs[case.then]
    for _ in range(TRIES_MAX):
        run = await _started(first, case)
        await first.until(lambda run=run: run.ended or run.tokens >= case.evict_at)  # type: ignore[misc]
        await first.abort([run])
        if run.made and not run.ended:
            again = await _started(then, case, run.made)
            await then.ends([again])
            return EvictionResult(answer=run.made + again.made, produced=len(run.made))
    return EvictionResult(answer=run.made, produced=0)
