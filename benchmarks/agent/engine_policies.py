"""Engine policies on real vLLM and on the simulated engine, under one bursty load: are they in the same order?

Bursts of requests with short and long answers, of which half have an early deadline, on few seats. Times of the load and of the policies
are multiples of a decode step with all seats taken, measured before each policy: the load is the same on any machine, however busy. The
simulated engine has the measured steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from statistics import median

import numpy as np

from benchmarks.agent.parts import Plan, apart
from benchmarks.agent.stepped_engine import EnginePlan, SteppedEngine
from benchmarks.figures import Values
from benchmarks.parts import Measured
from qlm_agent.engines.policies.port import EnginePolicy
from qlm_agent.engines.policies.registry import engine_policy
from qlm_agent.engines.simulated.batching.batch import SimulatedBatch
from qlm_agent.engines.simulated.batching.prefills import PrefillRule
from qlm_agent.engines.simulated.batching.sequences import RunState

POLICIES = ("fcfs", "edf", "larry", "fastserve")
SEATS = 4
REQUESTS = 60
GAP_STEPS, GAP_CV = 9.0, 4.0
"""Gamma gaps between arrivals: about 1.2 times what the seats sustain."""
SHORT_TOKENS, LONG_TOKENS, LONG_SHARE = (6, 20), (80, 160), 0.25
PROMPT_TOKENS = (16, 192)
EARLY_STEPS, LATE_STEPS = 100.0, 2_000.0
"""Deadlines after the arrival, in turn."""
CHUNK_TOKENS, BLOCK_TOKENS = 512, 32
CALIBRATION_STEPS = 30
TIE = 0.1
"""Policies that differ by less in the simulation have no order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests in the order of arrival; times in steps."""

    arrived: Sequence[float]
    prompts: Sequence[int]
    answers: Sequence[int]
    deadlines: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Measured seconds: a decode step with one run and with all seats taken, and what a prompt token adds."""

    one_s: float
    full_s: float
    prompt_token_s: float

    def step_s(self, decoding: int, context_tokens: int, prefills: Sequence[tuple[int, int]]) -> float:
        decode_s = self.one_s + (self.full_s - self.one_s) * max(0, decoding - 1) / (SEATS - 1)
        return decode_s + self.prompt_token_s * sum(tokens for _, tokens in prefills)

    def policy(self, name: str) -> EnginePolicy:
        """A policy whose times are multiples of a step."""
        options: Mapping[str, Mapping[str, float | str]] = {
            "edf": {"lead_s": 30.0 * self.full_s},
            "larry": {"weight": 0.2 / self.full_s},
            "fastserve": {"quantum_s": self.full_s, "promote_s": 200.0 * self.full_s, "kv": "recompute"},
        }
        return engine_policy(name, options.get(name, {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`token`: mean over the requests of steps from arrival to end for each token; `first_p50`: median of steps to the first token;
    `late`: share of requests that missed their deadline."""

    token: float
    first_p50: float
    late: float


def measure(plan: Plan) -> Measured:
    """All policies in one engine, which is a process of its own."""
    load = load_of(plan.some(REQUESTS), plan.seed)
    found = apart(_measured, EnginePlan.of(plan, SEATS, prefill_chunk_tokens=CHUNK_TOKENS), load)
    for name, (real, virtual, step_s) in found.items():
        plan.say(f"engine policies, {name}: {real}, simulated {virtual}, a step of {1e3 * step_s:.1f} ms")
    values: Values = {
        "engine_policy_order": concordance([(real, virtual) for real, virtual, _ in found.values()]),
        "engine_policy_steps": {name: round(real.token, 3) for name, (real, _, _) in found.items()},
    }
    policies = {
        name: {"real": asdict(real), "simulated": asdict(virtual), "step_s": step_s} for name, (real, virtual, step_s) in found.items()
    }
    return Measured(values=values, details={"seats": SEATS, "requests": len(load.arrived), "policies": policies})


def load_of(requests: int, seed: int) -> Load:
    """The same for all policies, by seed."""
    dice = np.random.Generator(np.random.PCG64([seed, requests]))
    gaps = dice.gamma(1.0 / GAP_CV**2, GAP_CV**2 * GAP_STEPS, requests)
    long = dice.random(requests) < LONG_SHARE
    answers = np.where(long, dice.integers(*LONG_TOKENS, requests), dice.integers(*SHORT_TOKENS, requests))
    arrived = np.cumsum(gaps) - gaps[0]
    deadlines = arrived + np.where(np.arange(requests) % 2, LATE_STEPS, EARLY_STEPS)
    prompts = dice.integers(*PROMPT_TOKENS, requests)
    return Load(arrived=arrived.tolist(), prompts=prompts.tolist(), answers=answers.tolist(), deadlines=deadlines.tolist())


def concordance(found: Sequence[tuple[Outcome, Outcome]]) -> float:
    """Share of the pairs of policies, of those that are apart in the simulation, with the same order on the real engine, over all figures.
    `found`: of each policy, real and simulated."""
    same: list[bool] = []
    for figure in (field.name for field in fields(Outcome)):
        pairs = [(float(getattr(real, figure)), float(getattr(virtual, figure))) for real, virtual in found]
        for (real, virtual), (other_real, other_virtual) in combinations(pairs, 2):
            if abs(virtual - other_virtual) > TIE * max(virtual, other_virtual):
                same.append((real < other_real) == (virtual < other_virtual))
    return sum(same) / max(1, len(same))


def _measured(plan: EnginePlan, load: Load) -> dict[str, tuple[Outcome, Outcome, float]]:
    """By policy: on the real and on the simulated engine, and seconds of a step."""
    engine = SteppedEngine(plan)
    found: dict[str, tuple[Outcome, Outcome, float]] = {}
    for name in POLICIES:
        engine.clear()
        engine.scheduler.follow(engine_policy("fcfs", {}))
        steps = _calibrate(engine)
        engine.clear()
        engine.scheduler.follow(steps.policy(name))
        found[name] = (_serve(engine, load, steps.full_s), simulate(load, steps, name), steps.full_s)
    return found


def _calibrate(engine: SteppedEngine) -> Steps:
    def decode_s() -> float:
        engine.step()  # the prefills
        return median(engine.timed_step() for _ in range(CALIBRATION_STEPS))

    engine.add("calibration-0", engine.prompt(1, PROMPT_TOKENS[0]), 4 * CALIBRATION_STEPS)
    one_s = decode_s()
    for number in range(1, SEATS):
        engine.add(f"calibration-{number}", engine.prompt(number + 1, PROMPT_TOKENS[0]), 4 * CALIBRATION_STEPS)
    full_s = decode_s()
    engine.clear()
    prefills_s = []
    for number in range(5):
        engine.add(f"prefill-{number}", engine.prompt(100 + number, CHUNK_TOKENS), 1)
        prefills_s.append(engine.timed_step())
        engine.clear()
    return Steps(one_s=one_s, full_s=max(full_s, one_s), prompt_token_s=max(0.0, median(prefills_s) - one_s) / CHUNK_TOKENS)


def _serve(engine: SteppedEngine, load: Load, step_s: float) -> Outcome:
    """Serves the load on the real engine."""
    began_s, sent = time.monotonic(), 0
    first_s: dict[str, float] = {}
    ended_s: dict[str, float] = {}
    while len(ended_s) < len(load.arrived):
        now_s = time.monotonic() - began_s
        while sent < len(load.arrived) and load.arrived[sent] * step_s <= now_s:
            prompt = engine.prompt(1_000 + sent, load.prompts[sent])
            deadline_s = began_s + load.deadlines[sent] * step_s
            engine.add(f"load-{sent}", prompt, load.answers[sent], arrival=sent, deadline_s=deadline_s)
            sent += 1
        if not engine.running:
            time.sleep(max(0.0, load.arrived[sent] * step_s - now_s))
            continue
        before = set(engine.running)
        engine.step()
        now_s = time.monotonic() - began_s
        ended_s |= dict.fromkeys(before - engine.running, now_s)
        first_s |= dict.fromkeys((name for name in before - first_s.keys() if engine.produced[name]), now_s)
    names = [f"load-{number}" for number in range(sent)]
    return outcome_of(load, [first_s[name] / step_s for name in names], [ended_s[name] / step_s for name in names])


def simulate(load: Load, steps: Steps, name: str) -> Outcome:
    """Serves the load on the simulated engine under a policy."""
    batch = SimulatedBatch(
        step_s=steps.step_s,
        kv_capacity_tokens=10**6,
        batch_max=SEATS,
        prefill_chunk_tokens=CHUNK_TOKENS,
        policy=steps.policy(name),
        prefill=PrefillRule.SHARED,
    )
    runs = [
        RunState(
            run_id=str(number),
            arrival=number,
            deadline_s=load.deadlines[number] * steps.full_s,
            priority=0,
            prompt_tokens=load.prompts[number],
            produced_tokens=0,
            target_tokens=load.answers[number],
            resumed=0,
            reported=0,
        )
        for number in range(len(load.arrived))
    ]
    for arrived, run in zip(load.arrived, runs, strict=True):
        batch.advance(arrived * steps.full_s)
        batch.add(arrived * steps.full_s, run)
    while (due_s := batch.next_due_s) is not None:
        batch.advance(due_s)
    first, ended = (np.array([getattr(run, name) for run in runs]) / steps.full_s for name in ("first_token_s", "ended_s"))
    return outcome_of(load, first.tolist(), ended.tolist())


def outcome_of(load: Load, first: Sequence[float], ended: Sequence[float]) -> Outcome:
    """From the times, in steps, of first and last tokens."""
    arrived, ends = np.array(load.arrived), np.array(ended)
    return Outcome(
        token=float(np.mean((ends - arrived) / np.array(load.answers))),
        first_p50=float(np.median(np.array(first) - arrived)),
        late=float(np.mean(ends > np.array(load.deadlines))),
    )
