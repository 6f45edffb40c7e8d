"""How many requests run at once (`agent.batch`): the agent's figures of its classes, for `qlm_core.operations.batch_size`.

Arrivals of a class are its pulled requests, and the growth of its waiting groups between two pulls, over the time of an output. Output
lengths are learned from the agent's runs (`expectations`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qlm_agent.decisions.events import PulledRun, QueueHead, WaitingGroup
from qlm_agent.decisions.expectations import Expectations
from qlm_agent.decisions.runs import RunTable
from qlm_agent.decisions.settings import MachineSettings
from qlm_core.operations.batch_size import BatchChoice, ClassDemand
from qlm_core.vocabulary.group import shortest_slo_s

ClassKey = tuple[str, str, bool]
"""Model, SLO class, whether the SLO bounds the first token."""

SNAPSHOTS = 16
"""Arrival counts are kept for this many windows of rate measurement."""

CHOOSE_EVERY_S = 1.0
"""Minimum time between two choices: the size follows classes and rates, not single requests."""

PROMPTS_KEPT = 32
"""Prompts of a class after which their mean has forgotten earlier ones."""

REPORT_STEP = 1.25
"""Sizes within this ratio are reported as one: each reported size changes plans and predictions."""

CLASSES_MAX = 200
"""Most classes that are known; further ones have no limit of their own."""


@dataclass(slots=True, kw_only=True)
class _Class:
    """Figures of a class. `pulled`: its requests, each counted once."""

    slo_s: float
    prompt_tokens: float
    pulled: int = 0


class BatchSize:
    """`limit`: most requests of the active model to run at once, as it was chosen last; `reported`: that, to within `REPORT_STEP`."""

    def __init__(self, settings: MachineSettings, runs: RunTable, expectations: Expectations) -> None:
        self._settings = settings
        self._runs = runs
        self._expectations = expectations
        self._classes: dict[ClassKey, _Class] = {}
        self._choices: dict[str, BatchChoice] = {}  # by model
        self._snapshots: deque[tuple[float, dict[ClassKey, int]]] = deque(maxlen=SNAPSHOTS)
        self._chosen_for = ""
        self._choose_at_s = -math.inf
        self.limit = self.reported = settings.batch_max

    def record_pull(self, run: PulledRun) -> None:
        """Learns from a request that is owned now."""
        key = (run.model, run.slo_class, run.first_token)
        known = self._classes.get(key)
        if run.slo_s == math.inf or run.displacements or (known is None and len(self._classes) >= CLASSES_MAX):
            return
        if known is None:
            known = self._classes[key] = _Class(slo_s=run.slo_s, prompt_tokens=run.prompt_tokens)
        known.pulled += 1
        known.prompt_tokens += (run.prompt_tokens - known.prompt_tokens) / min(known.pulled, PROMPTS_KEPT)
        known.slo_s = run.slo_s

    def choose(self, now_s: float, model: str, head: QueueHead | None, behind: Sequence[WaitingGroup]) -> None:
        """Chooses a size for the active model, if a choice is due."""
        hardware, other = self._expectations.hardware.get(model), model != self._chosen_for
        if not self._settings.batch_by_slo or hardware is None:
            self.limit = self._settings.batch_max
        elif now_s >= self._choose_at_s or other:
            self._choose_at_s, self._chosen_for = now_s + CHOOSE_EVERY_S, model
            groups: tuple[QueueHead | WaitingGroup, ...] = () if head is None else (head, *behind)
            demands = self._demands(now_s, model, groups)
            others = [(group.first_deadline_s - now_s, group.waiting) for group in groups if group.model != model]
            choice = self._choices.setdefault(model, BatchChoice(self._settings.batch_max))
            self.limit = choice.choose(hardware, demands, slowdown=self._expectations.slowdown(model), others=others)
        if other or not self.reported / REPORT_STEP < self.limit < self.reported * REPORT_STEP:
            self.reported = self.limit

    def _demands(self, now_s: float, model: str, groups: Sequence[QueueHead | WaitingGroup]) -> list[ClassDemand]:
        running = defaultdict[ClassKey, list[tuple[float, float]]](list)
        waiting = defaultdict[ClassKey, list[tuple[float, int]]](list)
        prefilling = Counter[ClassKey]()
        for run in self._runs.on_gpu():
            key = (run.model, run.slo_class, run.first_token)
            running[key].append((run.produced, run.urgency.deadline_s - now_s))
            prefilling[key] += not run.started
        for group in groups:
            waiting[group.model, group.slo_class, group.first_token].append((group.first_deadline_s - now_s, group.waiting))
        arrived = {key: known.pulled + sum(count for _, count in waiting.get(key, ())) for key, known in self._classes.items()}
        rates = self._rates(now_s, model, arrived)
        demands = []
        for key in dict.fromkeys((*waiting, *running)):
            if key[0] != model:
                continue
            known = self._classes.get(key)
            demands.append(
                ClassDemand(
                    slo_s=shortest_slo_s(key[1]) if known is None else known.slo_s,
                    first_token=key[2],
                    arrivals_per_s=rates.get(key, 0.0),
                    running=running.get(key, ()),
                    waiting=waiting.get(key, ()),
                    prompt_tokens=0.0 if known is None else known.prompt_tokens,
                    uncached_share=self._expectations.uncached_share(model, key[1]),
                    outputs=self._expectations.outputs(model, key[1]),
                    prefilling=prefilling[key],
                )
            )
        return demands

    def _rates(self, now_s: float, model: str, arrived: Mapping[ClassKey, int]) -> dict[ClassKey, float]:
        """Arrivals a second by class, over the time of an output in the largest batch."""
        window_s = self._expectations.output_s(model, self._settings.batch_max)
        kept = self._snapshots
        if not kept or now_s - kept[-1][0] >= window_s / SNAPSHOTS:
            kept.append((now_s, dict(arrived)))
        then_s, before = kept[0]
        return {key: max(0, count - before.get(key, 0)) / max(now_s - then_s, window_s / SNAPSHOTS) for key, count in arrived.items()}
