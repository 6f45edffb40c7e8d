"""The evaluation of LARRY and SAL (Kossmann et al., "Is the GPU half-empty or half-full?", 2024, sections 6 and 7) on QLM's engine.

Lengths are those of the Azure conversation trace. The paper's arrivals are of Azure Functions, a trace that is not here; ours are bursts
whose counts vary as those of the conversation trace (`replicas.GAMMA_CV`), at a share of the rate that the server can sustain. The paper's
ratios are lost in its text, so a claim is an order of techniques. Llumnix is left out, as in the paper: it moves KV between servers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from scipy import stats

from benchmarks.evaluate.replicas import Balancer, Requests, bursty_requests, serve
from qlm_agent.engines.policies.arrival import FirstComeFirstServed
from qlm_agent.engines.policies.memory import Larry, NoPreempt
from qlm_agent.engines.policies.port import EnginePolicy, Sequences, SequenceView
from qlm_agent.engines.policies.remaining import LearningToRank, Trail, TrailPlus
from qlm_core import balancing
from qlm_core.balancing import Servers
from qlm_core.hardware_prior import hardware_prior
from qlm_core.model import ModelFacts
from qlm_core.profile import HardwareProfile
from qlm_load.workload.trace import read_trace

ENGINES: Mapping[str, Callable[[], EnginePolicy]] = {
    "larry": Larry,
    "fcfs": FirstComeFirstServed,
    "no-preempt": NoPreempt,
    "trail": Trail,
    "trail+": TrailPlus,
    "ltr": LearningToRank,
}
BALANCED_ENGINES = ("larry", "fcfs", "trail+")
"""Engine policies behind balancers: No-Preempt is left out there, as in section 7."""
WEIGHTS = (0.1, 1.0, 10.0, 100.0, 1_000.0, 10_000.0)
"""Weights of LARRY that are compared (figure 9)."""
SLOWED = (
    "decode_a_ms",
    "decode_b_ms_per_seq",
    "decode_c_ms_per_context_token",
    "prefill_base_ms",
    "prefill_ms_per_token",
    "prefill_ms_per_token_squared",
)
SERVERS = (4, 8)
LOAD = 0.95
"""Arrivals as a share of what the server sustains: neither under- nor over-provisioned (section 5)."""
CAPACITY_REQUESTS = 1_500
"""Requests that arrive at once to measure what a server sustains."""

MEASURED_SHARE = 1 / 1.142
"""Measured times over derived ones of Llama-3-8B on an A100-40GB: vLLM in LLM-Inference-Bench, whole batches, 19 points that fit in KV,
each from 0.85 to 0.91."""
LLAMA_70B_FP8 = ModelFacts(parameters_billion=70.55 / 2, layers=80, hidden_size=8192, kv_heads=8, head_size=128)
"""Llama-3-70B with weights of 8 bits and KV of 16: half the bytes and half the arithmetic time, as an H100 is twice as fast with 8 bits."""

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One claim. `ours`: the mean ratio over seeds (or the figure) with its 95% interval; `held`: whether it is as claimed."""

    claim: str
    paper: str
    ours: float
    low: float
    high: float
    held: bool

    @property
    def as_json(self) -> dict[str, object]:
        return {
            "claim": self.claim,
            "paper": self.paper,
            "ours": round(self.ours, 4),
            "interval": [round(self.low, 4), round(self.high, 4)],
            "held": self.held,
        }


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """Runs of one model on one kind of server. `lengths`: prompt and answer tokens; `requests_each`: of each server in a run, and of one
    alone as many as of four; `runs`: figures by name of the run, one for each seed."""

    profile: HardwareProfile
    lengths: Sequence[tuple[int, int]]
    seeds: Sequence[int]
    requests_each: int
    load: float = LOAD
    say: Callable[[str], None] = lambda _: None
    runs: dict[str, list[Figures]] = field(default_factory=dict)
    capacity_per_s: float = 0.0

    def measure(self) -> list[Row]:
        """All runs, then the claims."""
        self.capacity_per_s = sustained_per_s(self.lengths, self.profile)
        self.say(f"{self.profile.gpu} x{self.profile.n_gpu} {self.profile.model}: {self.capacity_per_s:.2f} requests/s")
        for engine, make in ENGINES.items():
            self._run(f"1 {engine}", 1, make, "round_robin")
        for weight in WEIGHTS:
            self._run(f"1 larry {weight:g}", 1, partial(Larry, weight=weight), "round_robin")
        for servers in SERVERS:
            for engine in BALANCED_ENGINES:
                for balancer in Balancer.NAMES:
                    self._run(f"{servers} {balancer} {engine}", servers, ENGINES[engine], balancer)
        return self.rows()

    def _run(self, name: str, servers: int, make: Callable[[], EnginePolicy], balancer: str) -> None:
        began_s = time.monotonic()
        found: list[Figures] = []
        for seed in self.seeds:
            count = self.requests_each * max(servers, SERVERS[0])
            requests = bursty_requests(self.lengths, count, self.load * servers * self.capacity_per_s, seed)
            outcome = serve(requests, self.profile, servers=servers, policy=make, balancer=balancer, seed=seed)
            found.append(outcome.figures())
        self.runs[name] = found
        self.say(f"{name}: first token p50 {_mean(found, 'first_s_p50'):.2f} s ({time.monotonic() - began_s:.0f} s)")

    # Claims -----------------------------------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """The claims of sections 6 and 7."""
        others = [f"1 {engine}" for engine in ENGINES if engine != "larry"]
        rows = [
            self._least(f"LARRY: least {text}", key, "1 larry", others)
            for key, text in (("first_s_p50", "p50 time to first token"), ("first_ms_per_token_p50", "p50 of it by input"))
        ]
        chat = [f"1 {engine}" for engine in ENGINES if engine not in ("no-preempt", "trail")]
        rows.append(self._least("No-Preempt: worst p50 time to first token on chat", "first_s_p50", "1 no-preempt", chat, least=False))
        for servers in SERVERS:
            rows += self._balanced(servers)
        preempted = max(figures["preempted"] for name, found in self.runs.items() for figures in found if "trail" not in name.split())
        rows.append(
            Row(claim="Preemptions of all runs but TRAIL's", paper="< 0.1%", ours=preempted, low=0.0, high=preempted, held=preempted < 1e-3)
        )
        return [*rows, *self._weights()]

    def _balanced(self, servers: int) -> list[Row]:
        pairs = [f"{servers} {balancer} {engine}" for balancer in Balancer.NAMES for engine in BALANCED_ENGINES]
        best = f"{servers} sal larry"
        others = [pair for pair in pairs if pair != best]
        named = {"total_s_p50": "p50 total time", "total_s_p95": "p95 total time", "first_s_p50": "p50 time to first token"}
        rows = [self._least(f"SAL + LARRY, {servers} servers: least {text}", key, best, others) for key, text in named.items()]
        for key in ("first_s_p50", "total_s_p50"):
            p2c, chance = (self.runs[f"{servers} {balancer} larry"] for balancer in ("p2c", "random"))
            ratio = _ratio(p2c, chance, key)
            text = f"P2C like random with LARRY, {servers} servers: {named[key]}"
            rows.append(Row(claim=text, paper="similar", ours=ratio[0], low=ratio[1], high=ratio[2], held=0.9 <= ratio[0] <= 1.1))
        for balancer in Balancer.NAMES:
            rivals = [f"{servers} {balancer} {engine}" for engine in BALANCED_ENGINES if engine != "larry"]
            text = f"{balancer}, {servers} servers: best with LARRY, p50 time to first token"
            rows.append(self._least(text, "first_s_p50", f"{servers} {balancer} larry", rivals))
        return rows

    def _weights(self) -> list[Row]:
        """Figure 9: low weights have the least p50, higher ones the least p99; beyond 1,000 it is first come, first served."""
        names = [f"1 larry {weight:g}" for weight in WEIGHTS]
        low, high, arrival = self.runs["1 larry 10"], self.runs["1 larry 1000"], self.runs["1 fcfs"]
        found = [
            ("Weight 10 against 1,000: p50 time to first token", "less", _ratio(low, high, "first_s_p50"), 1.0),
            ("Weight 1,000 against 10: p99 time to first token", "less", _ratio(high, low, "first_s_p99"), 1.0),
        ]
        rows = [Row(claim=text, paper=paper, ours=mean, low=a, high=b, held=mean < most) for text, paper, (mean, a, b), most in found]
        mean, a, b = _ratio(self.runs[names[-1]], arrival, "first_s_p50")
        rows.append(
            Row(claim="Weight 10,000 over FCFS: p50 time to first token", paper="1", ours=mean, low=a, high=b, held=0.9 <= mean <= 1.1)
        )
        return rows

    def _least(self, claim: str, key: str, name: str, others: Sequence[str], *, least: bool = True) -> Row:
        """Compares a run with the next best one of others by the mean; the ratio is that of the two, by seed."""
        pick = min if least else max
        next_best = pick(others, key=lambda other: _mean(self.runs[other], key))
        mean, low, high = _ratio(self.runs[name], self.runs[next_best], key)
        text = f"< 1 x the next best ({next_best})" if least else f"> 1 x the next worst ({next_best})"
        return Row(claim=claim, paper=text, ours=mean, low=low, high=high, held=mean < 1.0 if least else mean > 1.0)


