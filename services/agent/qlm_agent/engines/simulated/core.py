"""The simulated engine without a clock: models, runs and transfers over times that are passed in.

`SimulatedCore` is stepped by `SimulatedEngine` in real time and by the virtual-time cluster: make each engine call with its time, call
`advance` at `next_due_s` or before reading, and take `outputs` and `ended`. Times never decrease. Every run, load and transfer between two
calls happens in the order of its own time, however late the call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

from qlm_agent.engines.policies.port import EnginePolicy
from qlm_agent.engines.port import EngineFailure, EngineOutput, EngineRequest, EngineStats, FailureKind, FinishReason, Tier
from qlm_agent.engines.simulated.answers import Answer, answer_to
from qlm_agent.engines.simulated.batching.batch import SimulatedBatch
from qlm_agent.engines.simulated.batching.prefills import PrefillRule
from qlm_agent.engines.simulated.batching.sequences import Progress, RunState
from qlm_agent.engines.simulated.batching.stages import Stages
from qlm_agent.engines.simulated.batching.transfers import Link, OperationEnded
from qlm_agent.engines.simulated.host_memory import HostKv, HostWeights
from qlm_agent.engines.simulated.kv_swap import KvSwap, ModelKv
from qlm_agent.engines.simulated.pipeline import Batch, PipelinedBatches
from qlm_agent.engines.simulated.tiers import ModelTiers
from qlm_agent.engines.simulated.timing import InstanceNoise, StepTiming
from qlm_core.profiles.profile import HardwareProfile
from qlm_core.vocabulary.errors import InvalidRequest
from qlm_core.vocabulary.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """A model that the engine can serve, and its profile on the engine's GPUs."""

    spec: ModelSpec
    profile: HardwareProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLimits:
    """`time_scale`: how many times faster than its profile it runs. `host_memory_gb`: budget for weights in host memory; `host_kv_gb`: a
    separate one for the KV of offloaded runs, 0 to never offload. `kv_capacity_tokens`: 0 for the profile's. `tell_every_s`: how often
    running requests report their tokens; first tokens and ends never wait. `prefill`: how prompts share the steps. `pipeline_stages`: 1 for
    no pipeline; with several, as many batches share seats, KV and host memory for paused runs. `shared_prefix_tokens`: with which all
    prompts of a model begin: cached once one was computed, until another model is active; each run's KV still counts whole."""

    time_scale: float = 1.0
    batch_max: int = 256
    prefill_chunk_tokens: int = 2048
    prefill: PrefillRule = PrefillRule.BESIDE
    pipeline_stages: int = 1
    host_memory_gb: float = 64.0
    host_kv_gb: float = 16.0
    kv_capacity_tokens: int = 0
    tell_every_s: float = 0.02
    shared_prefix_tokens: int = 0


