"""What a group costs on an instance: the formulas of `qlm_core.prediction` on one profile snapshot, kept per class of requests.

A class is (instance, group key, prompt length to within 1/8); all its groups share one `Service`. What a group adds is exact: its count and
its known prompt tokens. So the terms of a group cost O(1), and 10,000 groups share a few hundred services.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from qlm_core.group import GroupKey
from qlm_core.instance import InstanceFacts
from qlm_core.model import ModelSpec
from qlm_core.prediction import Service, service
from qlm_core.preemption import Way, displacement_s
from qlm_core.profile import HardwareProfile, ProfileSnapshot
from qlm_core.request import SloKind
from qlm_planner.board import Group, Running, Slot
from qlm_planner.policy import Policy

PROMPT_STEP = math.log(1.25)
"""Prompt lengths whose ratio is below this share a class."""

CLASSES_MAX = 50_000
"""Classes and terms kept for one snapshot; beyond it all are worked out again."""

TermKey = tuple[str, int, int, float]
"""(incarnation, waiting, their prompt tokens, first deadline): what a group's terms depend on besides its traits and the snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A group as one instance would serve it; seconds of engine time, of a group of `count` requests. `own_s`, `own_variance`: from a
    request's start to what its SLO bounds. `credit_s`: work that a full batch takes in at once. `drain_s`: from the last start to the last
    end. `cold_s`, `warm_s`: making its model the active one. `model_code`: stands for the model in arrays."""

    group_id: str
    model: str
    model_code: int
    band: int
    deadline_s: float
    slo_s: float
    count: int
    work_s: float
    work_variance: float
    own_s: float
    own_variance: float
    credit_s: float
    drain_s: float
    cold_s: float
    warm_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What an instance does now. `left_s`: work of the requests that run; `drain_s`: until the last of them ends; `clear_s`: until all of
    them could have given way. `runners`: by group, as terms of what is left of them, with what giving way costs in their `work_s`, and
    `displacement_s` of that for each request. `runs_left_s`: expected time until one of them ends."""

    active_model: str
    model_code: int
    left_s: float
    drain_s: float
    clear_s: float = 0.0
    displacement_s: float = 0.0
    runs_left_s: float = 0.0
    runners: tuple[Term, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Most requests of a group: those that are not terminal, and those that wait."""

    live: int
    waiting: int


@dataclass(slots=True)
class Estimates:
    """Knows nothing until `load`. `version` grows with each load."""

    policy: Policy
    version: int = 0
    _catalogue: Mapping[str, ModelSpec] = field(default_factory=dict)
    _profiles: ProfileSnapshot | None = None
    _hardware: dict[tuple[InstanceFacts, str], HardwareProfile | None] = field(default_factory=dict)
    _services: dict[tuple[InstanceFacts, GroupKey, int], Service | None] = field(default_factory=dict)
    _terms: dict[str, tuple[TermKey, Term]] = field(default_factory=dict)
    _codes: dict[str, int] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return self._profiles is not None

    def load(self, catalogue: Mapping[str, ModelSpec], profiles: ProfileSnapshot) -> None:
        self._catalogue = dict(catalogue)
        self._profiles = profiles
        self._hardware.clear()
        self._services.clear()
        self._terms.clear()
        self.version += 1

    def code(self, model: str) -> int:
        """The number that stands for a model in arrays; every name has its own."""
        return self._codes.setdefault(model, len(self._codes))

    def hardware(self, facts: InstanceFacts, model: str) -> HardwareProfile | None:
        """The profile of a model on an instance; None where it does not serve the model or nobody has measured the pair."""
        key = (facts, model)
        if key not in self._hardware:
            spec = self._catalogue.get(model) if model in facts.models else None
            found = None if spec is None or self._profiles is None else self._profiles.hardware_for(facts, spec)
            self._hardware[key] = found
        return self._hardware[key]

    def can_serve(self, slot: Slot, model: str) -> bool:
        """It may be given groups, and has the model and a profile of it."""
        return slot.serving and self.hardware(slot.facts, model) is not None

    def kept_term(self, slot: Slot, group: Group) -> Term:
        """`term`, kept until the group changes: for the groups that stand on the instance's queue."""
        key = (slot.facts.incarnation, group.waiting, group.waiting_prompt_tokens, group.first_deadline_s)
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
            return _weightless(group, self.code(key.model))
        work = served.output.scaled(served.token_s).repeated(group.waiting)
        own = served.decode(group.waiting, group.waiting)
        drain = served.drain(group.waiting, full=group.waiting > served.batch, behind=0.0)
        first_token = key.slo_kind is SloKind.FIRST_TOKEN
        return Term(
            group_id=group.group_id,
            model=key.model,
            model_code=self.code(key.model),
            band=group.band,
            deadline_s=group.first_deadline_s,
            slo_s=group.traits.slo_s,
            count=group.waiting,
            work_s=work.mean + hardware.prefill_work_s(group.waiting_prompt_tokens),
            work_variance=work.variance,
            own_s=served.prefill_s + (0.0 if first_token else own.mean),
            own_variance=0.0 if first_token else own.variance,
            credit_s=served.batch_left_s,
            drain_s=served.prefill_s + drain.mean,
            cold_s=hardware.swap_s(warm=False),
            warm_s=hardware.swap_s(warm=True),
        )

    def engine(self, slot: Slot) -> Engine:
        """What runs on an instance, of any class of its active model."""
        hardware = self.hardware(slot.facts, slot.active_model)
        code = self.code(slot.active_model)
        if hardware is None or self._profiles is None or slot.running == 0:
            return Engine(active_model=slot.active_model, model_code=code, left_s=0.0, drain_s=0.0)
        workload = self._profiles.workload_for(slot.active_model, "", "")
        running = service(workload.prompt_tokens_mean, workload.output_tokens, hardware, slot.facts.batch_max)
        # What a running request has made is in the mean what it has still to make (the age of a renewal process).
        context_tokens = round(workload.prompt_tokens_mean + running.left_tokens)
        return Engine(
            active_model=slot.active_model,
            model_code=code,
            left_s=slot.running * running.left_tokens * running.token_s,
            drain_s=running.drain(slot.running, full=True, behind=0.0).mean,
            clear_s=slot.running * displacement_s(Way.OFFLOAD, context_tokens, hardware) / 2.0,
            displacement_s=displacement_s(Way.ABORT, context_tokens, hardware),
            runs_left_s=running.left_tokens * running.step_s,
            runners=tuple(self._runner(code, kept, running, context_tokens, hardware) for _, kept in sorted(slot.runners.items())),
        )

    def _runner(self, code: int, kept: Running, running: Service, context_tokens: int, hardware: HardwareProfile) -> Term:
        """The requests of a group that run, as a group that gave way: what is left of them, and their KV computed again. The dearer way is
        assumed: how much host memory is left for KV, the planner does not know."""
        redo_s = displacement_s(Way.ABORT, context_tokens, hardware)
        answered = kept.traits.key.slo_kind is SloKind.FIRST_TOKEN
        work = running.output.scaled(running.token_s).repeated(kept.count)
        return Term(
            group_id="",
            model=kept.traits.key.model,
            model_code=code,
            band=kept.band,
            deadline_s=math.inf if answered else kept.deadline_s,
            slo_s=kept.traits.slo_s,
            count=kept.count,
            work_s=kept.count * (running.left_tokens * running.token_s + redo_s),
            work_variance=work.variance,
            own_s=running.left_tokens * running.step_s + redo_s,
            own_variance=running.output.variance * running.step_s**2,
            credit_s=running.batch_left_s,
            drain_s=running.drain(kept.count, full=True, behind=0.0).mean,
            cold_s=hardware.swap_s(warm=False),
            warm_s=hardware.swap_s(warm=True),
        )

    def limits(self, slot: Slot | None, group_key: GroupKey, slo_s: float, prompt_tokens: float) -> Limits:
        """delta x average batch (QLM algorithm 1), and what takes the stated share of the SLO to serve; at least `group_min`."""
        policy = self.policy
        served = None if slot is None else self._service(slot.facts, group_key, prompt_tokens)
        if served is None:
            most = max(1, int(policy.delta * policy.unassigned_batch))
            return Limits(live=most, waiting=most)
        live = max(1, int(policy.delta * served.batch))
        by_time = policy.group_service_fraction * slo_s / served.work.mean
        return Limits(live=live, waiting=min(live, max(policy.group_min, int(min(by_time, live)))))

    def _service(self, facts: InstanceFacts, key: GroupKey, prompt_tokens: float) -> Service | None:
        size = round(math.log(max(1.0, prompt_tokens)) / PROMPT_STEP)
        index = (facts, key, size)
        if index not in self._services:
            if len(self._services) >= CLASSES_MAX:
                self._services.clear()
            hardware = self.hardware(facts, key.model)
            if hardware is None or self._profiles is None:
                self._services[index] = None
            else:
                output = self._profiles.workload_for(key.model, key.slo_class, key.token_class).output_tokens
                self._services[index] = service(math.exp(size * PROMPT_STEP), output, hardware, facts.batch_max)
        return self._services[index]


def _weightless(group: Group, model_code: int) -> Term:
    return Term(
        group_id=group.group_id,
        model=group.traits.key.model,
        model_code=model_code,
        band=group.band,
        deadline_s=math.inf,
        slo_s=math.inf,
        count=0,
        work_s=0.0,
        work_variance=0.0,
        own_s=0.0,
        own_variance=0.0,
        credit_s=0.0,
        drain_s=0.0,
        cold_s=0.0,
        warm_s=0.0,
    )
