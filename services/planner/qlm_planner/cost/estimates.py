"""Service of a group on an instance: the formulas of `qlm_core.prediction.prediction_service` on one profile snapshot, cached per class of
requests.

A class is (instance, group key, prompt length to within 1/8); its groups share one `Service` and add their count and prompt tokens. So
10,000 groups share a few hundred services.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qlm_core.operations.clearing import eviction_costs
from qlm_core.prediction.prediction_service import Service
from qlm_core.prediction.prediction_service import service as service_of
from qlm_core.profiles.profile import HardwareProfile, ProfileSnapshot, WorkloadProfile
from qlm_core.vocabulary.group import GroupKey
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.policy import Policy

PROMPT_STEP = math.log(1.25)
"""Prompt lengths with a ratio below this share a class."""
DRIFT = 1.25
"""Factor of an instance's learned speed from which its plan is outdated."""
CLASSES_MAX = 50_000
"""Most classes of a snapshot; beyond it the cache is emptied."""
EngineKey = tuple[str, int, int, tuple[tuple[str, int], ...]]
"""Inputs of an engine besides the snapshot: the active model, its batch, the running requests, and those of each group."""
Likeness = tuple[object, ...]
"""Inputs of all figures of an instance: instances with equal ones serve alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFacts:
    """Figures shared by the groups of a class. `longest`: as in `ProfileSnapshot.longest_output_for`."""

    service: Service
    hardware: HardwareProfile
    prompt_variance: float
    uncached_share: float
    longest: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The running requests of an instance, in seconds: `left_s` of work, which delays a newcomer; `share_s` of one request in a batch of at
    most `batch`; `seat_s` until a seat is free; `drain_s` until all have ended; with variances. `clear_cost`: of evicting all for another
    model. `model_code`: of the active model, -1 for none."""

    model_code: int
    left_s: float = 0.0
    share_s: float = 0.0
    batch: float = 1.0
    seat_s: float = 0.0
    left_variance: float = 0.0
    drain_s: float = 0.0
    drain_variance: float = 0.0
    clear_cost: float = 0.0

    def lead_s(self, crowd: float) -> float:
        """Seconds until a request of the active model starts, less its delay by a batch of `crowd` requests while it runs."""
        return self.seat_s + max(0.0, self.left_s - min(self.batch, crowd) * self.share_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Most requests of a group: live and waiting."""

    live: int
    waiting: int


@dataclass(slots=True)
class Estimates:
    """Empty until `load`. `version` grows with each load."""

    policy: Policy
    version: int = 0
    _catalogue: Mapping[str, ModelSpec] = field(default_factory=dict)
    _profiles: ProfileSnapshot | None = None
    _hardware: dict[tuple[InstanceFacts, str], HardwareProfile | None] = field(default_factory=dict)
    _services: dict[tuple[InstanceFacts, GroupKey, int, int], Service] = field(default_factory=dict)
    _services_of_all: dict[tuple[InstanceFacts, str, int], Service] = field(default_factory=dict)
    _engines: dict[str, tuple[EngineKey, Engine]] = field(default_factory=dict)
    _codes: dict[str, int] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)
    _slowdowns: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return self._profiles is not None

    def load(self, catalogue: Mapping[str, ModelSpec], profiles: ProfileSnapshot) -> bool:
        """Loads profiles. True if an instance's speed differs by DRIFT from the last report of this kind, or from its first one."""
        slowdowns = {(row.instance, row.model): row.slowdown for row in profiles.hardware if row.instance}
        known = {key: self._slowdowns.get(key, 1.0 if self.ready else slowdown) for key, slowdown in slowdowns.items()}
        drifted = [key for key, slowdown in slowdowns.items() if not known[key] / DRIFT < slowdown < known[key] * DRIFT]
        self._slowdowns = known | {key: slowdowns[key] for key in drifted}
        self._catalogue = dict(catalogue)
        for model in self._catalogue:
            self.code(model)
        self._profiles = profiles
        self._hardware.clear()
        self._services.clear()
        self._services_of_all.clear()
        self._engines.clear()
        self.version += 1
        return bool(drifted)

    def code(self, model: str) -> int:
        """The number of a model in arrays; every name has its own."""
        code = self._codes.get(model)
        if code is None:
            code = self._codes[model] = len(self._names)
            self._names.append(model)
        return code

    @property
    def codes(self) -> int:
        """Models with a number."""
        return len(self._names)

    def model(self, code: int) -> str:
        """The model of a number."""
        return self._names[code]

    def hardware(self, facts: InstanceFacts, model: str) -> HardwareProfile | None:
        """The profile of a model on an instance; None where the instance does not serve it or no profile exists."""
        key = (facts, model)
        found = self._hardware.get(key)
        if found is None:
            spec = self._catalogue.get(model) if model in facts.models else None
            found = None if spec is None or self._profiles is None else self._profiles.hardware_for(facts, spec)
            self._hardware[key] = found
        return found

    def workload(self, model: str) -> WorkloadProfile:
        """Token counts of a model's requests of all classes, for loaded profiles."""
        assert self._profiles is not None
        return self._profiles.workload_for(model, "", "")

    def likeness(self, slot: Slot, model: str) -> Likeness:
        """The likeness of an instance for a model."""
        return (model, slot.batch(model), slot.facts.time_scale, self.hardware(slot.facts, model))

    def can_serve(self, slot: Slot, model: str) -> bool:
        """Whether it accepts groups, and has the model and a profile of it."""
        return slot.serving and self.hardware(slot.facts, model) is not None

    def service_of_all(self, slot: Slot, model: str) -> Service | None:
        """The service of a model's requests of all classes; None where the instance does not serve it."""
        key = (slot.facts, model, slot.batch(model))
        found = self._services_of_all.get(key)
        if found is None:
            hardware = self.hardware(slot.facts, model)
            if hardware is None or self._profiles is None:
                return None
            workload = self._profiles.workload_for(model, "", "")
            found = service_of(
                workload.prompt_tokens_mean, workload.output_tokens, hardware, key[2], uncached_share=workload.uncached_share
            )
            self._services_of_all[key] = found
        return found

    def class_of(self, slot: Slot, key: GroupKey, size: int) -> ClassFacts | None:
        """The shared figures of a key's groups with prompts of a size, on an instance; None where it does not serve their model."""
        served = self._service_of_size(slot.facts, key, size, slot.batch(key.model))
        hardware = self.hardware(slot.facts, key.model)
        if served is None or hardware is None or self._profiles is None:
            return None
        return ClassFacts(
            service=served,
            hardware=hardware,
            prompt_variance=self._prompt_variance(key),
            uncached_share=self._profiles.workload_for(key.model, key.slo_class, key.token_class).uncached_share,
            longest=self._profiles.longest_output_for(key.model, key.slo_class, key.token_class),
        )

    def _prompt_variance(self, key: GroupKey) -> float:
        """Variance of a class's prompts; 0 if only a wider class is profiled."""
        if self._profiles is None:
            return 0.0
        workload = self._profiles.workload_for(key.model, key.slo_class, key.token_class)
        return workload.prompt_tokens_variance if workload.token_class == key.token_class else 0.0

    def engine(self, slot: Slot) -> Engine:
        """The running requests of an instance, by the classes of their groups; cached until they change."""
        runs = tuple([(group_id, kept.count) for group_id, kept in slot.runners.items()])
        key = (slot.active_model, slot.batch(slot.active_model), slot.running, runs)
        kept = self._engines.get(slot.facts.incarnation)
        if kept is None or kept[0] != key:
            kept = self._engines[slot.facts.incarnation] = (key, self._engine(slot))
        return kept[1]

    def _engine(self, slot: Slot) -> Engine:
        hardware, any_class = self.hardware(slot.facts, slot.active_model), self.service_of_all(slot, slot.active_model)
        code = self.code(slot.active_model) if slot.active_model else -1
        if hardware is None or any_class is None or self._profiles is None or slot.running == 0:
            return Engine(model_code=code)
        workload = self._profiles.workload_for(slot.active_model, "", "")
        left_s, left_variance, unknown = 0.0, 0.0, slot.running
        for _, kept in sorted(slot.runners.items()):
            served = self._running_as(slot, kept.traits.key)
            if served is not None:
                left_s += kept.count * served.left_tokens * served.sequence_s
                left_variance += kept.count * served.output.variance * served.token_s**2
                unknown -= kept.count
        unknown = max(0, unknown)
        batch = max(any_class.batch, float(slot.running))  # running requests fit, whatever their mean length
        # The first seat of a full batch: the least of as many evenly spread times.
        full = slot.running >= any_class.batch
        seat_s = 2.0 * any_class.left_tokens / (batch + 1.0) * any_class.step_base_s if full else 0.0
        drain = any_class.drain(slot.running, full=True, behind=0.0)
        # An evicted request returns behind the head: its KV is computed again, after two swaps at the least.
        leaving = eviction_costs(any_class, workload.prompt_tokens_mean, hardware)
        away_s = 2.0 * hardware.swap_s(warm=True) + leaving.eviction_cost_s
        policy = self.policy
        return Engine(
            model_code=code,
            left_s=left_s + unknown * any_class.left_tokens * any_class.sequence_s,
            share_s=any_class.left_tokens * any_class.sequence_s,
            batch=batch,
            seat_s=seat_s,
            left_variance=left_variance + unknown * any_class.output.variance * any_class.token_s**2,
            drain_s=drain.mean,
            drain_variance=drain.variance,
            clear_cost=slot.running * (policy.work_weight * leaving.eviction_cost_s + policy.completion_weight * away_s),
        )

    def _running_as(self, slot: Slot, key: GroupKey) -> Service | None:
        """The service of an instance's running requests of a class."""
        if key.model != slot.active_model or self._profiles is None:
            return None
        prompt_tokens = self._profiles.workload_for(key.model, key.slo_class, key.token_class).prompt_tokens_mean
        return self._service(slot.facts, key, prompt_tokens, slot.batch(key.model))

    def limits(self, slot: Slot | None, group_key: GroupKey, slo_s: float, prompt_tokens: float) -> Limits:
        """delta x average batch (QLM algorithm 1), and requests served in the stated share of the SLO, but at least `group_min`."""
        policy = self.policy
        served = None if slot is None else self._service(slot.facts, group_key, prompt_tokens)
        if served is None:
            most = max(1, int(policy.delta * policy.unassigned_batch))
            return Limits(live=most, waiting=most)
        live = max(1, int(policy.delta * served.batch))
        by_time = policy.group_service_fraction * slo_s / served.work.mean
        return Limits(live=live, waiting=min(live, max(policy.group_min, int(min(by_time, live)))))

    def limits_at(self, slot: Slot | None, group: Group) -> Limits:
        """The limits of a group on an instance."""
        return self.limits(slot, group.traits.key, group.traits.slo_s, group.mean_prompt_tokens)

    def gpus(self) -> list[tuple[str, int]]:
        """(GPU, GPUs of an instance), for all profiles."""
        return [] if self._profiles is None else sorted({(row.gpu, row.n_gpu) for row in self._profiles.hardware if not row.instance})

    def step_s(self, slot: Slot, group: Group, sequences: float) -> float:
        """Seconds of a step of so many requests like a group's, with prefills (`qlm_core.operations.batch_size`); infinite where the
        instance does not serve them."""
        served = self._service(slot.facts, group.traits.key, group.mean_prompt_tokens)
        if served is None:
            return math.inf
        return served.step_base_s + sequences * (served.sequence_s + served.prefill_work_s / served.output.mean)

    def _service(self, facts: InstanceFacts, key: GroupKey, prompt_tokens: float, batch: int = 0) -> Service | None:
        return self._service_of_size(facts, key, round(math.log(max(1.0, prompt_tokens)) / PROMPT_STEP), batch or facts.batch_max)

    def _service_of_size(self, facts: InstanceFacts, key: GroupKey, size: int, batch: int) -> Service | None:
        index = (facts, key, size, batch)
        found = self._services.get(index)
        if found is None:
            hardware = self.hardware(facts, key.model)
            if hardware is None or self._profiles is None:
                return None
            if len(self._services) >= CLASSES_MAX:
                self._services.clear()
            workload = self._profiles.workload_for(key.model, key.slo_class, key.token_class)
            found = service_of(
                math.exp(size * PROMPT_STEP),
                workload.output_tokens,
                hardware,
                batch,
                prompt_variance=self._prompt_variance(key),
                uncached_share=workload.uncached_share,
            )
            self._services[index] = found
        return found