class SimulatedCore:
    """See the module; calls follow `qlm_agent.engines.port.Engine`. Operations get a number, and end in `ended`."""

    def __init__(self, models: Mapping[str, SimulatedModel], noise: InstanceNoise, policy: EnginePolicy, limits: SimulatedLimits) -> None:
        self._models = models
        self._policies = [policy, *(deepcopy(policy) for _ in range(limits.pipeline_stages - 1))]  # of each batch
        self._limits = limits
        self._timings = {name: StepTiming(model.profile, noise, limits.time_scale) for name, model in models.items()}
        self._bus = Link()
        weights = HostWeights(
            budget_gb=limits.host_memory_gb, weights_gb={name: model.profile.weights_gb for name, model in models.items()}
        )
        self._tiers = ModelTiers(timings=self._timings, host=weights, bus=self._bus, runs_on_gpu=lambda: self._runs_on_gpu)
        self._swap = KvSwap(HostKv(budget_gb=limits.host_kv_gb), self._bus)
        self._kv = {name: ModelKv(name, model.profile.kv_bytes_per_token, self._timings[name]) for name, model in models.items()}
        self._batch: Batch | None = None
        self._batch_model = ""
        self._answers: dict[str, Answer] = {}
        self._due: list[EngineOutput] = []  # reported at the next reading
        self._ended: list[OperationEnded] = []
        self._operations = 0
        self._arrivals = 0
        self._preemptions = 0  # under models that were active before
        self._reported_s = 0.0
        self._now_s = 0.0
        self._paused_s: float | None = None

    @property
    def next_due_s(self) -> float | None:
        """When `advance` is wanted at the latest; it may be past. None: nothing happens before the next call."""
        if self._due or self._ended:
            return self._now_s
        step_s = self._batch.next_due_s if self._batch is not None and self._paused_s is None else None
        return _earliest(step_s, self.transfer_due_s)

    @property
    def transfer_due_s(self) -> float | None:
        """When the next transfer is over, None if there is none."""
        return _earliest(self._tiers.next_due_s, self._swap.next_due_s)

    def advance(self, now_s: float) -> None:
        """Simulates until then."""
        while (due_s := self.transfer_due_s) is not None and due_s <= now_s:
            self._advance_batch(due_s)
            if self._swap.next_due_s == due_s:
                self._ended += self._swap.advance(self._batch)
            else:
                self._ended += self._tiers.advance()
                self._match_batch()
        self._advance_batch(now_s)
        self._now_s = now_s

    def outputs(self, now_s: float) -> list[EngineOutput]:
        """Returns the output due by then, each token once. Call `advance` first."""
        found, self._due = self._due, []
        if self._batch is not None:
            if now_s - self._reported_s >= self._limits.tell_every_s:
                self._reported_s = now_s
                outputs = self._batch.progress()
            else:
                outputs = self._batch.news()
            found += [self._output(progress) for progress in outputs]
        return found

    def ended(self) -> list[OperationEnded]:
        """The operations that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def tier(self, model: str) -> Tier:
        return self._tiers.tier(model)

    def stats(self) -> EngineStats:
        batch, weights, host_kv = self._batch, self._tiers.host, self._swap.host
        profile = self._models[self._batch_model].profile if batch is not None else None
        token_bytes = 0 if profile is None else profile.kv_bytes_per_token
        return EngineStats(
            active_model=self._tiers.active,
            warm_models=tuple(model for model in weights.models if model != self._tiers.active),
            running=0 if batch is None else batch.running,
            waiting=0 if batch is None else batch.waiting,
            batch_max=self._limits.batch_max,
            kv_used_tokens=0 if batch is None else batch.kv_used_tokens,
            kv_capacity_tokens=0 if batch is None else self._kv_capacity(self._batch_model),
            preemptions=self._preemptions + (0 if batch is None else batch.preemptions),
            offloaded=self._swap.offloaded,
            host_kv_used_tokens=math.ceil(host_kv.used_bytes / token_bytes) if token_bytes else 0,
            host_kv_capacity_tokens=host_kv.capacity_bytes // token_bytes if token_bytes else 0,
            host_memory_used_bytes=round(weights.used_gb * 1e9) + host_kv.used_bytes,
            host_memory_capacity_bytes=round(weights.budget_gb * 1e9) + host_kv.capacity_bytes,
        )

    # Models -----------------------------------------------------------------------------------------------------------

    def load(self, now_s: float, model: str, tier: Tier) -> int:
        """Brings a model to a tier; the number of the operation."""
        self.advance(now_s)
        self._operations += 1
        self._ended += self._tiers.load(now_s, self._operations, model, tier)
        self._match_batch()
        return self._operations

    def _match_batch(self) -> None:
        """A batch is of one active model."""
        model = self._tiers.active
        if model == self._batch_model:
            return
        if self._batch is not None:
            self._preemptions += self._batch.preemptions
        self._batch_model = model
        self._batch = None
        if model:
            self._batch = self._new_batch(model, self._timings[model])

    def _new_batch(self, model: str, timing: StepTiming) -> Batch:
        limits, count = self._limits, self._limits.pipeline_stages
        stages = Stages(count) if count > 1 else None

        def batch(number: int) -> SimulatedBatch:
            return SimulatedBatch(
                step_s=timing.step_s,
                kv_capacity_tokens=self._kv_capacity(model) // count,
                batch_max=max(1, limits.batch_max // count),
                prefill_chunk_tokens=limits.prefill_chunk_tokens,
                policy=self._policies[number],
                model=model,
                expected_step_s=timing.expected_step_s,
                kv_swap_s=timing.kv_swap_s,
                host_kv_tokens=self._swap.host.capacity_bytes // self._models[model].profile.kv_bytes_per_token // count,
                prefill=limits.prefill,
                stages=stages,
                shared_prefix_tokens=limits.shared_prefix_tokens,
            )

        return batch(0) if stages is None else PipelinedBatches(stages, batch)

    @property
    def _runs_on_gpu(self) -> int:
        return len(self._answers) - self._swap.off_gpu

    def _kv_capacity(self, model: str) -> int:
        return self._limits.kv_capacity_tokens or self._models[model].profile.kv_capacity_tokens

    # Runs -------------------------------------------------------------------------------------------------------------

    def add(self, now_s: float, request: EngineRequest) -> None:
        """Takes a run; one that cannot be served is reported as a failure."""
        self.advance(now_s)
        if self._batch is None or request.model != self._batch_model:
            self._refuse(now_s, request, FailureKind.AWAY, f"model {request.model} is not active")
            return
        try:
            answer = answer_to(request, self._models[request.model].spec)
        except InvalidRequest as error:
            self._refuse(now_s, request, FailureKind.REFUSED, error.message)
            return
        if answer.resumed_tokens == answer.target_tokens:
            # An earlier attempt produced all of it and ended before the report.
            self._due.append(EngineOutput(request.run_id, b"", now_s, now_s, now_s, finish=_finish(answer)))
            return
        self._arrivals += 1
        self._answers[request.run_id] = answer
        run = RunState(
            run_id=request.run_id,
            arrival=self._arrivals,
            deadline_s=request.deadline_s,
            priority=request.priority,
            prompt_tokens=answer.prompt_tokens,
            target_tokens=answer.target_tokens,
            produced_tokens=answer.resumed_tokens,
            max_tokens=request.output_tokens_max,
            quantiles=request.length_quantiles,
            resumed=answer.resumed_tokens,
            reported=answer.resumed_tokens,
        )
        self._batch.add(now_s, run)

    def abort(self, now_s: float, run_ids: Sequence[str]) -> None:
        """Ends runs at once, with their unreported output."""
        self.advance(now_s)
        for run_id in run_ids:
            self._answers.pop(run_id, None)
            if self._batch is not None:
                self._batch.abort(run_id)
            self._swap.abort(run_id)
        dropped = frozenset(run_ids)
        self._due = [output for output in self._due if output.run_id not in dropped]

    def stop(self, now_s: float) -> None:
        """Ends all runs; operations continue."""
        self.abort(now_s, [*self._answers, *(output.run_id for output in self._due)])

    def pause(self, now_s: float) -> None:
        """No step begins or advances until `resume`; transfers do. Output made by then is reported at once: no later step would."""
        self.advance(now_s)
        if self._paused_s is None:
            self._paused_s = now_s
            if self._batch is not None:
                self._due += [self._output(progress) for progress in self._batch.progress()]

    def resume(self, now_s: float) -> None:
        """The step that the pause interrupted continues."""
        self.advance(now_s)
        if self._paused_s is not None:
            if self._batch is not None:
                self._batch.skip_time(self._paused_s, now_s)
            self._paused_s = None

    def _advance_batch(self, until_s: float) -> None:
        if self._batch is not None and self._paused_s is None:
            self._batch.advance(until_s)

    # KV swap ----------------------------------------------------------------------------------------------------------

    def offload(self, now_s: float, run_ids: Sequence[str]) -> int:
        """Takes decoding runs out of the batch and copies their KV to host memory; the number of the operation."""
        self.advance(now_s)
        self._operations += 1
        if self._batch is None:
            self._ended.append(OperationEnded(number=self._operations, ended_s=now_s, took_s=0.0))
            return self._operations
        self._ended += self._swap.offload(now_s, self._operations, self._batch, self._kv[self._batch_model], run_ids)
        self._due += [self._output(progress) for progress in self._batch.news()]  # the batch may be another when they are read
        return self._operations

    def restore(self, now_s: float, run_ids: Sequence[str]) -> int:
        """Copies the KV of offloaded runs back while there is room, and continues them; the number of the operation."""
        self.advance(now_s)
        self._operations += 1
        self._ended += self._swap.restore(now_s, self._operations, self._batch, self._batch_model, run_ids)
        return self._operations

    # Output -----------------------------------------------------------------------------------------------------------

    def _output(self, progress: Progress) -> EngineOutput:
        answer = self._answers[progress.run_id]
        finish = None
        if progress.done:
            del self._answers[progress.run_id]
            finish = _finish(answer) if progress.failure is None else None
        return EngineOutput(
            progress.run_id,
            answer.slice(progress.start, progress.end),
            progress.started_s,
            progress.first_s,
            progress.last_s,
            logprobs=b"" if answer.logprobs is None else answer.records(progress.start, progress.end),
            finish=finish,
            failure=progress.failure,
            paused_s=progress.paused_s,
            cached_tokens=progress.cached_tokens,
        )

    def _refuse(self, now_s: float, request: EngineRequest, kind: FailureKind, message: str) -> None:
        failure = EngineFailure(kind=kind, message=message)
        self._due.append(EngineOutput(request.run_id, b"", now_s, now_s, now_s, failure=failure))


def _finish(answer: Answer) -> FinishReason:
    return FinishReason.LENGTH if answer.cut else FinishReason.STOP


def _earliest(*times_s: float | None) -> float | None:
    return min((time_s for time_s in times_s if time_s is not None), default=None)
