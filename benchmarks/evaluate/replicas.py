"""Replicas of one model behind a balancer, in virtual time: the simulated engine's batches, an engine policy in each, arrivals and lengths
(Kossmann et al., 2024, sections 5 to 7)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.evaluate.server import Replica, Served, Server, batch_on, serve_on
from benchmarks.evaluate.workloads import PREDICTOR_SIGMA, Jobs
from qlm_agent.engines.policies.port import EnginePolicy
from qlm_agent.engines.simulated.batching.sequences import Phase
from qlm_core.operations import balancing
from qlm_core.operations.balancing import Servers
from qlm_core.profiles.profile import HardwareProfile
from qlm_core.vocabulary.instance import BATCH_MAX_DEFAULT

CHUNK_TOKENS = 1_024
"""Token budget of a step (section 7)."""
POLL_S = 0.1
"""Period of the balancers' reports (section 4.2)."""
GAMMA_CV = 2.0
"""Variation of inter-arrival times. Its square is the variance of counts over their mean, 4: that of the Azure conversation trace in bins
of 10 s is 3.9."""


def bursty_requests(lengths: Sequence[tuple[int, int]], count: int, rate_per_s: float, seed: int, *, cv: float = GAMMA_CV) -> Jobs:
    """`count` consecutive rows of a trace's lengths from a random one on, with Gamma inter-arrivals."""
    random = np.random.default_rng(seed)
    first = int(random.integers(len(lengths)))
    rows = np.array([lengths[(first + at) % len(lengths)] for at in range(count)], dtype=np.int64)
    gaps_s = random.gamma(1.0 / cv**2, cv**2 / rate_per_s, count)
    return Jobs(arrived_s=np.cumsum(gaps_s), prompts=rows[:, 0], outputs=rows[:, 1], errors=random.normal(0.0, PREDICTOR_SIGMA, count))


class Replicas:
    """`count` servers with the same profile, and a noise of each. `policy` makes the engine policy of a server."""

    def __init__(self, profile: HardwareProfile, count: int, policy: Callable[[], EnginePolicy], seed: int) -> None:
        on = Server(profile=profile, seats=BATCH_MAX_DEFAULT, prefill_tokens=CHUNK_TOKENS, host_kv_gb=0.0)
        self._profile = profile
        self.servers = [Replica(batch_on(on, policy(), on.timing(seed, f"server-{number}").step_s)) for number in range(count)]

    def advance(self, until_s: float) -> None:
        for server in self.servers:
            server.advance(until_s)

    def loads(self) -> list[int]:
        """Requests on each server."""
        return [len(server.runs) for server in self.servers]

    def columns(self) -> Servers:
        """The servers as a report shows them."""
        rows = [self._row(server) for server in self.servers]
        queued, kv_used, token_rate, freeing_rate = np.array(rows, dtype=np.float64).T.copy()
        capacity = np.full(len(rows), float(self._profile.kv_capacity_tokens))
        return Servers(
            queued=queued,
            kv_used=kv_used,
            kv_capacity=capacity,
            token_rate=token_rate,
            freeing_rate=freeing_rate,
            lead_s=np.zeros(len(rows)),
        )

    def _row(self, server: Replica) -> tuple[float, float, float, float]:
        server.pending = [run for run in server.pending if run.first_token_s is None]
        queued = sum(run.prefill_left_tokens for run in server.pending)
        waiting = sum(run.prompt_tokens for run in server.pending if run.phase is Phase.WAITING)
        running, kv_used = server.batch.running, server.batch.kv_used_tokens
        step_s = self._profile.decode_step_s(running, kv_used) + self._profile.prefill_work_s(min(queued, CHUNK_TOKENS))
        ended, prompts, outputs = server.totals
        mean_prompt, mean_output = (prompts / ended, outputs / ended) if ended else (1.0, 1.0)
        return (
            queued,
            kv_used + waiting,  # those take KV before a new request does
            balancing.prefill_rate(self._profile, running, kv_used, CHUNK_TOKENS),
            balancing.freeing_rate(max(1, running) / step_s, mean_prompt, mean_output),
        )


class Balancer:
    """Sends each request to a server by a named rule. Reports are polled every `poll_s`; loads are counted by the balancer itself."""

    NAMES = ("sal", "p2c", "random", "round_robin", "least_kv", "least_loaded")

    def __init__(self, name: str, replicas: Replicas, seed: int, poll_s: float = POLL_S) -> None:
        assert name in self.NAMES, name
        self._name = name
        self._replicas = replicas
        self._seed = seed
        self._poll_s = poll_s
        self._polled = -1
        self._columns: Servers | None = None

    def choose(self, number: int, now_s: float, prompt_tokens: int) -> int:
        """The server of a request; servers are advanced as far as the rule reads them."""
        count, key = len(self._replicas.servers), str(number)
        match self._name:
            case "round_robin":
                return number % count
            case "random":
                return balancing.random_server(count, self._seed, key)
            case "p2c" | "least_loaded":
                self._replicas.advance(now_s)
                loads = self._replicas.loads()
                if self._name == "least_loaded":
                    return balancing.least_loaded(loads)
                return min(balancing.two_servers(count, self._seed, key), key=lambda at: (loads[at], at))
            case _:
                columns = self._polled_columns(now_s)
                at = balancing.server_aware(columns, prompt_tokens) if self._name == "sal" else balancing.least_kv(columns)
                columns.add(at, prompt_tokens)
                return at

    def _polled_columns(self, now_s: float) -> Servers:
        poll = math.floor(now_s / self._poll_s)
        if self._columns is None or poll > self._polled:
            self._polled = poll
            self._replicas.advance(poll * self._poll_s)
            self._columns = self._replicas.columns()
        return self._columns


def serve(
    requests: Jobs,
    profile: HardwareProfile,
    *,
    servers: int,
    policy: Callable[[], EnginePolicy],
    balancer: str = "round_robin",
    seed: int,
    poll_s: float = POLL_S,
) -> Served:
    """Serves all requests to their end."""
    replicas = Replicas(profile, servers, policy, seed)
    return serve_on(replicas.servers, requests, Balancer(balancer, replicas, seed, poll_s).choose)