def _mean(found: Sequence[Figures], key: str) -> float:
    return float(np.mean([figures[key] for figures in found]))


def _ratio(found: Sequence[Figures], others: Sequence[Figures], key: str) -> tuple[float, float, float]:
    """Mean of the ratios by seed, and its 95% interval (Student's t)."""
    ratios = np.array([mine[key] / other[key] for mine, other in zip(found, others, strict=True)])
    mean = float(ratios.mean())
    if len(ratios) == 1:
        return mean, mean, mean
    half = float(stats.t.ppf(0.975, len(ratios) - 1) * ratios.std(ddof=1) / np.sqrt(len(ratios)))
    return mean, mean - half, mean + half


def sustained_per_s(lengths: Sequence[tuple[int, int]], profile: HardwareProfile) -> float:
    """Requests a second that one server ends while all of CAPACITY_REQUESTS wait, first come first served, without start and end."""
    rows = np.array([lengths[at % len(lengths)] for at in range(CAPACITY_REQUESTS)], dtype=np.int64)
    zeros = np.zeros(CAPACITY_REQUESTS)
    requests = Requests(arrivals_s=zeros, prompts=rows[:, 0], outputs=rows[:, 1], errors=zeros)
    ends_s = np.sort(serve(requests, profile, servers=1, policy=FirstComeFirstServed, seed=0).total_s)
    tenth = CAPACITY_REQUESTS // 10
    return 8 * tenth / float(ends_s[9 * tenth] - ends_s[tenth])


