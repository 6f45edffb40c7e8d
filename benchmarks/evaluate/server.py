"""Servers in virtual time: the simulated engine's batch under a policy, by itself or behind a balancer (`replicas`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.evaluate.workloads import Jobs
from qlm_agent.engines.policies.port import EnginePolicy
from qlm_agent.engines.policies.registry import engine_policy
from qlm_agent.engines.simulated.batching.batch import SimulatedBatch, StepDuration
from qlm_agent.engines.simulated.batching.sequences import RunState
from qlm_agent.engines.simulated.batching.stages import Stages
from qlm_agent.engines.simulated.pipeline import Batch, PipelinedBatches
from qlm_agent.engines.simulated.timing import STEP_NOISE_MIN, InstanceNoise, StepTiming
from qlm_core.profiles.hardware_prior import hardware_prior
from qlm_core.profiles.hardware_profile import HardwareProfile

WHOLE = 1_000_000_000
"""Prompt tokens of a step: no prefill is cut."""
DRAIN_S = 1e7
"""Virtual seconds within which every job ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A model on its GPUs, in so many pipeline `stages` (1: none). `prefill_tokens`: budget of prompt tokens of a step."""

    profile: HardwareProfile
    seats: int
    prefill_tokens: int = WHOLE
    stages: int = 1
    host_kv_gb: float = 1152.0
    """Host memory of an AWS p4d.24xlarge (FastServe, section 6.1)."""

    def timing(self, seed: int = 1, instance: str = "") -> StepTiming:
        """Without bias; read through `expected_step_s`, without noise too."""
        return StepTiming(self.profile, InstanceNoise(seed=seed, instance=instance, step_noise=STEP_NOISE_MIN, bias_max=0.0), 1.0)


def server(model: str, n_gpu: int, *, gpu: str = "A100-40GB", seats: int, stages: int = 1) -> Server:
    profile = hardware_prior(gpu, n_gpu, model)
    assert profile is not None, f"{model} on {n_gpu} x {gpu}"
    return Server(profile=profile, seats=seats, stages=stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Results of jobs, in their order. `kv_peak_tokens`: of one server's GPU and host memory together. `swap_share`: seconds that running
    jobs waited for copies of KV, over the seconds that all jobs took."""

    jobs: Jobs
    started_s: NDArray[np.float64]
    first_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    preemptions: int
    kv_peak_tokens: int
    swap_share: float

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """From arrival to end."""
        return np.asarray(self.end_s - self.jobs.arrived_s)

    @property
    def token_latency_s(self) -> NDArray[np.float64]:
        """Latency over output tokens (FastServe, section 6.1)."""
        return np.asarray(self.latency_s / self.jobs.outputs)

    def figures(self) -> dict[str, float]:
        """Percentiles of times from arrival to first token, the same by prompt token, and to the end (Kossmann et al., section 5)."""
        found = {f"{name}_p{level}": float(np.percentile(values, level)) for name, values in self._series() for level in (50, 95, 99)}
        return found | {"preempted": self.preemptions / len(self.jobs)}

    def _series(self) -> Iterator[tuple[str, NDArray[np.float64]]]:
        first_s = self.first_s - self.jobs.arrived_s
        yield "first_s", first_s
        yield "first_ms_per_token", 1e3 * first_s / self.jobs.prompts
        yield "total_s", self.latency_s


def batch_on(on: Server, policy: EnginePolicy, step_s: StepDuration, stages: Stages | None = None) -> SimulatedBatch:
    """The batch of the whole server, or one of those in flight in its stages."""
    return SimulatedBatch(
        step_s=step_s,
        kv_capacity_tokens=on.profile.kv_capacity_tokens // on.stages,
        batch_max=on.seats // on.stages,
        prefill_chunk_tokens=on.prefill_tokens,
        policy=policy,
        kv_swap_s=on.profile.kv_swap_s,
        host_kv_tokens=round(on.host_kv_gb * 1e9 / on.profile.kv_bytes_per_token) // on.stages,
        stages=stages,
    )


