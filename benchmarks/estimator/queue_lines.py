"""Virtual queues as they are seen from outside the engines, as the planner's board has them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from qlm_agent.decisions.runs import Run
from qlm_core.prediction.prediction_views import GroupView, QueueView, RunningView
from qlm_core.statistics.length_model import LengthGuess
from qlm_core.vocabulary.group import GroupKey
from qlm_core.vocabulary.instance import InstanceFacts

ARRIVALS_OVER_S = 60.0
"""Time that the rate of arrivals is taken over."""


@dataclass(slots=True)
class Group:
    """A group of a virtual queue: its waiting requests. `turn`: those of lower ones are served before it."""

    group_id: str
    turn: int
    key: GroupKey
    first_deadline_s: float
    waiting: int = 0
    prompt_tokens: int = 0


@dataclass(slots=True)
class Line:
    """A virtual queue: its groups in the order of service, how many run, and when requests were put on it lately."""

    facts: InstanceFacts
    groups: dict[str, Group] = field(default_factory=dict)
    active: str = ""
    running: int = 0
    arrivals_s: deque[float] = field(default_factory=deque)

    def arrivals_per_s(self, now_s: float) -> float:
        """Over the last ARRIVALS_OVER_S."""
        while self.arrivals_s and self.arrivals_s[0] < now_s - ARRIVALS_OVER_S:
            self.arrivals_s.popleft()
        return len(self.arrivals_s) / ARRIVALS_OVER_S

    def view(self, now_s: float, runners: tuple[RunningView, ...], last: str = "") -> QueueView:
        """The queue now; `runners`: who runs; `last`: the group that is served last of its turn."""
        groups = tuple(
            GroupView(
                group_id=group.group_id,
                model=group.key.model,
                slo_class=group.key.slo_class,
                token_class=group.key.token_class,
                waiting=group.waiting,
                waiting_prompt_tokens=group.prompt_tokens,
                first_deadline_s=group.first_deadline_s,
            )
            for group in sorted(self.groups.values(), key=lambda group: (group.turn, group.group_id == last))
        )
        return QueueView(
            instance=self.facts,
            active_model=self.active,
            running=self.running,
            groups=groups,
            warm_models=tuple(model for model in self.facts.models if model != self.active),
            runners=runners,
            arrivals_per_s=self.arrivals_per_s(now_s),
        )


@dataclass(frozen=True, slots=True)
class Known:
    """The facts of a request, known from its arrival on."""

    key: GroupKey
    guess: LengthGuess


def runners(runs: Iterable[Run], known: Mapping[int, Known]) -> tuple[RunningView, ...]:
    """The runs by class, with the output of each as last reported."""
    classes: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        key = known[int(run.run_id)].key
        classes.setdefault((key.slo_class, key.token_class), []).append(run)
    return tuple(
        RunningView(
            slo_class=slo,
            token_class=tokens,
            count=len(alike),
            prompt_tokens=sum(run.prompt_tokens for run in alike),
            produced_tokens=tuple(run.produced for run in alike),
            prefill_left_tokens=sum(run.prompt_tokens for run in alike if not run.started),
        )
        for (slo, tokens), alike in classes.items()
    )
