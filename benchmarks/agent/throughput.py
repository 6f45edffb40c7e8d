"""Tokens a second at saturation: an agent that pulls from its virtual queue, over vLLM alone with all requests at once.

Both have the same settings of vLLM, and each pair the same requests, with prompts never seen before; the first of a pair alternates. The
agent is the whole of its process: it pulls with lookahead 0, and every token is stored in the queue. Its time is from the placement of the
group to the end of its last request by the queue's events; vLLM's from the first submission to the last token.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory

from scipy.special import stdtrit

from benchmarks.agent.model_config import agent_config, made_up_prompt, run_quietly, settings_of, spread, vocabulary_of
from benchmarks.agent.own_agent import GreedyRequest, OwnAgent, own_agent
from benchmarks.agent.parts import Plan
from benchmarks.agent.stepped_engine import EnginePlan, seconds_for
from benchmarks.figures import Values
from benchmarks.parts import Measured

SEATS = 16
REQUESTS = 64
PROMPT_TOKENS = 64
OUTPUT_TOKENS = (40, 120)
PAIRS = 12
CONTEXT_TOKENS = 1024
KV_GB = 0.5
BareSeconds = Callable[[Sequence[GreedyRequest]], Awaitable[float]]
MODEL = "m"


def measure(plan: Plan) -> Measured:
    rates = run_quietly(_rates(plan))
    ours, theirs = [agent for agent, _ in rates], [bare for _, bare in rates]
    ratio = ratio_of_pairs(ours, theirs)
    plan.say(f"throughput: {ratio.value:.3f} of vLLM by itself ({ratio.low:.3f} to {ratio.high:.3f})")
    values: Values = {"throughput_ratio": {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}}
    details: dict[str, object] = {
        "pairs": len(rates),
        "interval": f"Student's t on the logarithms of the pairs' ratios, {LEVEL:.0%}",
        "ratio": asdict(ratio),
        "agent_tokens_per_s": {**spread(ours), "max": max(ours)},
        "vllm_tokens_per_s": {**spread(theirs), "max": max(theirs)},
        "ratios": [round(own / other, 4) for own, other in rates],
        "requests": plan.some(REQUESTS),
        "seats": SEATS,
        "lookahead_requests": 0,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }
    return Measured(values=values, details=details)


async def _rates(plan: Plan) -> list[tuple[float, float]]:
    """Tokens a second of both, by pair."""
    config = agent_config({MODEL: plan.model}, CONTEXT_TOKENS, SEATS, settings_of(plan, kv_cache_gb=KV_GB))
    bare = EnginePlan.of(plan, SEATS, context_tokens=CONTEXT_TOKENS, gpu_kv_bytes=round(KV_GB * 1e9), scheduler="fcfs")
    loop = asyncio.get_running_loop()
    with (
        TemporaryDirectory(prefix="qlm-bench-queue-") as scratch,
        ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool,
    ):
        async with own_agent(config, Path(scratch)) as agent:
            return await _in_turns(plan, agent, lambda requests: loop.run_in_executor(pool, seconds_for, bare, requests))


async def _in_turns(plan: Plan, agent: OwnAgent, bare_seconds: BareSeconds) -> list[tuple[float, float]]:
    dice = random.Random(plan.seed)
    vocabulary = vocabulary_of(plan.model)
    rates: list[tuple[float, float]] = []
    for pair in range(-1, plan.some(PAIRS)):  # the first is a warm-up
        requests = [
            GreedyRequest(
                prompt=made_up_prompt(vocabulary, 1_000 * (pair + 2) + number, PROMPT_TOKENS), output_tokens=dice.randint(*OUTPUT_TOKENS)
            )
            for number in range(plan.some(REQUESTS))
        ]
        tokens = sum(each.output_tokens for each in requests)
        if pair % 2:
            bare_s = await bare_seconds(requests)
            agent_s = await _agent_s(agent, requests)
        else:
            agent_s = await _agent_s(agent, requests)
            bare_s = await bare_seconds(requests)
        plan.say(f"throughput, pair {pair + 1}: {tokens / agent_s:.0f} tokens/s pulled, {tokens / bare_s:.0f} by itself")
        if pair >= 0:
            rates.append((tokens / agent_s, tokens / bare_s))
    return rates


async def _agent_s(agent: OwnAgent, requests: list[GreedyRequest]) -> float:
    group = await agent.accept(MODEL, requests)
    await agent.read_events()
    began_s = time.perf_counter()
    await agent.place(MODEL, group)
    await agent.until_ended(len(group))
    return time.perf_counter() - began_s


LEVEL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """`value`: geometric mean over the pairs; `low` to `high`: its interval at `LEVEL`, by Student's t on the logarithms; `median`: of the
    pairs' own ratios."""

    value: float
    low: float
    high: float
    median: float


def ratio_of_pairs(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ours over theirs, both positive and measured in pairs. Raises ValueError for less than two pairs, or sides of different lengths."""
    logs = [math.log(own / other) for own, other in zip(ours, theirs, strict=True)]
    if len(logs) < 2:
        raise ValueError(f"{len(logs)} pairs give no interval")
    mean = fmean(logs)
    half = float(stdtrit(len(logs) - 1, (1.0 + LEVEL) / 2.0)) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(value=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), median=math.exp(median(logs)))
