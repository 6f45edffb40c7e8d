"""Predictions from one look at the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_core.assessment import Assessment
from qlm_core.instance import InstanceFacts
from qlm_core.model import ModelSpec
from qlm_core.prediction_views import GroupView, QueueView
from qlm_core.request import RequestKey, RequestState, Slo, SloKind
from qlm_core.shipped_profiles import shipped_snapshot
from qlm_gateway.joined import STALE_JOINED_MIN, Joined
from qlm_gateway.outlook import AGAIN_MAX, PREDICTIONS_MAX, Asked, Outlook
from qlm_gateway.status import predict_live
from qlm_queue.values import GroupRecord, LiveRequest, Overview

MODEL = "mistral-7b"
CATALOGUE = {MODEL: ModelSpec(name=MODEL, profile="Mistral-7B")}
INSTANCE = InstanceFacts(name="a100-0", incarnation="a100-0/1", gpu="A100-80GB", n_gpu=1, engine="simulated", models=(MODEL,))
ASKED = Asked(model=MODEL, slo=Slo(kind=SloKind.COMPLETION, seconds=60.0), prompt_tokens=100, output_tokens_max=200)


def group(name: str, waiting: int, deadline_s: float) -> GroupView:
    return GroupView(
        group_id=name,
        model=MODEL,
        slo_class="64s",
        token_class="256",
        waiting=waiting,
        waiting_prompt_tokens=100 * waiting,
        first_deadline_s=deadline_s,
    )


def outlook(groups: Sequence[GroupView] = (), instance: InstanceFacts = INSTANCE) -> Outlook:
    records = {
        view.group_id: GroupRecord(
            group_id=view.group_id,
            instance=instance.name,
            last_instance=instance.name,
            waiting=view.waiting,
            live=view.waiting,
            waiting_prompt_tokens=view.waiting_prompt_tokens,
            first_deadline_s=view.first_deadline_s,
            next_deadline_s=view.first_deadline_s,
            last_deadline_s=max(view.first_deadline_s, view.last_deadline_s),
            meta={"model": MODEL},
        )
        for view in groups
    }
    overview = Overview(
        plan_version=0,
        accepted_count=0,
        live=0,
        unplaced=0,
        virtual_queues=(),
        groups=records,
        instances=(),
        incarnations={},
        last_event_id="0",
    )
    view = QueueView(instance=instance, active_model=MODEL, running=0, groups=tuple(groups))
    return Outlook(overview, (view,), CATALOGUE, shipped_snapshot(), seen_s=0.0, made_s=1000.0)


@pytest.mark.parametrize("state", [RequestState.RUNNING, RequestState.PLACED])
def test_a_first_token_that_was_made_is_not_told_as_late(state: RequestState) -> None:
    """It may have come in time, however long the rest takes."""
    look = outlook((group("g", 10, 1010.0),))
    found = LiveRequest(
        queue_id="1-0",
        key=RequestKey("default", "r"),
        acceptance_number=1,
        accepted_s=900.0,
        state=state,
        group_id="g",
        incarnation=INSTANCE.incarnation if state is RequestState.RUNNING else "",
        attempt=1,
        failed_attempts=0,
        gateway="",
        body=b"",
    )
    for kind, produced, late in ((SloKind.FIRST_TOKEN, 0, 1.0), (SloKind.FIRST_TOKEN, 5, None), (SloKind.COMPLETION, 5, 1.0)):
        asked = replace(ASKED, slo=Slo(kind=kind, seconds=60.0))
        told = predict_live(found, asked, look, ahead=0, produced_tokens=produced)
        assert told is not None
        assert (told.probability_late if told.HasField("probability_late") else None) == late


def test_a_request_waits_behind_earlier_deadlines_alone() -> None:
    early, late = group("early", 2000, 1010.0), group("late", 5000, 9000.0)
    found = outlook((early, late)).predict_new(ASKED)
    assert found is not None
    assert found.requests_ahead == 2000
    alone = outlook().predict_new(ASKED)
    assert alone is not None
    assert alone.wait.mean < found.wait.mean


def test_nothing_is_predicted_where_nobody_can_serve_it() -> None:
    look = outlook()
    other = Asked(model="other", slo=ASKED.slo, prompt_tokens=1, output_tokens_max=1)
    assert look.predict_new(other) is None
    assert look.instances_of("other") == 0
    assert look.instances_of(MODEL) == 1


def test_requests_that_are_alike_share_a_prediction() -> None:
    look = outlook((group("g", 10, 1010.0),))
    first = look.predict_new(ASKED)
    assert look.predict_new(Asked(model=MODEL, slo=ASKED.slo, prompt_tokens=200, output_tokens_max=200)) is first
    assert look.predict_new(Asked(model=MODEL, slo=ASKED.slo, prompt_tokens=2000, output_tokens_max=200)) is not first


def test_slos_of_one_class_share_it_and_others_do_not() -> None:
    look = outlook((group("g", 10, 1010.0),))
    first = look.predict_new(ASKED)
    for slo, shared in (
        (Slo(kind=SloKind.COMPLETION, seconds=61.5), True),
        (Slo(kind=SloKind.COMPLETION, seconds=20.0), False),
        (Slo(kind=SloKind.FIRST_TOKEN, seconds=60.0), False),
        (Slo(kind=SloKind.PRIORITY, priority=1), False),
    ):
        found = look.predict_new(Asked(model=MODEL, slo=slo, prompt_tokens=100, output_tokens_max=200))
        assert (found is first) is shared, slo


def test_predictions_kept_are_bounded() -> None:
    look = outlook()
    slos = [Slo(kind=SloKind.PRIORITY, priority=number) for number in range(PREDICTIONS_MAX + 1)]
    kinds = [Asked(model=MODEL, slo=slo, prompt_tokens=1, output_tokens_max=10) for slo in slos]
    found = [look.predict_new(kind) for kind in kinds]
    assert found[-1] is None
    assert None not in found[:-1]


def test_an_instance_has_its_share_of_all_that_ends() -> None:
    """A request that is refused waits for those ahead of it on one instance, and not for all that end anywhere."""
    other = replace(INSTANCE, name="a100-1", incarnation="a100-1/1")
    idle = replace(INSTANCE, name="a100-2", incarnation="a100-2/1")
    views = [
        QueueView(instance=INSTANCE, active_model=MODEL, running=20, groups=(group("a", 50, 1010.0), group("b", 30, 1020.0))),
        QueueView(instance=other, active_model=MODEL, running=100, groups=(group("c", 200, 1010.0),)),
        QueueView(instance=idle, active_model=MODEL, running=0, groups=()),
    ]
    look = Outlook(outlook().overview, views, CATALOGUE, shipped_snapshot(), seen_s=0.0, made_s=1000.0)
    assert look.share_of("a100-0") == pytest.approx(100 / 400)
    assert look.share_of("a100-1") == pytest.approx(300 / 400)
    # What has nothing makes nobody wait: nothing is known of its rate but that of all.
    assert look.share_of("a100-2") == look.share_of("nobody's") == outlook().share_of("a100-0") == 1.0


def test_a_waiting_request_is_told_by_its_place() -> None:
    look = outlook((group("first", 3000, 1010.0), group("second", 3001, 1020.0)))
    waits = [look.predict_waiting(ASKED, "second", ahead) for ahead in (3000, 4500, 6000)]
    means = [wait.wait.mean for wait in waits if wait is not None]
    assert means == sorted(means)
    assert means[0] < means[2]
    assert means[1] == pytest.approx((means[0] + means[2]) / 2)
    assert look.predict_waiting(ASKED, "nobody's", 0) is None


def test_a_waiting_request_has_its_own_prompt_and_limit_and_what_it_made() -> None:
    look = outlook((group("g", 3000, 1010.0),))

    def told(asked: Asked, produced_tokens: int = 0) -> tuple[float, float]:
        found = look.predict_waiting(asked, "g", 2_000, produced_tokens)
        assert found is not None
        return found.wait.mean, found.completion.mean - found.wait.mean

    wait_s, own_s = told(ASKED)
    for asked, longer in ((replace(ASKED, prompt_tokens=8_000), True), (replace(ASKED, output_tokens_max=5), False)):
        assert told(asked)[0] == wait_s
        assert (told(asked)[1] > own_s) is longer, asked
    # One that was broken off after 190 of 200 tokens has 10 to make at most.
    assert told(ASKED, 190)[0] == wait_s
    assert 0.0 < told(ASKED, 190)[1] < 0.5 * own_s


def test_those_of_a_burst_are_told_of_those_who_came_before_them() -> None:
    """One look serves many requests: the hundredth must not be told that nobody is ahead."""
    look = outlook()
    told = []
    for _ in range(2_000):
        found = look.predict_new(ASKED)
        assert found is not None
        look.join(ASKED, found.instance)
        told.append(found)
    ahead = [found.requests_ahead for found in told]
    assert ahead == sorted(ahead)
    assert all(said >= number / 2 - STALE_JOINED_MIN for number, said in enumerate(ahead))
    assert told[-1].wait.mean > told[0].wait.mean
    assert len({id(found) for found in told}) <= AGAIN_MAX + 1


def test_those_who_joined_with_later_deadlines_are_behind() -> None:
    look = outlook((group("g", 10, 1010.0),))
    late = Asked(model=MODEL, slo=Slo(kind=SloKind.COMPLETION, seconds=5_000.0), prompt_tokens=100, output_tokens_max=200)
    for _ in range(500):
        assert look.predict_new(late) is not None
        look.join(late, INSTANCE.name)
    urgent = look.predict_new(ASKED)
    assert urgent is not None
    assert urgent.requests_ahead == 10


def test_nonsense_in_a_profile_costs_predictions_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    look = outlook((group("g", 10, 1010.0),))

    def overflow(*_: object, **__: object) -> None:
        raise OverflowError("out of range")

    monkeypatch.setattr(Assessment, "arriving", overflow)
    monkeypatch.setattr(Assessment, "waiting", overflow)
    assert look.predict_new(ASKED) is None
    assert look.predict_waiting(ASKED, "g", 3) is None
    assert look.failures == ["OverflowError: out of range"] * 2


def test_joining_an_instance_that_is_not_there_changes_nothing() -> None:
    look = outlook()
    look.join(ASKED, "gone")
    assert look.instance("gone") is None
    assert look.instance(INSTANCE.name) is INSTANCE


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(0, 3)), max_size=30), st.lists(st.floats(0.0, 100.0), max_size=10))
def test_joined_requests_keep_the_order_of_deadlines_and_the_count(coming: list[tuple[float, int]], there: list[float]) -> None:
    groups = tuple(group(f"g{number}", 5, deadline_s) for number, deadline_s in enumerate(sorted(there)))
    view = QueueView(instance=INSTANCE, active_model=MODEL, running=0, groups=groups)
    joined = Joined()
    for deadline_s, tokens in coming:
        joined.add(INSTANCE.name, (deadline_s, tokens), replace(group("", 1, deadline_s), waiting_prompt_tokens=tokens))
    shown = joined.on(view)
    deadlines = [each.first_deadline_s for each in shown.groups]
    assert deadlines == sorted(deadlines)
    assert [each for each in shown.groups if not each.group_id.startswith("+")] == list(groups)
    assert sum(each.waiting for each in shown.groups) == 5 * len(there) + len(coming)
    assert sum(each.waiting_prompt_tokens for each in shown.groups) == 500 * len(there) + sum(tokens for _, tokens in coming)
    assert joined.count(INSTANCE.name) == len(coming)
    assert len({each.group_id for each in shown.groups}) == len(shown.groups)


def test_those_who_join_a_group_are_in_it() -> None:
    """Also those with later deadlines than the first of a group behind it."""
    first, second = group("first", 10, 1050.0), group("second", 20, 1_059.5)
    look = outlook((first, replace(second, token_class="1024")))
    for number in range(500):
        found = look.predict_new(ASKED)
        assert found is not None
        assert 10 + number / 2 - STALE_JOINED_MIN <= found.requests_ahead <= 10 + number
        look.join(ASKED, found.instance)
    joined = Joined()
    joined.add(INSTANCE.name, "kind", replace(first, group_id="", waiting=1, waiting_prompt_tokens=70), "first")
    joined.add(INSTANCE.name, "kind", replace(first, group_id="", waiting=1, waiting_prompt_tokens=30), "first")
    joined.add(INSTANCE.name, "other", replace(first, group_id="", waiting=1), "gone")
    groups = joined.on(QueueView(instance=INSTANCE, active_model=MODEL, running=0, groups=(first, second))).groups
    assert [(each.group_id, each.waiting, each.waiting_prompt_tokens) for each in groups] == [
        ("first", 12, 1_100),
        ("+1", 1, 1_000),
        ("second", 20, 2_000),
    ]


def test_those_who_join_have_their_own_deadlines() -> None:
    """Of those in a group the last one counts, of those that are alike the first and the last."""
    there = replace(group("there", 10, 1_050.0), last_deadline_s=1_052.0)
    joined = Joined()
    for deadline_s in (1_060.0, 1_055.0):
        joined.add(INSTANCE.name, "in it", group("", 1, deadline_s), "there")
    for deadline_s in (1_070.0, 1_080.0, 1_075.0):
        joined.add(INSTANCE.name, "alike", group("", 1, deadline_s))
    groups = joined.on(QueueView(instance=INSTANCE, active_model=MODEL, running=0, groups=(there,))).groups
    assert [(each.waiting, each.first_deadline_s, each.last_deadline_s) for each in groups] == [
        (12, 1_050.0, 1_060.0),
        (3, 1_070.0, 1_080.0),
    ]
