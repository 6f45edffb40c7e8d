"""A whole plan at once: list scheduling by earliest deadline, where a group may join the last run of its model on a queue if the slack
of everything behind absorbs its time. A small portfolio of it is built; the cheapest counts.

Works with means; the cost of what comes out is that of `timeline`. Heads of queues that run stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from qlm_planner.board import Group, Slot
from qlm_planner.estimates import Estimates
from qlm_planner.policy import Policy
from qlm_planner.terms import Engine, Term

RUNS_BEHIND_MAX = 32
"""A join looks past so many runs at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One construction. `swap_factor`: how much a swap counts beside its time. `lost_absorb`: groups that are late already do not stand
    in the way of a join (under overload nobody has slack, and plain deadline order would swap at every group)."""

    swap_factor: float
    lost_absorb: bool


PORTFOLIO = tuple(Rule(swap_factor=factor, lost_absorb=absorb) for factor in (1.0, 0.0, 3.0) for absorb in (False, True))
SHORT_PORTFOLIO = PORTFOLIO[:2]


@dataclass(slots=True, kw_only=True)
class Run:
    """Groups of one model and band in a row. `slack_s`: the least time until one of them is late."""

    model: str
    band: int
    end_s: float
    slack_s: float
    requests: int = 0
    groups: list[Group] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Track:
    """One queue under construction; times in seconds from now."""

    slot: Slot
    engine: Engine
    free_s: float
    runs: list[Run] = field(default_factory=list)

    @property
    def model(self) -> str:
        return self.runs[-1].model if self.runs else self.engine.active_model

    def setup_s(self, term: Term) -> float:
        if self.model == term.model:
            return 0.0
        return term.warm_s if term.model in self.slot.warm_models else term.cold_s

    def append(self, group: Group, term: Term, now_s: float) -> None:
        begin_s = self.free_s + self.setup_s(term)
        self.free_s = begin_s + term.work_s
        slack_s = term.deadline_s - now_s - self.free_s - term.own_s
        if not self.runs or (self.runs[-1].model, self.runs[-1].band) != (term.model, term.band):
            self.runs.append(Run(model=term.model, band=term.band, end_s=begin_s, slack_s=slack_s))
        run = self.runs[-1]
        run.groups.append(group)
        run.requests += term.count
        run.end_s = self.free_s
        run.slack_s = min(run.slack_s, slack_s)

    def joinable(self, term: Term, rule: Rule) -> int:
        """The last run of the model, if all behind it can wait for this group; -1 for none (or if it is the last: then append)."""
        for place in range(len(self.runs) - 1, max(-1, len(self.runs) - 1 - RUNS_BEHIND_MAX), -1):
            run = self.runs[place]
            if run.band != term.band:
                return -1
            if run.model == term.model:
                return place if place < len(self.runs) - 1 else -1
            if run.slack_s < term.work_s and not (rule.lost_absorb and run.slack_s < 0.0):
                return -1
        return -1

    def join(self, place: int, group: Group, term: Term, now_s: float) -> None:
        run = self.runs[place]
        run.groups.append(group)
        run.requests += term.count
        run.end_s += term.work_s
        run.slack_s = min(run.slack_s, term.deadline_s - now_s - run.end_s - term.own_s)
        for behind in self.runs[place + 1 :]:
            behind.end_s += term.work_s
            behind.slack_s -= term.work_s
        self.free_s += term.work_s

    def groups(self) -> Iterator[Group]:
        for run in self.runs:
            yield from run.groups


Option = tuple[Group, Sequence[Term | None]]
"""A group and its terms on each slot, None where the slot cannot serve it."""

Choice = tuple[float, float, Track, Term, int]
"""Where a group would go: (value, its end, the track, its terms there, the run it joins or -1 for the end of the track)."""


def construct(
    slots: Sequence[Slot], heads: Sequence[Sequence[Group]], groups: Sequence[Option], estimates: Estimates, rule: Rule, now_s: float
) -> list[list[Group]]:
    """An order for each slot: its head first, then those of `groups`, which come most urgent first, each served by at least one slot."""
    tracks: list[Track] = []
    for slot, head in zip(slots, heads, strict=True):
        engine = estimates.engine(slot)
        track = Track(slot=slot, engine=engine, free_s=engine.left_s)
        for group in head:
            track.append(group, estimates.term(slot, group), now_s)
        tracks.append(track)
    for group, terms in groups:
        best: Choice | None = None
        for track, term in zip(tracks, terms, strict=True):
            if term is not None:
                for choice in _choices(track, term, rule, estimates.policy, now_s):
                    if best is None or (choice[0], choice[1]) < (best[0], best[1]):
                        best = choice
        assert best is not None, "a group that no slot can serve was to be planned"
        _, _, track, term, place = best
        if place < 0:
            track.append(group, term, now_s)
        else:
            track.join(place, group, term, now_s)
    return [list(track.groups()) for track in tracks]


def _choices(track: Track, term: Term, rule: Rule, policy: Policy, now_s: float) -> Iterator[Choice]:
    setup_s = track.setup_s(term)
    end_s = track.free_s + setup_s + term.work_s
    value = _value(term, end_s, policy, now_s) + rule.swap_factor * policy.work_weight * setup_s
    yield (value, end_s, track, term, -1)
    place = track.joinable(term, rule)
    if place >= 0:
        joined_s = track.runs[place].end_s + term.work_s
        # Those behind wait longer for it.
        behind = sum(run.requests for run in track.runs[place + 1 :])
        value = _value(term, joined_s, policy, now_s) + policy.completion_weight * behind * term.work_s
        yield (value, joined_s, track, term, place)


def _value(term: Term, end_s: float, policy: Policy, now_s: float) -> float:
    """Cost of a group that ends then, by its mean: its requests end evenly over its work."""
    over_s = now_s + end_s + term.own_s - term.deadline_s
    value = policy.completion_weight * term.count * end_s
    if over_s > 0.0:
        late_share = min(1.0, over_s / term.work_s) if term.work_s > 0.0 else 1.0
        tardiness_s = over_s - 0.5 * late_share * term.work_s
        value += term.count * late_share * policy.late_weight + term.count * late_share * tardiness_s * policy.tardiness_weight
    return value
