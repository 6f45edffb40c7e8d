"""Predictions from one look at the queue."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from qlm_core.instance import InstanceFacts
from qlm_core.model import ModelSpec
from qlm_core.prediction import GroupView, QueueView
from qlm_core.request import Slo, SloKind
from qlm_core.shipped_profiles import shipped_snapshot
from qlm_gateway.outlook import PREDICTIONS_MAX, Asked, Outlook
from qlm_queue.values import GroupRecord, Overview

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
            version=1,
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


def test_predictions_kept_are_bounded() -> None:
    look = outlook()
    kinds = [Asked(model=MODEL, slo=ASKED.slo, prompt_tokens=1, output_tokens_max=n + 1) for n in range(PREDICTIONS_MAX + 1)]
    found = [look.predict_new(kind) for kind in kinds]
    assert found[-1] is None
    assert None not in found[:-1]


def test_a_waiting_request_is_told_by_its_place() -> None:
    look = outlook((group("first", 3000, 1010.0), group("second", 3001, 1020.0)))
    waits = [look.predict_waiting("second", ahead) for ahead in (3000, 4500, 6000)]
    means = [wait.wait.mean for wait in waits if wait is not None]
    assert means == sorted(means)
    assert means[0] < means[2]
    assert means[1] == pytest.approx((means[0] + means[2]) / 2)
    assert look.predict_waiting("nobody's", 0) is None
