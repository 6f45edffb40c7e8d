"""What a group costs on an instance: the formulas of `qlm_core.prediction` on one profile snapshot, kept per class of requests.

A class is (instance, group key, prompt length to within 1/8); all its groups share one `Service`. What a group adds is exact: its count and
its known prompt tokens. So the terms of a group cost O(1), and 10,000 groups share a few hundred services.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qlm_core.clearing import GivingWay, giving_way
from qlm_core.distribution import Normal
from qlm_core.group import MEGA, GroupKey
from qlm_core.instance import InstanceFacts
from qlm_core.length_curve import longest_among
from qlm_core.model import ModelSpec
from qlm_core.prediction import Service
from qlm_core.prediction import service as service_of
from qlm_core.prediction_service import longest_of
from qlm_core.profile import HardwareProfile, ProfileSnapshot
from qlm_core.queue_model import DECODE, PREFILL, REQUESTS
from qlm_core.request import SloKind
from qlm_planner.board import Board
from qlm_planner.items import Group, Running, Slot
from qlm_planner.policy import Policy
from qlm_planner.tenants import weight_of
from qlm_planner.terms import Engine, Limits, Sums, Term, each_of, ends_of, left_of, weightless

PROMPT_STEP = math.log(1.25)
"""Prompt lengths whose ratio is below this share a class."""

CLASSES_MAX = 50_000
"""Classes and terms kept for one snapshot; beyond it all are worked out again."""

TermKey = tuple[str, int, int, int, float, float, float, int]
"""(incarnation, waiting, of these answered, prompt tokens, next deadline, seconds to the last one, least SLO, rank): what a group's terms
depend on besides its traits and the snapshot."""


EngineKey = tuple[str, int, tuple[tuple[str, int, int, float], ...]]
"""What an engine depends on besides the snapshot: the active model, how many run, and their groups: count, band and deadline of each."""

Likeness = tuple[object, ...]
"""What all figures of an instance depend on: instances with equal ones serve alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFacts:
    """What the groups of a class share. `longest`: as `ProfileSnapshot.longest_output_for`."""

    service: Service
    hardware: HardwareProfile
    prompt_variance: float
    longest: Sequence[float]


