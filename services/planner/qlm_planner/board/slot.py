"""An instance on the board, with its running requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from qlm_core.prediction.reported_runs import ReportedRuns
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_planner.board.group import Group, GroupTraits


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """An agent's report of its engine, in tokens: KV in use, its capacity (0: unknown), and prompts of requests on the engine without a
    first token. `token_s`: from one token of a request to its next; 0: unknown."""

    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    prefill_left_tokens: int = 0
    token_s: float = 0.0


NO_LOAD = EngineLoad()
"""The load of an agent that has reported nothing."""


@dataclass(slots=True, kw_only=True)
class Running:
    """Requests of one group that run on an instance."""

    traits: GroupTraits
    count: int = 0


@dataclass(slots=True, kw_only=True)
class Slot:
    """`lost_s`: when its lease was first seen lost, None while it holds. `running`: requests that it owns, of the groups `runners`.
    `active_model`: by its agent's report (it may still load); before the first report the model of its first pulled group, or "".
    `loading_since_s` (as in `InstanceFacts`), `runs`: its agent's report at the last overview. `batches`: model -> reported batch. `load`:
    its agent's last heartbeat; `pulled_tokens`: prompts that it has pulled since."""

    facts: InstanceFacts
    alive: bool = True
    lost_s: float | None = None
    running: int = 0
    runners: dict[str, Running] = field(default_factory=dict)
    active_model: str = ""
    warm_models: tuple[str, ...] = ()
    loading_since_s: float = 0.0
    runs: ReportedRuns | None = None
    batches: dict[str, int] = field(default_factory=dict)
    load: EngineLoad = NO_LOAD
    pulled_tokens: int = 0

    def batch(self, model: str) -> int:
        """Most requests of a model that run at once."""
        return min(self.facts.batch_max, self.batches.get(model, self.facts.batch_max))

    def report_batch(self, batch: int) -> None:
        """Records the batch of the active model that the agent reports."""
        if batch > 0 and self.active_model:
            self.batches[self.active_model] = batch

    @property
    def serving(self) -> bool:
        """Whether it accepts groups."""
        return self.alive and not self.facts.draining

    def add_running(self, group: Group, count: int) -> None:
        """Counts requests of a group as running here."""
        kept = self.runners.get(group.group_id)
        if kept is None:
            kept = self.runners[group.group_id] = Running(traits=group.traits)
        kept.count += count

    def end_running(self, group_id: str) -> None:
        """Removes one running request of a group."""
        self.running = max(0, self.running - 1)
        kept = self.runners.get(group_id)
        if kept is not None:
            kept.count -= 1
            if kept.count <= 0:
                del self.runners[group_id]
