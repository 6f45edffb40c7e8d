"""The true course: simulated engines that pull as QLM's agents do, stepped in virtual time.

An agent pulls from the head of its virtual queue while its batch has a seat and its KV room for what it expects of the request; the
engine's own core then decides when the request starts and how long every step takes, with its noise and its hidden bias. Nothing here
predicts beyond what the agent itself expects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from benchmarks.estimator.workloads import OUTPUT_TOKENS_MAX, Arrival
from qlm_agent.decisions.expectations import Expectations
from qlm_agent.decisions.runs import Run, RunTable
from qlm_agent.engines.policies.registry import FirstComeFirstServed
from qlm_agent.engines.port import EngineOutput, EngineRequest, Tier, TokenPrompt
from qlm_agent.engines.simulated.core import SimulatedCore, SimulatedLimits, SimulatedModel
from qlm_agent.engines.simulated.timing import BIAS_MAX, STEP_NOISE_MIN, InstanceNoise
from qlm_core.operations.preemption import Urgency
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.simulated_model import LENGTH_TOKEN_BASE, TOKEN_BYTES

Assign = Callable[[Arrival], str]
"""Puts a request on an instance's queue, and says on whose."""

REPORT_EVERY_S = 1.0
"""How often running requests report their output."""
STEPS_MAX = 50_000_000
"""Steps of an engine after which a run is given up: something does not end."""


class Kind(Enum):
    """The kind of an event. STARTED: the engine began with a request."""

    ARRIVED = "arrived"
    PULLED = "pulled"
    STARTED = "started"
    COMPLETED = "completed"
    SWAPPED = "swapped"
    WARMED = "warmed"


@dataclass(frozen=True, slots=True)
class Happened:
    """Something happened at `at_s` on an instance ("" for an arrival). SWAPPED, WARMED: the load took `took_s`, `from_warm` from host
    memory. STARTED: the first token was made at `first_token_s`, and the prefix cache had `cached_tokens` of the prompt."""

    kind: Kind
    at_s: float
    number: int
    instance: str = ""
    model: str = ""
    took_s: float = 0.0
    from_warm: bool = False
    first_token_s: float = 0.0
    cached_tokens: int | None = None


class Slower(InstanceNoise):
    """Noise of an instance that becomes slower by `slowness`."""

    slowness = 1.0

    def factor(self) -> float:
        return super().factor() * self.slowness