@dataclass(slots=True)
class Estimates:
    """Knows nothing until `load`. `version` grows with each load."""

    policy: Policy
    version: int = 0
    _catalogue: Mapping[str, ModelSpec] = field(default_factory=dict)
    _profiles: ProfileSnapshot | None = None
    _hardware: dict[tuple[InstanceFacts, str], HardwareProfile | None] = field(default_factory=dict)
    _services: dict[tuple[InstanceFacts, GroupKey, int], Service] = field(default_factory=dict)
    _terms: dict[str, tuple[TermKey, Term]] = field(default_factory=dict)
    _engines: dict[str, tuple[EngineKey, Engine]] = field(default_factory=dict)
    _running: dict[tuple[str, str], tuple[Service, GivingWay]] = field(default_factory=dict)
    _runs: dict[tuple[str, str, str, int, int, float], tuple[Sums | None, Term]] = field(default_factory=dict)
    _codes: dict[str, int] = field(default_factory=dict)
    _drifting: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return self._profiles is not None

    def load(self, catalogue: Mapping[str, ModelSpec], profiles: ProfileSnapshot) -> bool:
        """True if they say that an instance runs otherwise than it did, which those before did not."""
        drifting = {(row.instance, row.model): row.drifting_since_s for row in profiles.hardware if row.drifting_since_s}
        begun = self.ready and any(self._drifting.get(key) != since_s for key, since_s in drifting.items())
        self._drifting = drifting
        self._catalogue = dict(catalogue)
        self._profiles = profiles
        self._hardware.clear()
        self._services.clear()
        self._terms.clear()
        self._engines.clear()
        self._running.clear()
        self._runs.clear()
        self.version += 1
        return begun

    def code(self, model: str) -> int:
        """The number that stands for a model in arrays; every name has its own."""
        return self._codes.setdefault(model, len(self._codes))

    def hardware(self, facts: InstanceFacts, model: str) -> HardwareProfile | None:
        """The profile of a model on an instance; None where it does not serve the model or nobody has measured the pair."""
        key = (facts, model)
        found = self._hardware.get(key)
        if found is None:
            spec = self._catalogue.get(model) if model in facts.models else None
            found = None if spec is None or self._profiles is None else self._profiles.hardware_for(facts, spec)
            self._hardware[key] = found
        return found

    def likeness(self, facts: InstanceFacts) -> Likeness:
        """Its profiles for each model, and its own settings."""
        measured = tuple(self.hardware(facts, model) for model in facts.models)
        return (facts.models, facts.batch_max, facts.time_scale, measured)

    def can_serve(self, slot: Slot, model: str) -> bool:
        """It may be given groups, and has the model and a profile of it."""
        return slot.serving and self.hardware(slot.facts, model) is not None

    def kept_term(self, slot: Slot, group: Group) -> Term:
        """`term`, kept until the group changes: for the groups that stand on the instance's queue."""
        key = (
            slot.facts.incarnation,
            group.waiting,
            group.answered,
            group.waiting_prompt_tokens,
            group.next_deadline_s,
            group.spread_s,
            group.slo_least_s,
            group.rank,
        )
        kept = self._terms.get(group.group_id)
        if kept is not None and kept[0] == key:
            return kept[1]
        if len(self._terms) >= CLASSES_MAX:
            self._terms.clear()
        term = self.term(slot, group)
        self._terms[group.group_id] = (key, term)
        return term

    def term(self, slot: Slot, group: Group) -> Term:
        """The terms of a group on an instance. One that the instance cannot serve (it stands there until it is moved) weighs nothing."""
        key = group.traits.key
        served = self._service(slot.facts, key, group.waiting_prompt_tokens / max(1, group.waiting))
        hardware = self.hardware(slot.facts, key.model)
        if served is None or hardware is None:
            return weightless(group, self.code(key.model))
        count = group.waiting
        # The known prompts count exactly, those of the class only for how a prefill grows with its length.
        prefill_s = served.prefill_work_s if not count else self._prefill_s(hardware, key, group)
        each = each_of(served, prefill_s)
        own = served.decode(count, count)
        first_token = key.slo_kind is SloKind.FIRST_TOKEN
        longest = self._longest(key, min(count, served.batch))
        own_prefill_s = served.prefill_s - served.prefill_work_s + prefill_s
        return Term(
            group_id=group.group_id,
            model=key.model,
            model_code=self.code(key.model),
            band=group.rank,
            deadline_s=group.next_deadline_s,
            spread_s=group.spread_s,
            slo_s=group.slo_least_s,
            count=count,
            work_s=count * (each[PREFILL] + each[DECODE]),
            each=each,
            ends=ends_of(served, served.output.mean, longest, hardware),
            own_s=own_prefill_s + (0.0 if first_token else own.mean),
            own_variance=0.0 if first_token else own.variance,
            drain_s=own_prefill_s + served.drain(count, full=count > served.batch, behind=0.0, longest_tokens=longest).mean,
            cold_s=hardware.swap_s(warm=False),
            warm_s=hardware.swap_s(warm=True),
            weight=weight_of(key.tenant_class),
            due_share=group.due_share,
        )

    def output_mean(self, key: GroupKey) -> float:
        """Output tokens that are expected of a request of a class; 1 while nothing is known."""
        return 1.0 if self._profiles is None else self._profiles.workload_for(key.model, key.slo_class, key.token_class).output_tokens_mean

    def class_of(self, slot: Slot, key: GroupKey, size: int) -> ClassFacts | None:
        """What all groups of a key with prompts of a size share on an instance; None where it does not serve their model."""
        served = self._service_of_size(slot.facts, key, size)
        hardware = self.hardware(slot.facts, key.model)
        if served is None or hardware is None or self._profiles is None:
            return None
        return ClassFacts(
            service=served,
            hardware=hardware,
            prompt_variance=self._prompt_variance(key),
            longest=self._profiles.longest_output_for(key.model, key.slo_class, key.token_class),
        )

    def _longest(self, key: GroupKey, count: float) -> float:
        """Tokens of the longest output of so many requests of a class."""
        if self._profiles is None:
            return 0.0
        return longest_among(self._profiles.longest_output_for(key.model, key.slo_class, key.token_class), count)

    def _prefill_s(self, hardware: HardwareProfile, key: GroupKey, group: Group) -> float:
        """Of one request of a group, in the mean."""
        mean = group.waiting_prompt_tokens / group.waiting
        return hardware.prefill_work_s(mean, mean * mean + self._prompt_variance(key))

    def _prompt_variance(self, key: GroupKey) -> float:
        """Of the prompts of a class; 0 where only a wider one is known."""
        if self._profiles is None:
            return 0.0
        workload = self._profiles.workload_for(key.model, key.slo_class, key.token_class)
        return workload.prompt_tokens_variance if workload.token_class == key.token_class else 0.0

    def engine(self, slot: Slot) -> Engine:
        """What runs on an instance, by the classes of its groups; what gives way and ends is taken as any of its active model. Kept while
        the same runs there."""
        runs = tuple([(group_id, kept.count, kept.band, kept.deadline_s) for group_id, kept in slot.runners.items()])
        key = (slot.active_model, slot.running, runs)
        kept = self._engines.get(slot.facts.incarnation)
        if kept is None or kept[0] != key:
            kept = self._engines[slot.facts.incarnation] = (key, self._engine(slot))
        return kept[1]

    def _engine(self, slot: Slot) -> Engine:
        hardware = self.hardware(slot.facts, slot.active_model)
        code = self.code(slot.active_model)
        if hardware is None or self._profiles is None or slot.running == 0:
            return Engine(active_model=slot.active_model, model_code=code)
        running, way = self._running_as(slot.facts, slot.active_model, hardware)
        drain = running.drain(slot.running, full=True, behind=0.0)
        runs = [self._run(slot, group_id, kept, running, way.displacement_s, hardware) for group_id, kept in sorted(slot.runners.items())]
        parts = [left for left, _ in runs if left is not None]
        told = sum(int(left[REQUESTS]) for left in parts)
        parts.append(left_of(running, max(0, slot.running - told)))
        requests, prefill_s, decode_s, variance, seats, batch_left_s = (math.fsum(values) for values in zip(*parts, strict=True))
        return Engine(
            active_model=slot.active_model,
            model_code=code,
            left=(requests, prefill_s, decode_s, variance, seats, batch_left_s),
            drain_s=drain.mean,
            drain_variance=drain.variance,
            way=way,
            runners=tuple([term for _, term in runs]),
        )

    def _running_as(self, facts: InstanceFacts, model: str, hardware: HardwareProfile) -> tuple[Service, GivingWay]:
        """Any request of a model, and what its giving way takes."""
        found = self._running.get((facts.incarnation, model))
        if found is None:
            assert self._profiles is not None
            workload = self._profiles.workload_for(model, "", "")
            running = service_of(workload.prompt_tokens_mean, workload.output_tokens, hardware, facts.batch_max)
            found = self._running[(facts.incarnation, model)] = (running, giving_way(running, workload.prompt_tokens_mean, hardware))
        return found

    def _run(
        self, slot: Slot, group_id: str, kept: Running, running: Service, redo_s: float, hardware: HardwareProfile
    ) -> tuple[Sums | None, Term]:
        """What is left of the requests of a group that run, by its class (None where that is not known), and `_runner`."""
        key = (slot.facts.incarnation, slot.active_model, group_id, kept.count, kept.band, kept.deadline_s)
        found = self._runs.get(key)
        if found is None:
            if len(self._runs) >= CLASSES_MAX:
                self._runs.clear()
            group = kept.traits.key
            served = self._service(slot.facts, group, self._prompt_mean(group)) if group.model == slot.active_model else None
            left = None if served is None else left_of(served, kept.count)
            found = self._runs[key] = (left, self._runner(self.code(slot.active_model), kept, running, redo_s, hardware))
        return found

    def _prompt_mean(self, key: GroupKey) -> float:
        return 0.0 if self._profiles is None else self._profiles.workload_for(key.model, key.slo_class, key.token_class).prompt_tokens_mean

    def _runner(self, code: int, kept: Running, running: Service, redo_s: float, hardware: HardwareProfile) -> Term:
        """The requests of a group that run, as a group that gave way: what is left of them, and `redo_s` of each for computing its KV
        again."""
        answered = kept.traits.key.slo_kind is SloKind.FIRST_TOKEN
        left_s = running.left_tokens * running.token_s
        variance = running.output.variance * running.token_s**2
        left_tokens = Normal(running.left_tokens, running.output.variance)
        longest = longest_of(left_tokens, min(kept.count, running.batch)).mean
        return Term(
            group_id="",
            model=kept.traits.key.model,
            model_code=code,
            band=kept.band,
            weight=weight_of(kept.traits.key.tenant_class),
            deadline_s=math.inf if answered else kept.deadline_s,
            slo_s=kept.traits.slo_s,
            count=kept.count,
            work_s=kept.count * (left_s + redo_s),
            each=(1.0, redo_s, left_s, variance, 1.0 / running.batch, running.batch_left_s / running.batch),
            ends=ends_of(running, running.left_tokens, longest, hardware),
            own_s=running.left_tokens * running.step_s + redo_s,
            own_variance=running.output.variance * running.step_s**2,
            drain_s=running.drain(kept.count, full=True, behind=0.0).mean,
            cold_s=hardware.swap_s(warm=False),
            warm_s=hardware.swap_s(warm=True),
        )

    def limits(self, slot: Slot | None, group_key: GroupKey, slo_s: float, prompt_tokens: float) -> Limits:
        """delta x average batch (QLM algorithm 1), of mega prompts one batch; and what takes the stated share of the SLO to serve, but
        at least `group_min`."""
        policy = self.policy
        served = None if slot is None else self._service(slot.facts, group_key, prompt_tokens)
        if served is None:
            most = max(1, int(policy.delta * policy.unassigned_batch))
            return Limits(live=most, waiting=most)
        batches = 1.0 if group_key.cluster == MEGA else policy.delta
        live = max(1, int(batches * served.batch))
        by_time = policy.group_service_fraction * slo_s / served.work.mean
        return Limits(live=live, waiting=min(live, max(policy.group_min, int(min(by_time, live)))))

    def limits_of(self, board: Board, group: Group) -> Limits | None:
        """The limits of an open group where it stands; None where nobody serves it, so that it is about to move."""
        slot = board.slots.get(group.instance)
        if slot is None or not group.open or not self.can_serve(slot, group.traits.key.model):
            return None
        return self.limits(slot, group.traits.key, group.traits.slo_s, group.waiting_prompt_tokens / group.waiting)

    def gpus(self) -> list[tuple[str, int]]:
        """GPUs and how many of them an instance has, of all that the profiles know."""
        return [] if self._profiles is None else sorted({(row.gpu, row.n_gpu) for row in self._profiles.hardware if not row.instance})

    def step_s(self, slot: Slot, key: GroupKey, prompt_tokens: float, sequences: float) -> float:
        """Seconds of a step of so many requests like those of a class, prefills included (`qlm_core.batch_size`); infinite where the
        instance does not serve them."""
        served = self._service(slot.facts, key, prompt_tokens)
        if served is None:
            return math.inf
        return served.step_base_s + sequences * (served.sequence_s + served.prefill_work_s / served.output.mean)

    def service(self, facts: InstanceFacts, key: GroupKey, prompt_tokens: float) -> Service | None:
        """How an instance serves requests of a class; None where it cannot."""
        return self._service(facts, key, prompt_tokens)

    def _service(self, facts: InstanceFacts, key: GroupKey, prompt_tokens: float) -> Service | None:
        return self._service_of_size(facts, key, round(math.log(max(1.0, prompt_tokens)) / PROMPT_STEP))

    def _service_of_size(self, facts: InstanceFacts, key: GroupKey, size: int) -> Service | None:
        index = (facts, key, size)
        found = self._services.get(index)
        if found is None:
            hardware = self.hardware(facts, key.model)
            if hardware is None or self._profiles is None:
                return None
            if len(self._services) >= CLASSES_MAX:
                self._services.clear()
            output = self._profiles.workload_for(key.model, key.slo_class, key.token_class).output_tokens
            mean_tokens = math.exp(size * PROMPT_STEP)
            found = service_of(mean_tokens, output, hardware, facts.batch_max, prompt_variance=self._prompt_variance(key))
            self._services[index] = found
        return found