class Replica:
    """A server under way. `runs`: inside it; `pending`: those without a first token; `totals`: ended runs, their prompt and their output
    tokens. `swap_wait_s`: sum over running jobs."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.runs: dict[str, RunState] = {}
        self.pending: list[RunState] = []
        self.totals = [0, 0, 0]
        self.kv_peak_tokens = 0
        self.swap_wait_s = 0.0

    def advance(self, until_s: float) -> None:
        batch = self.batch
        while (due_s := batch.next_due_s) is not None and due_s <= until_s:
            stalled_s = batch.kv_stalled_s
            batch.advance(due_s)
            self.kv_peak_tokens = max(self.kv_peak_tokens, batch.kv_used_tokens + batch.host_kv_tokens)
            self.swap_wait_s += (batch.kv_stalled_s - stalled_s) * batch.running
            for news in batch.news():
                if news.done:
                    run = self.runs.pop(news.run_id)
                    assert news.failure is None, news.failure
                    self.totals = [total + more for total, more in zip(self.totals, (1, run.prompt_tokens, run.target_tokens), strict=True)]
        batch.advance(until_s)

    def add(self, now_s: float, run: RunState) -> None:
        self.runs[run.run_id] = run
        self.pending.append(run)
        self.batch.add(now_s, run)


def serve_on(replicas: Sequence[Replica], jobs: Jobs, choose: Callable[[int, float, int], int]) -> Served:
    """Serves all jobs to their end. `choose`: the replica's index, by the number of the job, its arrival and its prompt tokens."""
    runs = [
        _run(number, prompt, output, quantiles)
        for number, (prompt, output, quantiles) in enumerate(
            zip(jobs.prompts.tolist(), jobs.outputs.tolist(), jobs.quantiles().tolist(), strict=True)
        )
    ]
    for run, now_s in zip(runs, jobs.arrived_s.tolist(), strict=True):
        replica = replicas[choose(run.arrival, now_s, run.prompt_tokens)]
        replica.advance(now_s)
        replica.add(now_s, run)
    for replica in replicas:
        replica.advance(DRAIN_S)
    assert all(run.ended_s is not None for run in runs), "every job ends"
    started_s, first_s, end_s = (
        np.array([getattr(run, name) for run in runs], np.float64) for name in ("started_s", "first_token_s", "ended_s")
    )
    return Served(
        jobs=jobs,
        started_s=started_s,
        first_s=first_s,
        end_s=end_s,
        preemptions=sum(replica.batch.preemptions for replica in replicas),
        kv_peak_tokens=max(replica.kv_peak_tokens for replica in replicas),
        swap_share=sum(replica.swap_wait_s for replica in replicas) / float((end_s - jobs.arrived_s).sum()),
    )


def serve(jobs: Jobs, on: Server, policy: str, options: Mapping[str, object] | None = None) -> Served:
    """On one server, without noise. Under `static` answers are returned when the whole batch has ended, as FasterTransformer does."""
    stages = Stages(on.stages) if on.stages > 1 else None

    def batch(number: int = 0) -> SimulatedBatch:
        return batch_on(on, engine_policy(policy, options or {}), on.timing().expected_step_s, stages)

    served = serve_on([Replica(batch() if stages is None else PipelinedBatches(stages, batch))], jobs, lambda *_: 0)
    if policy != "static":
        return served
    _, members = np.unique(served.started_s, return_inverse=True)  # a batch starts at one time
    last_s = np.zeros(len(jobs))
    np.maximum.at(last_s, members, served.end_s)
    return replace(served, end_s=last_s[members])


def _run(number: int, prompt: int, output: int, quantiles: Sequence[float]) -> RunState:
    return RunState(
        run_id=str(number),
        arrival=number,
        deadline_s=np.inf,
        priority=0,
        prompt_tokens=prompt,
        produced_tokens=0,
        target_tokens=output,
        resumed=0,
        reported=0,
        quantiles=tuple(quantiles),
    )
