"""The claims of LARRY and SAL (Kossmann et al., "Is the GPU half-empty or half-full?", 2024, sections 6 and 7) on the simulated engine.

Lengths are those of the Azure conversation trace. The paper's arrivals are of Azure Functions, a trace that is not here; ours are bursts
whose counts vary as those of the conversation trace (`replicas.GAMMA_CV`), at a share of the rate that the server can sustain. The paper's
ratios are lost in its text, so most claims are an order of techniques: at most 1 times the next best. Llumnix is left out, as in the paper:
it moves KV between servers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from statistics import median

import numpy as np

from benchmarks.evaluate.fastserve import Plan
from benchmarks.evaluate.replicas import Balancer, bursty_requests, serve
from benchmarks.evaluate.rows import Row
from benchmarks.evaluate.workloads import Jobs
from qlm_agent.engines.policies.memory import Larry
from qlm_agent.engines.policies.port import EnginePolicy, Sequences, SequenceView
from qlm_agent.engines.policies.registry import ENGINE_POLICIES
from qlm_core.operations import balancing
from qlm_core.operations.balancing import Servers
from qlm_core.profiles.hardware_prior import hardware_prior
from qlm_core.profiles.profile import HardwareProfile
from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.model import ModelFacts
from qlm_load.workload.trace import read_trace

TRACE = "azure_conv_2023.csv.gz"
ENGINES = ("larry", "fcfs", "no-preempt", "trail", "trail+", "ltr")
BALANCED_ENGINES = ("larry", "fcfs", "trail+")
"""Engine policies behind balancers: No-Preempt is left out there, as in section 7."""
PAPER_BALANCERS = ("p2c", "random")
"""Balancers beside SAL in section 7; ours has more."""
WEIGHTS = (0.1, 1.0, 10.0, 100.0, 1_000.0, 10_000.0)
"""Weights of LARRY that are compared (figure 9)."""
SERVERS = (4, 8)
LOAD = 0.95
"""Arrivals as a share of what the servers sustain: neither under- nor over-provisioned (section 5)."""
ALONE = 4
"""A server alone is measured for so many times as long."""
CAPACITY_REQUESTS = 1_500
"""Requests that arrive at once to measure what a server sustains."""
MEASURED_SHARE = 1 / 1.142
"""Measured times over derived ones of Llama-3-8B on an A100-40GB: vLLM in LLM-Inference-Bench, whole batches, 19 points that fit in KV,
each from 0.85 to 0.91."""
SLOWED = (
    "decode_a_ms",
    "decode_b_ms_per_seq",
    "decode_c_ms_per_context_token",
    "prefill_base_ms",
    "prefill_ms_per_token",
    "prefill_ms_per_token_squared",
)
LLAMA_70B_FP8 = ModelFacts(parameters_billion=70.55 / 2, layers=80, hidden_size=8192, kv_heads=8, head_size=128)
"""Llama-3-70B with weights of 8 bits and KV of 16: half the bytes and half the arithmetic time, as an H100 is twice as fast with 8 bits."""
BEST = (None, 1.0)
"""Claim of a ratio to the next best technique."""

Figures = Mapping[str, float]
Policy = Callable[[], EnginePolicy]


def paper_servers() -> dict[str, HardwareProfile]:
    """The servers of section 5, derived (`qlm_core.profiles.hardware_prior`): the shipped table has none of them."""
    small = hardware_prior("A100-40GB", 1, "Llama-3-8B")
    large = hardware_prior("H100-80GB", 2, "Llama-3-70B-FP8", LLAMA_70B_FP8)
    assert small is not None, "A100-40GB and Llama-3-8B are known"
    assert large is not None, "it fits"
    times = {name: MEASURED_SHARE * getattr(small, name) for name in SLOWED}
    return {"8b": replace(small, **times), "70b-fp8": large}


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """Runs of one model on one kind of server. `lengths`: prompt and answer tokens; `duration_s`: of the arrivals; `runs`: figures by name
    of the run, one for each seed."""

    name: str
    profile: HardwareProfile
    lengths: Sequence[tuple[int, int]]
    seeds: Sequence[int]
    duration_s: float
    say: Callable[[str], None] = lambda _: None
    runs: dict[str, list[Figures]] = field(default_factory=dict)
    capacity_per_s: float = 0.0

    def measure(self) -> list[Row]:
        """All runs, then the claims."""
        self.capacity_per_s = sustained_per_s(self.lengths, self.profile)
        self.say(f"{self.name}: a server sustains {self.capacity_per_s:.2f} requests/s")
        for engine in ENGINES:
            self._run(f"1 {engine}", 1, ENGINE_POLICIES[engine], "round_robin")
        for weight in WEIGHTS:
            self._run(f"1 larry {weight:g}", 1, partial(Larry, weight=weight), "round_robin")
        for servers in SERVERS:
            for engine in BALANCED_ENGINES:
                for balancer in Balancer.NAMES:
                    self._run(f"{servers} {balancer} {engine}", servers, ENGINE_POLICIES[engine], balancer)
        return self.rows()

    def _run(self, name: str, servers: int, policy: Policy, balancer: str) -> None:
        began_s = time.monotonic()
        rate_per_s = LOAD * servers * self.capacity_per_s
        count = max(2, round(rate_per_s * self.duration_s * (ALONE if servers == 1 else 1)))
        found: list[Figures] = []
        for seed in self.seeds:
            requests = bursty_requests(self.lengths, count, rate_per_s, seed)
            outcome = serve(requests, self.profile, servers=servers, policy=policy, balancer=balancer, seed=seed)
            found.append(outcome.figures())
        self.runs[name] = found
        self.say(f"{self.name} {name}: first token p50 {_mean(found, 'first_s_p50'):.2f} s ({time.monotonic() - began_s:.0f} s)")

    # Claims -----------------------------------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """The claims of sections 6 and 7."""
        others = [f"1 {engine}" for engine in ENGINES if engine != "larry"]
        return [
            self._best("LARRY: p50 first token", "first_s_p50", "1 larry", others),
            self._best("LARRY: p50 first token by input", "first_ms_per_token_p50", "1 larry", others),
            self._worst("no-preempt: p50 first token", "first_s_p50", "1 no-preempt", [name for name in others if name != "1 no-preempt"]),
            *(row for servers in SERVERS for row in self._balanced(servers)),
            self._row("preempted, most of all runs but TRAIL's", (None, 0.001), self._preempted()),
            *self._weights(),
        ]

    def _balanced(self, servers: int) -> list[Row]:
        """Combinations of balancer and engine policy (section 7)."""
        pairs = [f"{servers} {balancer} {engine}" for balancer in Balancer.NAMES for engine in BALANCED_ENGINES]
        best = f"{servers} sal larry"
        others = [pair for pair in pairs if pair != best]
        named = {"total_s_p50": "p50 total", "total_s_p95": "p95 total", "first_s_p50": "p50 first token"}
        papers = [pair for pair in pairs if pair.split()[1] in PAPER_BALANCERS]
        rows = [
            self._best(f"SAL + LARRY, {servers} servers, over P2C and random: {text}", key, best, papers) for key, text in named.items()
        ]
        rows += [self._best(f"SAL + LARRY, {servers} servers, over all: {text}", key, best, others) for key, text in named.items()]
        for key in ("first_s_p50", "total_s_p50"):
            ratios = self._ratios(f"{servers} p2c larry", f"{servers} random larry", key)
            rows.append(self._row(f"P2C over random with LARRY, {servers} servers: {named[key]}", (0.9, 1.1), ratios))
        for balancer in Balancer.NAMES:
            rivals = [f"{servers} {balancer} {engine}" for engine in BALANCED_ENGINES if engine != "larry"]
            rows.append(
                self._best(f"{balancer} + LARRY, {servers} servers: p50 first token", "first_s_p50", f"{servers} {balancer} larry", rivals)
            )
        return rows

    def _weights(self) -> list[Row]:
        """Figure 9: low weights have the least p50, higher ones the least p99; beyond 1,000 LARRY is first come, first served."""
        rows = [
            self._row("weight 10 over 1,000: p50 first token", BEST, self._ratios("1 larry 10", "1 larry 1000", "first_s_p50")),
            self._row("weight 1,000 over 10: p99 first token", BEST, self._ratios("1 larry 1000", "1 larry 10", "first_s_p99")),
        ]
        for weight in WEIGHTS:
            for level in ("p50", "p99"):
                claim = (0.9, 1.1) if weight > 1_000.0 else (None, None)
                ratios = self._ratios(f"1 larry {weight:g}", "1 fcfs", f"first_s_{level}")
                rows.append(self._row(f"weight {weight:g} over fcfs: {level} first token", claim, ratios))
        return rows

    def _best(self, name: str, key: str, run: str, others: Sequence[str]) -> Row:
        """Compares a run with the best of others by the mean; the ratio is that of the two, by seed."""
        rival = min(others, key=lambda other: _mean(self.runs[other], key))
        return self._row(name, BEST, self._ratios(run, rival, key), self._note(run, rival, key))

    def _worst(self, name: str, key: str, run: str, others: Sequence[str]) -> Row:
        """Compares a run with the worst of others."""
        rival = max(others, key=lambda other: _mean(self.runs[other], key))
        return self._row(name, (1.0, None), self._ratios(run, rival, key), self._note(run, rival, key))

    def _note(self, run: str, rival: str, key: str) -> str:
        return f"{_mean(self.runs[run], key):.3g}, {rival} {_mean(self.runs[rival], key):.3g}"

    def _row(self, name: str, claim: tuple[float | None, float | None], ours: Sequence[float], note: str = "") -> Row:
        return Row(name=f"{self.name} {name}", claim=claim, ours=tuple(ours), note=note)

    def _ratios(self, run: str, other: str, key: str) -> list[float]:
        return [mine[key] / its[key] for mine, its in zip(self.runs[run], self.runs[other], strict=True)]

    def _preempted(self) -> list[float]:
        """Preemptions by request, the most of all runs: by seed."""
        kept = [found for name, found in self.runs.items() if "trail" not in name.split()]
        return [max(found[at]["preempted"] for found in kept) for at in range(len(self.seeds))]


def _mean(found: Sequence[Figures], key: str) -> float:
    return float(np.mean([figures[key] for figures in found]))


def sustained_per_s(lengths: Sequence[tuple[int, int]], profile: HardwareProfile) -> float:
    """Requests a second that one server ends while all of CAPACITY_REQUESTS wait, first come first served, without start and end."""
    rows = np.array([lengths[at % len(lengths)] for at in range(CAPACITY_REQUESTS)], dtype=np.int64)
    zeros = np.zeros(CAPACITY_REQUESTS)
    requests = Jobs(arrived_s=zeros, prompts=rows[:, 0], outputs=rows[:, 1])
    ends_s = np.sort(serve(requests, profile, servers=1, policy=ENGINE_POLICIES["fcfs"], seed=0).end_s)
    tenth = CAPACITY_REQUESTS // 10
    return 8 * tenth / float(ends_s[9 * tenth] - ends_s[tenth])


def _servers(name: str, plan: Plan) -> list[Row]:
    if plan.traces is None:
        raise ConfigError(f"--paper larry needs --traces, a folder with {TRACE}")
    lengths = [(row.input_tokens, row.output_tokens) for row in read_trace(plan.traces / TRACE).rows]
    evaluation = Evaluation(
        name=name, profile=paper_servers()[name], lengths=lengths, seeds=plan.seeds, duration_s=plan.duration_s, say=plan.say
    )
    return evaluation.measure()


# Costs ----------------------------------------------------------------------------------------------------------------


def order_10k_ms(repeats: int = 101) -> float:
    """Milliseconds of processor time, in the median, in which LARRY orders 10,000 waiting runs that it knows."""
    draws = np.random.default_rng(1)
    prompts = draws.integers(1, 4_096, 10_000).tolist()
    waiting = [
        SequenceView(run_id=str(at), arrival=at, deadline_s=0.0, priority=0, prompt_tokens=prompt, produced_tokens=0, arrived_s=at / 100)
        for at, prompt in enumerate(prompts)
    ]
    larry = Larry()
    return 1e3 * _median_s(lambda: larry.order(200.0, Sequences(waiting), Sequences([])), repeats)


def sal_100_us(repeats: int = 2_001) -> float:
    """Microseconds of processor time, in the median, in which SAL chooses one of 100 servers and corrects its columns."""
    draws = np.random.default_rng(1)
    columns = {name: draws.uniform(0.0, 1e5, 100) for name in ("queued", "kv_used")}
    rates = {name: np.full(100, 1e4) for name in ("token_rate", "freeing_rate")}
    servers = Servers(**columns, **rates, kv_capacity=np.full(100, 1.5e5), lead_s=np.zeros(100))
    return 1e6 * _median_s(lambda: servers.add(balancing.server_aware(servers, 1_000.0), 1_000.0), repeats)


def _median_s(call: Callable[[], object], repeats: int) -> float:
    def once_s() -> float:
        began_s = time.process_time()
        call()
        return time.process_time() - began_s

    return median(once_s() for _ in range(repeats))


def costs(plan: Plan) -> list[Row]:
    """The cost of a decision on this machine."""
    return [
        Row(name="order_10k_ms", claim=(None, 2.0), ours=(order_10k_ms(),)),
        Row(name="sal_100_us", claim=(None, 50.0), ours=(sal_100_us(),)),
    ]


def _late(part: str, plan: Plan) -> list[Row]:
    """A part with a module and a function of its name, which loads all services."""
    return list(getattr(import_module(f"benchmarks.evaluate.{part}"), part)(plan))


PARTS: Mapping[str, Callable[[Plan], list[Row]]] = {
    "costs": costs,
    "8b": partial(_servers, "8b"),
    "70b-fp8": partial(_servers, "70b-fp8"),
    "together": partial(_late, "together"),
    "pausing": partial(_late, "pausing"),
}
