"""Where a new request would join: the newest open group of its key, as the planner does it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from qlm_core.instance import InstanceFacts
from qlm_core.open_groups import BATCHES, OVERTAKE_FRACTION, OVERTAKE_MIN_S, OVERTAKEN_LOOK, SPREAD_FRACTION, OpenGroups
from qlm_core.prediction_views import GroupView, QueueView
from qlm_core.request import SloKind
from qlm_planner.groups import assignment
from qlm_planner.policy import Policy

SLO_S = 60.0


def group(deadline_s: float, *, waiting: int = 10, model: str = "m", kind: SloKind = SloKind.COMPLETION, tokens: str = "256") -> GroupView:
    return GroupView(
        group_id=f"{deadline_s}",
        model=model,
        slo_kind=kind,
        slo_class="64s",
        token_class=tokens,
        waiting=waiting,
        waiting_prompt_tokens=waiting,
        first_deadline_s=deadline_s,
    )


def view(name: str, *groups: GroupView, draining: bool = False) -> QueueView:
    facts = InstanceFacts(name=name, incarnation=name, gpu="G", n_gpu=1, engine="simulated", models=("m",), draining=draining, batch_max=8)
    return QueueView(instance=facts, active_model="m", running=0, groups=groups)


REQUEST = group(100.0, waiting=1)


def test_it_joins_the_newest_group_of_its_key_wherever_that_is() -> None:
    found = OpenGroups([view("a", group(90.0)), view("b", group(80.0), group(95.0)), view("c", group(99.0, model="other"))])
    assert found.group_for(REQUEST, SLO_S) == "95.0"


@pytest.mark.parametrize(
    "other",
    [group(95.0, model="n"), group(95.0, tokens="1024"), group(95.0, kind=SloKind.FIRST_TOKEN), replace(group(95.0), slo_class="32s")],
)
def test_groups_of_other_keys_are_none_to_join(other: GroupView) -> None:
    assert OpenGroups([view("a", other)]).group_for(REQUEST, SLO_S) == ""


def test_a_full_group_and_one_of_far_deadlines_are_none_to_join() -> None:
    full = group(95.0, waiting=int(BATCHES * 8))
    assert OpenGroups([view("a", full)]).group_for(REQUEST, SLO_S) == ""
    assert OpenGroups([view("a", replace(full, waiting=full.waiting - 1))]).group_for(REQUEST, SLO_S) == "95.0"
    far = group(100.0 - SPREAD_FRACTION * SLO_S - 1.0)
    assert OpenGroups([view("a", far)]).group_for(REQUEST, SLO_S) == ""


def test_priorities_have_no_deadlines_to_be_apart() -> None:
    queue = view("a", group(math.inf, kind=SloKind.PRIORITY))
    assert OpenGroups([queue]).group_for(group(math.inf, kind=SloKind.PRIORITY), math.inf) == "inf"


def test_nothing_joins_an_instance_that_drains() -> None:
    assert OpenGroups([view("a", group(95.0), draining=True)]).group_for(REQUEST, SLO_S) == ""
    assert OpenGroups([]).group_for(REQUEST, SLO_S) == ""


def test_it_joins_nothing_in_front_of_those_who_came_much_earlier() -> None:
    """By more than a second, and by more than a tenth of how long the first has waited."""
    near, far = group(99.0, tokens="1024"), group(98.5, tokens="1024")
    assert OpenGroups([view("a", group(95.0), near)]).group_for(REQUEST, SLO_S) == "95.0"
    assert OpenGroups([view("a", group(95.0), far)]).group_for(REQUEST, SLO_S) == ""
    first = group(84.0, tokens="64")
    assert OpenGroups([view("a", first, group(95.0), far)]).group_for(REQUEST, SLO_S) == "95.0", "1.5 of 16 s"
    assert OpenGroups([view("a", far, group(95.0))]).group_for(REQUEST, SLO_S) == "95.0", "who stands before it is not overtaken"


@pytest.mark.parametrize(
    "other", [group(90.0, model="n"), replace(group(90.0, tokens="1024"), slo_class="32s"), replace(group(90.0), band=1)]
)
def test_who_is_not_alike_is_not_overtaken(other: GroupView) -> None:
    assert OpenGroups([view("a", group(95.0), replace(other, token_class="1024"))]).group_for(REQUEST, SLO_S) == "95.0"


def test_it_guesses_with_the_planners_defaults() -> None:
    policy = Policy()
    assert (policy.delta, policy.group_spread_fraction) == (BATCHES, SPREAD_FRACTION)
    assert (policy.group_overtake_fraction, policy.group_overtake_min_s) == (OVERTAKE_FRACTION, OVERTAKE_MIN_S)
    assert OVERTAKEN_LOOK == assignment.OVERTAKE_GROUPS
