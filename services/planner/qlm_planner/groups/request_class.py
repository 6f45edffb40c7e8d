"""Which class a request is of: its key (`qlm_core.group`) with its tenant's class, and the cluster of mega prompts. O(1) a request; what
it remembers is bounded."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from qlm_core.group import MEGA, group_key
from qlm_core.hardware_profile import HardwareProfile
from qlm_core.pauses import is_paused
from qlm_core.request import RequestFacts
from qlm_planner.board.board import Board
from qlm_planner.board.group import GroupTraits
from qlm_planner.board.tenants import TenantClasses
from qlm_planner.cost.estimates import Estimates
from qlm_planner.policy import Policy

KINDS = ("fixed", "mega")
"""Of groups: of a fixed token class, of mega prompts."""


@dataclass(slots=True, kw_only=True)
class RequestClasses:
    """Of one leader."""

    tenants: TenantClasses
    mega: MegaRule

    @classmethod
    def of(cls, policy: Policy) -> RequestClasses:
        tenants = TenantClasses(tenants=policy.tenants, forget_s=policy.share_window_s)
        return cls(tenants=tenants, mega=MegaRule(share=policy.mega_fraction))

    def traits(self, facts: RequestFacts, board: Board, estimates: Estimates, now_s: float) -> GroupTraits:
        """Of a group that this request opens or joins."""
        tenant = facts.key.tenant
        key = group_key(facts, self.tenants.of(tenant, now_s, paused=bool(board.pauses) and is_paused(board.pauses, "", tenant)))
        if self.mega.holds(facts, board, estimates):
            key = replace(key, cluster=MEGA)
        return GroupTraits(key=key, slo_s=facts.slo.seconds, priority=facts.slo.priority)

    def counts(self, board: Board) -> dict[str, int]:
        """Open groups by `KINDS`."""
        clusters = (board.groups[group_id].traits.key.cluster for queue in board.queues.values() for group_id in queue)
        found = Counter("mega" if cluster == MEGA else "fixed" for cluster in clusters)
        return {kind: found[kind] for kind in KINDS}


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
            known = [each for slot in board.serving if (each := estimates.hardware(slot.facts, model)) is not None]
            fastest = min(known, key=lambda each: each.slowdown * each.prefill_ms_per_token, default=None)
            self._best[model] = None if fastest is None else (max(each.kv_capacity_tokens for each in known), fastest)
        return self._best[model]
