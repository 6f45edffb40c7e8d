"""One server in virtual time: the simulated engine's batch under a policy, without noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.evaluate.workloads import Jobs
from qlm_agent.engines.policies.registry import engine_policy
from qlm_agent.engines.simulated.batch import SimulatedBatch
from qlm_agent.engines.simulated.pipeline import Batch, PipelinedBatches
from qlm_agent.engines.simulated.sequences import RunState
from qlm_agent.engines.simulated.stages import Stages
from qlm_agent.engines.simulated.timing import STEP_NOISE_MIN, InstanceNoise, StepTiming
from qlm_core.profiles.hardware_prior import hardware_prior
from qlm_core.profiles.hardware_profile import HardwareProfile

WHOLE = 1_000_000_000
"""Prompt tokens of a step: no prefill is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A model on its GPUs, in so many pipeline `stages` (1: none). `prefill_tokens`: budget of prompt tokens of a step."""

    profile: HardwareProfile
    seats: int
    prefill_tokens: int = WHOLE
    stages: int = 1
    host_kv_gb: float = 1152.0
    """Host memory of an AWS p4d.24xlarge (FastServe, section 6.1)."""

    def timing(self) -> StepTiming:
        """Read through `expected_step_s`, it has neither noise nor bias."""
        return StepTiming(self.profile, InstanceNoise(seed=1, instance="", step_noise=STEP_NOISE_MIN, bias_max=0.0), 1.0)


def server(model: str, n_gpu: int, *, gpu: str = "A100-40GB", seats: int, stages: int = 1) -> Server:
    profile = hardware_prior(gpu, n_gpu, model)
    assert profile is not None, f"{model} on {n_gpu} x {gpu}"
    return Server(profile=profile, seats=seats, stages=stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What became of jobs, in their order. `kv_peak_tokens`: of the GPU and host memory together. `swap_share`: seconds that running jobs
    waited for copies of KV, over the seconds that all jobs took."""

    jobs: Jobs
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


def serve(jobs: Jobs, on: Server, policy: str, options: Mapping[str, object] | None = None, *, until_s: float = np.inf) -> Served:
    """Serves the jobs to their end; those under way at `until_s` end at infinity. Under `static` answers are returned when the whole batch
    has ended, as FasterTransformer does."""
    batch = _batch(on, policy, options or {})
    started_s, first_s, end_s = np.full((3, len(jobs)), np.inf)
    arrivals = [*jobs.arrived_s.tolist(), np.inf]
    kv_peak, stalled_s, waited_s = 0, 0.0, 0.0
    for number, arrived_s in enumerate(arrivals):
        while (due_s := batch.next_due_s) is not None and due_s <= min(arrived_s, until_s):
            batch.advance(due_s)
            kv_peak = max(kv_peak, batch.kv_used_tokens + batch.host_kv_tokens)
            waited_s += (batch.kv_stalled_s - stalled_s) * batch.running
            stalled_s = batch.kv_stalled_s
            for progress in batch.news():
                job = int(progress.run_id)
                if progress.start == 0:
                    first_s[job] = progress.first_s
                if progress.done:
                    assert progress.failure is None, progress.failure
                    started_s[job], end_s[job] = progress.started_s, progress.last_s
        if arrived_s > until_s or number == len(jobs):
            break
        prompt, output = int(jobs.prompts[number]), int(jobs.outputs[number])
        batch.advance(arrived_s)
        batch.add(arrived_s, _run(number, prompt, output))
    if policy == "static":  # a batch starts at one time
        _, members = np.unique(started_s, return_inverse=True)
        last_s = np.zeros(len(jobs))
        np.maximum.at(last_s, members, end_s)
        end_s = last_s[members]
    latency_s = end_s - jobs.arrived_s
    return Served(
        jobs=jobs,
        first_s=first_s,
        end_s=end_s,
        preemptions=batch.preemptions,
        kv_peak_tokens=kv_peak,
        swap_share=waited_s / float(latency_s[np.isfinite(latency_s)].sum() or 1.0),
    )


def _batch(on: Server, policy: str, options: Mapping[str, object]) -> Batch:
    stages = Stages(on.stages) if on.stages > 1 else None

    def batch(number: int = 0) -> SimulatedBatch:
        return SimulatedBatch(
            step_s=on.timing().expected_step_s,
            kv_capacity_tokens=on.profile.kv_capacity_tokens // on.stages,
            batch_max=on.seats // on.stages,
            prefill_chunk_tokens=on.prefill_tokens,
            policy=engine_policy(policy, options),
            kv_swap_s=on.profile.kv_swap_s,
            host_kv_tokens=round(on.host_kv_gb * 1e9 / on.profile.kv_bytes_per_token) // on.stages,
            stages=stages,
        )

    return batch() if stages is None else PipelinedBatches(stages, batch)


def _run(number: int, prompt: int, output: int) -> RunState:
    return RunState(
        run_id=str(number),
        arrival=number,
        deadline_s=np.inf,
        priority=0,
        prompt_tokens=prompt,
        produced_tokens=0,
        target_tokens=output,
        max_tokens=output,
        resumed=0,
        reported=0,
    )
