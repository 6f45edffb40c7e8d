"""An instance as the board has it, with the requests that run there."""

from __future__ import annotations

from dataclasses import dataclass, field

from qlm_core.instance import InstanceFacts
from qlm_core.reported_runs import RunsTold
from qlm_planner.board.group import Group, GroupTraits


@dataclass(slots=True, kw_only=True)
class Running:
    """Requests of one group that an instance runs."""

    traits: GroupTraits
    count: int = 0


@dataclass(slots=True, kw_only=True)
class Slot:
    """An instance as the planner sees it. `lost_s`: since when its lease is gone, None while it holds. `running`: requests that it owns,
    of the groups `runners`. `active_model`: the one that its agent reports, which may still be loading; before the first report that of
    the group it pulled from first, or "". `loading_since_s` (as of `InstanceFacts`), `runs`: as its agent reported them, at the last
    overview. `batches`: how many requests it runs at once of a model, as its agent reported last."""

    facts: InstanceFacts
    alive: bool = True
    lost_s: float | None = None
    running: int = 0
    runners: dict[str, Running] = field(default_factory=dict)
    active_model: str = ""
    warm_models: tuple[str, ...] = ()
    loading_since_s: float = 0.0
    runs: RunsTold | None = None
    batches: dict[str, int] = field(default_factory=dict)

    def batch(self, model: str) -> int:
        """Most requests of a model that it runs at once."""
        return min(self.facts.batch_max, self.batches.get(model, self.facts.batch_max))

    def report_batch(self, batch: int) -> None:
        """Its agent says how many requests of the active model it runs at once."""
        if batch > 0 and self.active_model:
            self.batches[self.active_model] = batch

    @property
    def serving(self) -> bool:
        """It may be given groups."""
        return self.alive and not self.facts.draining

    def took(self, group: Group, count: int) -> None:
        """Requests of a group run here now."""
        kept = self.runners.get(group.group_id)
        if kept is None:
            kept = self.runners[group.group_id] = Running(traits=group.traits)
        kept.count += count

    def let_go(self, group_id: str) -> None:
        """One request of a group runs here no more."""
        self.running = max(0, self.running - 1)
        kept = self.runners.get(group_id)
        if kept is not None:
            kept.count -= 1
            if kept.count <= 0:
                del self.runners[group_id]
