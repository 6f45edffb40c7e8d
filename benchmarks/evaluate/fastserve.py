"""The claims of FastServe (Wu et al., arXiv 2305.05920v3), sections 4.2 and 6, on the simulated engine.

One server of a model, prefills whole, jobs served to their end. Seats are not in the paper: with 16, the goodput of first come first
served is about the paper's (1.77 to 2.05 jobs a second). Nor is how long jobs arrive, which matters: at the rates that it reports FastServe
is beyond what the server can do, and what waits grows with time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.evaluate.rows import Row
from benchmarks.evaluate.server import Served, Server, serve, server
from benchmarks.evaluate.workloads import Jobs, Lengths, jobs, lengths
from qlm_agent.engines.policies.port import Sequences, SequenceView
from qlm_agent.engines.policies.registry import ENGINE_POLICIES
from qlm_agent.engines.simulated.batch import SimulatedBatch

SEATS = 16
SLO_S = 0.3
"""A token (section 6.1)."""
MODELS = {"OPT-13B": 1, "OPT-66B": 4, "OPT-175B": 16}
"""GPUs of each (figure 11), all in tensor parallel: the paper has 175B in two pipeline stages of eight."""
JOBS_LEAST = 100
RATIOS = (0.25, 1.0, 4.0, 16.0, 64.0, 256.0)
"""Prompt over answer (figure 14)."""
ORDERED = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`duration_s`: how long jobs arrive, at least JOBS_LEAST of them. `steps`: halvings of a search for a rate."""

    traces: Path | None
    seeds: tuple[int, ...]
    duration_s: float
    steps: int
    models: tuple[str, ...]
    only: tuple[str, ...]
    say: Callable[[str], None]

    def lengths(self, name: str) -> Lengths:
        return lengths(name, self.traces)

    def jobs(self, source: Lengths, rate: float, seed: int) -> Jobs:
        return jobs(source, rate=rate, duration_s=max(self.duration_s, JOBS_LEAST / rate), seed=seed)


Metric = Callable[[Served], float]


def mean_token_s(served: Served) -> float:
    return float(served.token_latency_s.mean())


def p95_token_s(served: Served) -> float:
    return float(np.percentile(served.token_latency_s, 95))


def highest_rate(plan: Plan, source: Lengths, on: Server, policy: str, seed: int, good: Callable[[Served], bool], start: float) -> float:
    """Jobs a second up to which a server is good: within `start` / 64 to 64 `start`, to one part in 2^steps of a doubling."""

    def holds(rate: float) -> bool:
        return good(serve(plan.jobs(source, rate, seed), on, policy))

    low = high = start
    if holds(start):
        while high < 64 * start and holds(high := 2 * low):
            low = high
    else:
        while low > start / 64 and not holds(low := high / 2):
            high = low
    for _ in range(plan.steps):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return float((low * high) ** 0.5)


def capacity(source: Lengths, on: Server) -> float:
    """Jobs a second with all seats taken."""
    context = int((source.prompts + source.outputs / 2).mean())
    step_s = on.timing().expected_step_s(on.seats, on.seats * context, ())
    return float(on.seats / step_s / source.outputs.mean())


def rates(plan: Plan) -> Iterator[Row]:
    """Figures 11 and 12: rates at SLO_S a token."""
    claims = {
        ("sharegpt", "fcfs", "mean"): (2.0, 4.0),
        ("alpaca", "fcfs", "mean"): (1.6, 2.0),
        ("sharegpt", "static", "mean"): (31.5, 74.9),
        ("alpaca", "static", "mean"): (9.5, 15.8),
        ("sharegpt", "fcfs", "p95"): (1.5, 2.8),
    }
    for model in plan.models:
        on = server(model, MODELS[model], seats=SEATS)
        for data, metric, measure in (
            ("sharegpt", "mean", mean_token_s),
            ("alpaca", "mean", mean_token_s),
            ("sharegpt", "p95", p95_token_s),
        ):
            source = plan.lengths(data)
            start = capacity(source, on)
            found: dict[str, tuple[float, ...]] = {}
            for policy in ("fastserve", "fcfs", "static") if metric == "mean" else ("fastserve", "fcfs"):
                found[policy] = tuple(
                    highest_rate(plan, source, on, policy, seed, lambda served, of=measure: of(served) <= SLO_S, start)  # type: ignore[misc]
                    for seed in plan.seeds
                )
                plan.say(f"{model} {data} {metric} {policy}: {np.mean(found[policy]):.2f} jobs/s at {SLO_S} s a token")
            for policy in found:
                if policy != "fastserve":
                    ours = tuple(ours / other for ours, other in zip(found["fastserve"], found[policy], strict=True))
                    name = f"rate_{metric}_over_{policy}_{data}_{model}"
                    note = f"fastserve {np.mean(found['fastserve']):.2f}, {policy} {np.mean(found[policy]):.2f} jobs/s"
                    yield Row(name=name, claim=claims[data, policy, metric], ours=ours, note=note)