def paper_servers() -> dict[str, HardwareProfile]:
    """The servers of section 5, derived (`qlm_core.hardware_prior`): nobody measured them in the shipped table."""
    small = hardware_prior("A100-40GB", 1, "Llama-3-8B")
    large = hardware_prior("H100-80GB", 2, "Llama-3-70B-FP8", LLAMA_70B_FP8)
    assert small is not None, "A100-40GB and Llama-3-8B are known"
    assert large is not None, "it fits"
    times = {name: MEASURED_SHARE * getattr(small, name) for name in SLOWED}
    return {"llama-3-8b": replace(small, **times), "llama-3-70b-fp8": large}


# Costs ----------------------------------------------------------------------------------------------------------------


def order_10k_ms(repeats: int = 101) -> float:
    """Milliseconds, in the median, in which LARRY orders 10,000 waiting runs."""
    draws = np.random.default_rng(1)
    prompts = draws.integers(1, 4_096, 10_000).tolist()
    waiting = [
        SequenceView(run_id=str(at), arrival=at, deadline_s=0.0, priority=0, prompt_tokens=prompt, produced_tokens=0, arrived_s=at / 100)
        for at, prompt in enumerate(prompts)
    ]
    larry = Larry()
    return 1e3 * _median_s(lambda: larry.order(200.0, Sequences(waiting), Sequences([])), repeats)


def sal_100_us(repeats: int = 2_001) -> float:
    """Microseconds, in the median, in which SAL chooses one of 100 servers and corrects its columns."""
    draws = np.random.default_rng(1)
    columns = {name: draws.uniform(0.0, 1e5, 100) for name in ("queued", "kv_used")}
    rates = {name: np.full(100, 1e4) for name in ("token_rate", "freeing_rate")}
    servers = Servers(**columns, **rates, kv_capacity=np.full(100, 1.5e5), lead_s=np.zeros(100))
    return 1e6 * _median_s(lambda: servers.add(balancing.server_aware(servers, 1_000.0), 1_000.0), repeats)


def _median_s(call: Callable[[], object], repeats: int) -> float:
    def once_s() -> float:
        began_s = time.perf_counter()
        call()
        return time.perf_counter() - began_s

    return median(once_s() for _ in range(repeats))


# The document ---------------------------------------------------------------------------------------------------------

TRACE = "azure_conv_2023.csv.gz"
QUICK = {"requests_each": 60, "seeds": 2}
FULL = {"requests_each": 500, "seeds": 5}


def evaluate(traces: Path, *, seed: int, quick: bool, say: Callable[[str], None]) -> dict[str, object]:
    """All claims on both servers of the paper, and the costs of a decision. `traces`: the folder of the Azure conversation trace; raises
    TraceError without it. `quick`: few requests, which shows only that all parts run."""
    plan = QUICK if quick else FULL
    lengths = [(row.input_tokens, row.output_tokens) for row in read_trace(traces / TRACE).rows]
    servers: dict[str, object] = {}
    for name, profile in paper_servers().items():
        seeds = range(seed, seed + plan["seeds"])
        evaluation = Evaluation(profile=profile, lengths=lengths, seeds=seeds, requests_each=plan["requests_each"], say=say)
        rows = evaluation.measure()
        servers[name] = {
            "sustained_per_s": round(evaluation.capacity_per_s, 3),
            "rows": [row.as_json for row in rows],
            "runs": {run: [dict(figures) for figures in found] for run, found in evaluation.runs.items()},
        }
    return {
        "paper": "larry",
        "seeds": list(range(seed, seed + plan["seeds"])),
        "requests_each": plan["requests_each"],
        "load": LOAD,
        "order_10k_ms": round(order_10k_ms(), 3),
        "sal_100_us": round(sal_100_us(), 2),
        "servers": servers,
    }