@dataclass(slots=True)
class TrueInstance:
    """One agent and its engine. `blocks`: its virtual queue, in the order of service: requests of one model each, none of them empty.
    `slow_from_s`: from when its steps take `slowness` as long."""

    facts: InstanceFacts
    core: SimulatedCore
    noise: Slower
    expected: Expectations
    blocks: deque[deque[Arrival]] = field(default_factory=deque)
    runs: RunTable = field(default_factory=RunTable)
    active: str = ""
    loading: str = ""
    load_number: int = 0
    loading_warm: bool = False
    warmings: dict[int, str] = field(default_factory=dict)
    slow_from_s: float = float("inf")
    slowness: float = 1.0

    @classmethod
    def of(
        cls, facts: InstanceFacts, models: Mapping[str, SimulatedModel], seed: int, bias_max: float = BIAS_MAX, shared_prefix: int = 0
    ) -> TrueInstance:
        """An instance with nothing loaded; its bias and its noise follow from the seed and its name. `shared_prefix`: in tokens."""
        noise = Slower(seed=seed, instance=facts.name, step_noise=STEP_NOISE_MIN, bias_max=bias_max)
        limits = SimulatedLimits(batch_max=facts.batch_max, tell_every_s=REPORT_EVERY_S, shared_prefix_tokens=shared_prefix)
        return cls(
            facts=facts,
            core=SimulatedCore(models, noise, FirstComeFirstServed(), limits),
            noise=noise,
            expected=Expectations({name: model.profile for name, model in models.items()}),
        )

    def load(self, now_s: float, model: str) -> None:
        """Begins to make a model the active one."""
        self.loading = model
        self.loading_warm = self.core.tier(model) is Tier.WARM
        self.load_number = self.core.load(now_s, model, Tier.ACTIVE)

    def warm(self, now_s: float, model: str) -> None:
        """Begins to bring a model's weights to host memory."""
        self.warmings[self.core.load(now_s, model, Tier.WARM)] = model

    def append(self, request: Arrival) -> None:
        """Puts a request behind all others, into the last block if that is of its model."""
        if not self.blocks or self.blocks[-1][0].model != request.model:
            self.blocks.append(deque())
        self.blocks[-1].append(request)

    def advance(self, now_s: float) -> Iterator[Happened]:
        """All that the engine did until then, then what it pulls."""
        if now_s >= self.slow_from_s:
            self.noise.slowness = self.slowness
        self.core.advance(now_s)
        for ended in self.core.ended():
            assert ended.error is None, ended.error
            name, took_s = self.facts.name, ended.took_s
            if ended.number in self.warmings:
                yield Happened(Kind.WARMED, ended.ended_s, -1, name, self.warmings.pop(ended.number), took_s)
            if ended.number != self.load_number:
                continue
            yield Happened(Kind.SWAPPED, ended.ended_s, -1, name, self.loading, took_s, self.loading_warm)
            self.active, self.loading = self.loading, ""
        for output in self.core.outputs(now_s):
            yield from self._events_of(output)
        yield from self._pull(now_s)

    def _events_of(self, output: EngineOutput) -> Iterator[Happened]:
        assert output.failure is None, output.failure
        run = self.runs.get(output.run_id)
        assert run is not None, output.run_id
        number, name = int(output.run_id), self.facts.name
        self.runs.add_output(run, len(output.token_ids) // TOKEN_BYTES)
        if not run.started:
            run.started = True
            first_s, cached = output.first_s, output.cached_tokens
            yield Happened(Kind.STARTED, output.started_s, number, name, run.model, first_token_s=first_s, cached_tokens=cached)
        if output.finish is not None:
            self.runs.remove(run)
            self.expected.record_completion(run)
            yield Happened(Kind.COMPLETED, output.last_s, number, name, run.model)

    def _pull(self, now_s: float) -> Iterator[Happened]:
        while self.blocks and not self.loading:
            request = self.blocks[0][0]
            if request.model != self.active:
                if not self.runs.running:
                    self.load(now_s, request.model)
                return
            reserved = request.prompt_tokens + self.expected.output_tokens(request.model)
            room = self._kv_capacity - self.runs.kv_reserved
            if self.runs.running and (self.runs.running >= self.facts.batch_max or reserved > room):
                return
            self.blocks[0].popleft()
            if not self.blocks[0]:
                self.blocks.popleft()
            self.runs.add(_run(request, reserved))
            self.core.add(now_s, _engine_request(request))
            yield Happened(Kind.PULLED, now_s, request.number, self.facts.name, request.model)

    @property
    def _kv_capacity(self) -> int:
        return self.expected.hardware[self.active].kv_capacity_tokens


def _run(request: Arrival, kv_reserved: int) -> Run:
    return Run(
        run_id=str(request.number),
        queue_id=str(request.number),
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        output_tokens_max=OUTPUT_TOKENS_MAX,
        resumed=0,
        produced=0,
        stored=0,
        urgency=Urgency(band=0, deadline_s=request.facts().deadline_s),
        kv_reserved=kv_reserved,
    )


def _engine_request(request: Arrival) -> EngineRequest:
    return EngineRequest(
        run_id=str(request.number),
        model=request.model,
        prompt=TokenPrompt(ids=[0] * (request.prompt_tokens - 1) + [LENGTH_TOKEN_BASE + request.output_tokens]),
        prompt_tokens=request.prompt_tokens,
        output_tokens_max=OUTPUT_TOKENS_MAX,
        arrival=request.number,
    )


def happenings(requests: Sequence[Arrival], instances: Mapping[str, TrueInstance], assign: Assign) -> Iterator[Happened]:
    """All that happens to requests, in the order of time, until the last has ended. `assign` says on which instance's queue an
    arrival is put, and puts it there. Starts are reported with the first token, and ends at once."""
    waiting = deque(requests)
    now_s = 0.0
    for _ in range(STEPS_MAX):
        dues = [due_s for instance in instances.values() if (due_s := instance.core.next_due_s) is not None]
        next_s = min(dues, default=float("inf"))
        if waiting and waiting[0].arrival_s <= next_s:
            request = waiting.popleft()
            now_s = max(now_s, request.arrival_s)
            yield Happened(Kind.ARRIVED, now_s, request.number, model=request.model)
            yield from instances[assign(request)].advance(now_s)
            continue
        if next_s == float("inf"):
            assert not any(instance.runs.running or instance.blocks for instance in instances.values())
            return
        now_s = max(now_s, next_s)
        for instance in instances.values():
            due_s = instance.core.next_due_s
            if due_s is not None and due_s <= now_s:
                yield from instance.advance(now_s)
    raise AssertionError(f"the engines made {STEPS_MAX} steps without an end")