def goodput(plan: Plan) -> Iterator[Row]:
    """Figure 13: jobs a second of which 95% have a first token within k times the time of their prefill alone, and further ones within k
    times a decode step alone."""
    on = server("OPT-13B", 1, seats=SEATS)
    source = plan.lengths("sharegpt")
    expected_s = on.timing().expected_step_s
    claims = {5: (1.77, 2.59), 10: (1.83, 3.01), 20: (2.05, 3.15)}
    for times, (fcfs, fastserve) in claims.items():

        def good(served: Served, times: float = times) -> bool:
            jobs = served.jobs
            prefills_s = np.array([expected_s(0, 0, ((0, int(tokens)),)) for tokens in jobs.prompts])
            decodes_s = (served.end_s - served.first_s) / np.maximum(jobs.outputs - 1, 1)
            kept = (served.first_s - jobs.arrived_s <= times * prefills_s) & (decodes_s <= times * expected_s(1, 100, ()))
            return bool(kept.mean() >= 0.95)

        found = {
            policy: tuple(highest_rate(plan, source, on, policy, seed, good, capacity(source, on)) for seed in plan.seeds)
            for policy in ("fcfs", "fastserve")
        }
        plan.say(f"goodput at {times} x SLO: {found}")
        yield Row(name=f"goodput_{times}x_fcfs", claim=(fcfs, fcfs), ours=found["fcfs"], note="jobs/s")
        yield Row(name=f"goodput_{times}x_fastserve", claim=(fastserve, fastserve), ours=found["fastserve"], note="jobs/s")
        ours = tuple(one / other for one, other in zip(found["fastserve"], found["fcfs"], strict=True))
        yield Row(name=f"goodput_{times}x_over_fcfs", claim=(1.46, 1.64), ours=ours)


def skip_join(plan: Plan) -> Iterator[Row]:
    """Figure 14: mean latency of a token over that of FastServe, at the worst ratio of prompts to answers ("up to"). Both are scaled: their
    mean length in all is kept, and the server has one and a half times the jobs that it can do."""
    on = server("OPT-13B", 1, seats=SEATS)
    source = plan.lengths("sharegpt")
    whole = source.prompts.mean() + source.outputs.mean()
    policies = {"fcfs": 8.9, "mlfq-naive": 1.87, "fixed-priority": 13.9}
    worst = {policy: [0.0] * len(plan.seeds) for policy in policies}
    where = dict.fromkeys(policies, 0.0)
    for ratio in RATIOS:
        shaped = replace(
            source,
            prompts=_scaled(source.prompts, whole * ratio / (1.0 + ratio)),
            outputs=_scaled(source.outputs, whole / (1.0 + ratio)),
        )
        expected_s = on.timing().expected_step_s
        prefill_s = expected_s(1, 0, ((0, int(shaped.prompts.mean())),)) - expected_s(1, 0, ())
        rate = 1.5 / (1.0 / capacity(shaped, on) + prefill_s)
        for position, seed in enumerate(plan.seeds):
            arriving = plan.jobs(shaped, rate, seed)
            ours = mean_token_s(serve(arriving, on, "fastserve"))
            for policy in policies:
                times = mean_token_s(serve(arriving, on, policy)) / ours
                if times > worst[policy][position]:
                    worst[policy][position], where[policy] = times, ratio
        plan.say(f"prompt over answer {ratio:g} at {rate:.2f} jobs/s: {worst}")
    for policy, claim in policies.items():
        note = f"largest at prompt over answer {where[policy]:g}"
        yield Row(name=f"skip_join_over_{policy}", claim=(claim, claim), ours=tuple(worst[policy]), note=note)


