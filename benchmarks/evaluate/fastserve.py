"""The claims of FastServe (Wu et al., arXiv 2305.05920v3), sections 4.2 and 6, on the simulated engine.

One server of a model, prefills whole, jobs served to their end. Seats are not in the paper: with 16, the goodput of first come first
served is about the paper's (1.77 to 2.05 jobs a second). Nor is how long jobs arrive, which matters: at the rates that it reports FastServe
is beyond what the server can do, and what waits grows with time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.evaluate.rows import Row
from benchmarks.evaluate.server import Served, Server, serve, server
from benchmarks.evaluate.workloads import TOKENS_MAX, Jobs, Lengths, jobs, lengths
from qlm_agent.engines.policies.port import Sequences, SequenceView
from qlm_agent.engines.policies.registry import ENGINE_POLICIES
from qlm_agent.engines.simulated.batching.batch import SimulatedBatch

SEATS = 16
SLO_S = 0.3
"""A token (section 6.1)."""
MODELS = {"OPT-13B": (1, 1), "OPT-66B": (4, 1), "OPT-175B": (16, 2)}
"""GPUs and pipeline stages of each (table 2)."""
JOBS_LEAST = 100
RATIOS = (0.25, 1.0, 4.0, 16.0, 64.0, 256.0)
"""Prompt over answer (figure 14)."""
SPREAD_RATIOS = (0.25, 1.0)
"""Those of RATIOS where answers are spread wider."""
STEPS = 4
"""Rates in a doubling."""
REACH = 7
"""Doublings of the steps that a search goes from its base: 63 steps."""
RATE_CLAIMS: Mapping[str, Mapping[tuple[str, str], tuple[float, float]]] = {
    "sharegpt": {("mean", "fcfs"): (2.0, 4.0), ("p95", "fcfs"): (1.5, 2.8), ("mean", "static"): (31.5, 74.9)},
    "alpaca": {("mean", "fcfs"): (1.6, 2.0), ("mean", "static"): (9.5, 15.8)},
}
GOODPUT_CLAIMS = {5: (1.77, 2.59), 10: (1.83, 3.01), 20: (2.05, 3.15)}
"""Goodput over first come first served and FastServe, by multiple of the SLO."""
SPREADS = (2.0, 4.0)
"""Coefficients of variation."""
ORDERED = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`duration_s`: how long jobs arrive, at least JOBS_LEAST of them. `weights`: folder of a real model."""

    traces: Path | None
    seeds: tuple[int, ...]
    duration_s: float
    models: tuple[str, ...]
    only: tuple[str, ...]
    say: Callable[[str], None]
    weights: Path | None = None

    def lengths(self, name: str) -> Lengths:
        return lengths(name, self.traces)

    def jobs(self, source: Lengths, rate: float, seed: int) -> Jobs:
        return jobs(source, rate=rate, duration_s=max(self.duration_s, JOBS_LEAST / rate), seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """At one rate. `late`: shares of jobs outside of so many times the SLO."""

    mean_s: float
    p95_s: float
    late: Mapping[int, float]


class Curve:
    """The results of one policy by rate, with one seed. Rates are `base` times steps of 2^(1/STEPS); each is served once."""

    def __init__(self, plan: Plan, source: Lengths, on: Server, policy: str, seed: int) -> None:
        self._plan, self._source, self._on, self._policy, self._seed = plan, source, on, policy, seed
        self._base = capacity(source, on)
        self._points: dict[int, Point] = {}

    def rate(self, figure: Callable[[Point], float], limit: float) -> float:
        """Jobs a second at which a growing figure crosses its limit, between two steps; the end of the range where it does not."""
        low = high = 0
        grows = figure(self._at(0)) <= limit
        for step in [2**power - 1 for power in range(1, REACH)]:
            low, high = (high, step) if grows else (-step, low)
            if (figure(self._at(high if grows else low)) <= limit) is not grows:
                break
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if figure(self._at(middle)) <= limit else (low, middle)
        below, above = figure(self._at(low)), figure(self._at(high))
        share = min(1.0, max(0.0, (limit - below) / (above - below))) if above > below else 0.0
        return float(self._base * 2.0 ** ((low + share) / STEPS))

    def _at(self, step: int) -> Point:
        if step not in self._points:
            arriving = self._plan.jobs(self._source, self._base * 2.0 ** (step / STEPS), self._seed)
            self._points[step] = self._point(serve(arriving, self._on, self._policy))
        return self._points[step]

    def _point(self, served: Served) -> Point:
        expected_s, arriving = self._on.timing().expected_step_s, served.jobs
        prefills_s = np.array([expected_s(0, 0, ((0, tokens),)) for tokens in arriving.prompts.tolist()])
        decodes_s = (served.end_s - served.first_s) / np.maximum(arriving.outputs - 1, 1)
        times = np.maximum((served.first_s - arriving.arrived_s) / prefills_s, decodes_s / expected_s(1, 100, ()))
        return Point(
            mean_s=mean_token_s(served),
            p95_s=float(np.percentile(served.token_latency_s, 95)),
            late={limit: float((times > limit).mean()) for limit in GOODPUT_CLAIMS},
        )


def mean_token_s(served: Served) -> float:
    return float(served.token_latency_s.mean())


def capacity(source: Lengths, on: Server) -> float:
    """Jobs a second with all seats taken."""
    context = int((source.prompts + source.outputs / 2).mean())
    step_s = on.timing().expected_step_s(on.seats, on.seats * context, ())
    return float(on.seats / step_s / source.outputs.mean())


def rates(data: str, plan: Plan) -> Iterator[Row]:
    """Figures 11 and 12: rates at SLO_S a token; figure 13: jobs a second of which 95% have a first token within k times the time of their
    prefill alone, and further ones within k times a decode step alone."""
    for model in plan.models:
        n_gpu, stages = MODELS[model]
        on, source = server(model, n_gpu, seats=SEATS, stages=stages), plan.lengths(data)
        curves = {policy: [Curve(plan, source, on, policy, seed) for seed in plan.seeds] for policy in ("fastserve", "fcfs", "static")}
        for (of, other), claim in RATE_CLAIMS[data].items():
            found = [_rates(curves[policy], attrgetter(f"{of}_s"), SLO_S) for policy in ("fastserve", other)]
            plan.say(f"{model} {data} {of} at {SLO_S} s a token, fastserve and {other}: {found} jobs/s")
            yield _over(f"rate_{of}_over_{other}_{data}_{model}", claim, *found)
        if (model, data) == ("OPT-13B", "sharegpt"):
            for times, (fcfs_claim, fastserve_claim) in GOODPUT_CLAIMS.items():
                fcfs, fastserve = (_rates(curves[policy], lambda point, k=times: point.late[k], 0.05) for policy in ("fcfs", "fastserve"))  # type: ignore[misc]
                plan.say(f"goodput at {times} x SLO: fcfs {fcfs}, fastserve {fastserve} jobs/s")
                yield Row(name=f"goodput_{times}x_fcfs", claim=(fcfs_claim, fcfs_claim), ours=fcfs, note="jobs/s")
                yield Row(name=f"goodput_{times}x_fastserve", claim=(fastserve_claim, fastserve_claim), ours=fastserve, note="jobs/s")
                yield _over(f"goodput_{times}x_over_fcfs", (1.46, 1.64), fastserve, fcfs)


def spread(plan: Plan) -> Iterator[Row]:
    """The same of OPT-13B, and figure 14, with answers spread wider than the trace's: lognormal, of its mean, before they are cut to its
    longest."""
    on, source = server("OPT-13B", 1, seats=SEATS), plan.lengths("sharegpt")
    mean = float(source.outputs.mean())
    for cv in SPREADS:
        variance = np.log1p(cv**2)
        dice = np.random.Generator(np.random.PCG64(1))
        outputs = np.exp(np.log(mean) - variance / 2 + variance**0.5 * dice.standard_normal(len(source.outputs)))
        wider = replace(source, outputs=np.clip(np.rint(outputs), 1, TOKENS_MAX).astype(np.int64))
        cut_cv = wider.outputs.std() / wider.outputs.mean()
        found = {
            policy: _rates([Curve(plan, wider, on, policy, seed) for seed in plan.seeds], attrgetter("mean_s"), SLO_S)
            for policy in ("fcfs", "static", "fastserve")
        }
        plan.say(f"answers with a coefficient of variation of {cut_cv:.2f}: {found} jobs/s")
        for other in ("fcfs", "static"):
            row = _over(f"rate_mean_over_{other}_cv_{cv:g}", RATE_CLAIMS["sharegpt"]["mean", other], found["fastserve"], found[other])
            yield replace(row, note=f"{row.note}; variation {cut_cv:.2f}, the trace's {source.outputs.std() / mean:.2f}")
        yield from _skip_join(plan, wider, SPREAD_RATIOS, f"_cv_{cv:g}")


def _rates(curves: Sequence[Curve], figure: Callable[[Point], float], limit: float) -> tuple[float, ...]:
    return tuple(curve.rate(figure, limit) for curve in curves)


def _over(name: str, claim: tuple[float, float], ours: tuple[float, ...], others: tuple[float, ...]) -> Row:
    ratios = tuple(one / other for one, other in zip(ours, others, strict=True))
    return Row(name=name, claim=claim, ours=ratios, note=f"{np.mean(ours):.2f} against {np.mean(others):.2f} jobs/s")


def skip_join(plan: Plan) -> Iterator[Row]:
    """Figure 14: mean latency of a token over that of FastServe, at the worst ratio of prompts to answers ("up to"). Both are scaled: their
    mean length in all is kept, and the server has one and a half times the jobs that it can do; the paper does not state its load."""
    yield from _skip_join(plan, plan.lengths("sharegpt"), RATIOS, "")


def _skip_join(plan: Plan, source: Lengths, ratios: Sequence[float], suffix: str) -> Iterator[Row]:
    on = server("OPT-13B", 1, seats=SEATS)
    whole = source.prompts.mean() + source.outputs.mean()
    policies = {"fcfs": 8.9, "mlfq-naive": 1.87, "fixed-priority": 13.9}
    worst = {policy: [0.0] * len(plan.seeds) for policy in policies}
    where = dict.fromkeys(policies, 0.0)
    for ratio in ratios:
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
        yield Row(name=f"skip_join_over_{policy}{suffix}", claim=(claim, claim), ours=tuple(worst[policy]), note=note)


def _scaled(tokens: NDArray[np.int64], mean: float) -> NDArray[np.int64]:
    return np.asarray(np.maximum(np.rint(tokens * mean / tokens.mean()), 1.0), np.int64)


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
    "skip_join": skip_join,
    "kv_rules": kv_rules,
    **{f"rates_{data}": partial(rates, data) for data in RATE_CLAIMS},
    "spread": spread,
}
