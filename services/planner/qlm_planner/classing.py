"""Which class a request is of: its key (`qlm_core.group`) with its tenant's class, and its cluster where it is a mega prompt or classes
are learned. O(1) a request; what it remembers is bounded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from qlm_core.group import LEARNED, MEGA, group_key
from qlm_core.hardware_profile import HardwareProfile
from qlm_core.request import RequestFacts
from qlm_planner.board import Board
from qlm_planner.classes import Centre, Classifier, Family, Samples, family_of, sample_of
from qlm_planner.effects import LearnClasses
from qlm_planner.estimates import Estimates
from qlm_planner.group_meta import GroupTraits
from qlm_planner.items import Group
from qlm_planner.policy import Policy, TokenClasses
from qlm_planner.tenants import TenantClasses


@dataclass(slots=True, kw_only=True)
class Classing:
    """Of one leader. `classifier`: in force now. `learned`: how often classes were. `adopted`: small groups of former classes that were
    taken into new ones."""

    policy: Policy
    fence: int
    tenants: TenantClasses
    mega: MegaRule
    classifier: Classifier = field(default_factory=Classifier)
    samples: Samples = field(default_factory=Samples)
    learned: int = 0
    adopted: int = 0
    _asked: int = 0
    _due_s: float = -math.inf

    @classmethod
    def of(cls, policy: Policy, fence: int) -> Classing:
        tenants = TenantClasses(tenants=policy.tenants, forget_s=policy.share_window_s)
        return cls(policy=policy, fence=fence, tenants=tenants, mega=MegaRule(share=policy.mega_fraction))

    def traits(self, facts: RequestFacts, board: Board, estimates: Estimates, now_s: float) -> GroupTraits:
        """Of a group that this request opens or joins."""
        key = group_key(facts, self.tenants.of(facts.key.tenant, now_s))
        if self.mega.holds(facts, board, estimates):
            key = replace(key, cluster=MEGA)
        elif self.policy.token_classes is TokenClasses.KMEANS:
            expected = facts.predicted_output_tokens or estimates.output_mean(key)
            sample = sample_of(facts.prompt_tokens, expected, key.token_class)
            family = family_of(key)
            self.samples.add(family, sample)
            cluster, token_class = self.classifier.cluster(family, sample)
            key = replace(key, cluster=cluster, token_class=token_class)
        return GroupTraits(key=key, slo_s=facts.slo.seconds, priority=facts.slo.priority)

    # Learning ---------------------------------------------------------------------------------------------------------

    def learn(self, now_s: float) -> LearnClasses | None:
        """What is to be learned now; one at a time."""
        if self.policy.token_classes is not TokenClasses.KMEANS or self._asked > self.learned or now_s < self._due_s:
            return None
        samples = self.samples.enough()
        if not samples:
            return None
        self._asked += 1
        self._due_s = now_s + self.policy.relearn_every_s
        return LearnClasses(number=self._asked, samples=samples)

    def take(self, number: int, families: Mapping[Family, tuple[Centre, ...]], board: Board, estimates: Estimates) -> None:
        """New classes. Requests that come go by them. Open groups go on as whole groups: a small one is taken into the class that its mean
        request is of now, so that it is filled up instead of another one being opened beside it; the others are served as they are."""
        self.learned = number
        self.classifier = self.classifier.renewed(f"{self.fence}.{number}", families)
        for group in board.groups.values():
            if group.open and group.traits.key.cluster != MEGA:
                self._adopt(group, board, estimates)

    def _adopt(self, group: Group, board: Board, estimates: Estimates) -> None:
        key = group.traits.key
        if group.waiting >= self.policy.group_min:
            return
        sample = sample_of(group.waiting_prompt_tokens / group.waiting, estimates.output_mean(key), key.token_class)
        cluster, _ = self.classifier.cluster(family_of(key), sample)
        if cluster and cluster != key.cluster:
            # The token class stays, as others read it in the group's record.
            board.change_key(group, replace(key, cluster=cluster))
            self.adopted += 1

    # For others to see ------------------------------------------------------------------------------------------------

    def counts(self, board: Board) -> dict[str, int]:
        """Open groups by how they were made: "fixed", "kmeans", "mega"."""
        found = Counter(_kind(board.groups[group_id]) for queue in board.queues.values() for group_id in queue)
        return {kind: found[kind] for kind in KINDS}


KINDS = ("fixed", "kmeans", "mega")


def _kind(group: Group) -> str:
    cluster = group.traits.key.cluster
    return "mega" if cluster == MEGA else "kmeans" if cluster.startswith(LEARNED) else "fixed"


@dataclass(slots=True, kw_only=True)
class MegaRule:
    """Mega prompts: requests of which one alone takes a large part of an engine (QLM section 8, workload W_C). They have groups of their
    own, so that the planner sees their cost and may put them on another instance than those they would hold up. `share`: of the KV of the
    instance that has most of it, or of the SLO for the prefill of the fastest one."""

    share: float
    _best: dict[str, tuple[int, HardwareProfile] | None] = field(default_factory=dict)

    def forget(self) -> None:
        """Instances or profiles changed."""
        self._best.clear()

    def holds(self, facts: RequestFacts, board: Board, estimates: Estimates) -> bool:
        """O(1), but for the first request of a model since `forget`. False where no instance serves the model."""
        best = self._of(facts.model, board, estimates)
        if best is None:
            return False
        kv_tokens, fastest = best
        if facts.prompt_tokens + facts.predicted_output_tokens > self.share * kv_tokens:
            return True
        return math.isfinite(facts.slo.seconds) and fastest.prefill_s(facts.prompt_tokens) > self.share * facts.slo.seconds

    def _of(self, model: str, board: Board, estimates: Estimates) -> tuple[int, HardwareProfile] | None:
        if model not in self._best:
            able = [estimates.hardware(slot.facts, model) for _, slot in sorted(board.slots.items()) if estimates.can_serve(slot, model)]
            known = [hardware for hardware in able if hardware is not None]
            self._best[model] = (
                (
                    max(hardware.kv_capacity_tokens for hardware in known),
                    min(known, key=lambda hardware: hardware.slowdown * hardware.prefill_ms_per_token),
                )
                if known
                else None
            )
        return self._best[model]