def _scaled(tokens: NDArray[np.int64], mean: float) -> NDArray[np.int64]:
    scaled: NDArray[np.int64] = np.maximum(1, np.rint(tokens * mean / tokens.mean()).astype(np.int64))
    return scaled


def kv_rules(plan: Plan) -> Iterator[Row]:
    """Figure 15: OPT-13B, latency of a token over that of proactive copies, at the worst of three rates ("up to")."""
    on = server("OPT-13B", 1, seats=SEATS)
    source = plan.lengths("sharegpt")
    worst: dict[str, list[float]] = {"reactive": [], "recompute": [], "defer": []}
    shares: list[float] = []
    for seed in plan.seeds:
        times: dict[str, float] = dict.fromkeys(worst, 0.0)
        share = 0.0
        for load in (1.0, 1.5, 2.0):
            arriving = plan.jobs(source, load * capacity(source, on), seed)
            ours = serve(arriving, on, "fastserve")
            share = max(share, ours.swap_share)
            for rule in worst:
                times[rule] = max(times[rule], mean_token_s(serve(arriving, on, "fastserve", {"kv": rule})) / mean_token_s(ours))
        plan.say(f"seed {seed}: over proactive {times}, swaps {share:.4f} of latency")
        shares.append(share)
        for rule in worst:
            worst[rule].append(times[rule])
    yield Row(name="proactive_over_reactive", claim=(1.7, 1.7), ours=tuple(worst["reactive"]))
    yield Row(name="proactive_over_recompute", claim=(2.7, 2.7), ours=tuple(worst["recompute"]))
    yield Row(name="proactive_over_defer", claim=(1.0, None), ours=tuple(worst["defer"]), note="the paper gives no figure")
    yield Row(name="swap_share", claim=(None, 0.05), ours=tuple(shares))


def kv_peak(plan: Plan) -> Iterator[Row]:
    """Figure 8: OPT-2.7B, gamma arrivals of rate 64 and CV 4, at most 20 output tokens, five seconds."""
    source = plan.lengths("sharegpt")
    source = replace(source, outputs=np.minimum(source.outputs, 20))
    on = server("OPT-2.7B", 1, seats=SEATS)
    found = []
    for seed in plan.seeds:
        arriving = jobs(source, rate=64.0, duration_s=5.0, seed=seed, cv=4.0)
        found.append(serve(arriving, on, "fastserve").kv_peak_tokens / serve(arriving, on, "fcfs").kv_peak_tokens)
    yield Row(name="kv_peak_over_fcfs", claim=(None, 7.0), ours=tuple(found), note="up to 7 in the paper")


def order_ms(plan: Plan) -> Iterator[Row]:
    """Milliseconds of processor time to order ORDERED waiting runs, of which one is new: columns, order, pause."""
    profile = server("OPT-13B", 1, seats=SEATS).profile
    for name, kind in ENGINE_POLICIES.items():
        policy = kind()
        SimulatedBatch(
            step_s=lambda decoding, context_tokens, prefills: 0.03,
            kv_capacity_tokens=profile.kv_capacity_tokens,
            batch_max=SEATS,
            prefill_chunk_tokens=2048,
            policy=policy,
        )
        runs = [
            SequenceView(run_id=str(n), arrival=n, deadline_s=n * 7919 % 9973, priority=0, prompt_tokens=n % 997 + 1, produced_tokens=0)
            for n in range(ORDERED + 20)
        ]
        took_ms: list[float] = []
        for turn in range(20):
            shown = Sequences(runs[turn : ORDERED + turn])
            began_s = time.process_time()
            policy.order(0.01 * turn, shown, Sequences(()))
            policy.pause(0.01 * turn, shown, Sequences(()))
            took_ms.append(1e3 * (time.process_time() - began_s))
        yield Row(name=f"order_10k_ms_{name}", claim=(None, 2.0), ours=(float(np.median(took_ms[3:])),), note="ours, not the paper's")


PARTS: Mapping[str, Callable[[Plan], Iterator[Row]]] = {
    "order": order_ms,
    "kv_peak": kv_peak,
    "goodput": goodput,
    "skip_join": skip_join,
    "kv_rules": kv_rules,
    "rates": rates,
}
