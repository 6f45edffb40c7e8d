"""Predictions of single requests from published waits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from qlm_core.prediction.assessment import Assessment
from qlm_core.prediction.planned_waits import ClassWaits, PlannedWaits, QueueWaits, WaitCurve
from qlm_core.prediction.prediction_views import GroupView, QueueView
from qlm_core.profiles.calibration import CalibratedTime, CalibrationProfile, CalibrationTable
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.pauses import Pause, PauseKind
from qlm_core.vocabulary.request import RequestKey, RequestState, Slo, SloKind
from qlm_gateway.front.status import predict_live
from qlm_gateway.outlook.waits import SINCE_MAX, AcceptedSince, Outlook, RequestShape
from qlm_process.wire import waits as waits_wire
from qlm_queue.values import LiveRequest

MODEL = "mistral-7b"
CATALOGUE = {MODEL: ModelSpec(name=MODEL, profile="Mistral-7B")}
INSTANCE = InstanceFacts(name="a100-0", incarnation="", gpu="A100-80GB", n_gpu=1, engine="", models=(), active_model=MODEL)
REQUEST = RequestShape(model=MODEL, slo=Slo(kind=SloKind.COMPLETION, seconds=60.0), prompt_tokens=100, output_tokens_max=200)
PATIENT = replace(REQUEST, slo=Slo(kind=SloKind.COMPLETION, seconds=5_000.0))
MORE = (0.0, 1.0, 64.0, 1_024.0)
MADE_S = 1_000.0


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


def newcomer(assessment: Assessment, request: RequestShape) -> ClassWaits:
    model, slo_kind, slo_name, tokens = request.key
    of_one = GroupView(
        group_id="",
        model=model,
        slo_kind=slo_kind,
        slo_class=slo_name,
        token_class=tokens,
        waiting=1,
        waiting_prompt_tokens=request.prompt_tokens,
        first_deadline_s=request.slo.deadline_s(MADE_S),
    )
    (made,) = assessment.alone([of_one], MADE_S, MORE)
    assert made is not None
    view, ahead, curve = made
    return ClassWaits(key=request.key, slo_s=request.slo.seconds, instance=view.instance.name, requests_ahead=ahead, curve=curve)


def published(groups: Sequence[GroupView] = (), *, running: int = 0, classes: Sequence[RequestShape] = (REQUEST,)) -> PlannedWaits:
    served = replace(INSTANCE, models=(MODEL,))
    view = QueueView(instance=served, active_model=MODEL, running=running, groups=tuple(groups))
    assessment = Assessment(CATALOGUE, shipped_snapshot(), (view,))
    waiting = sum(each.waiting for each in groups)
    queue = QueueWaits(instance=INSTANCE, running=running, waiting=waiting, alike=waiting, curve=assessment.queue_curve(INSTANCE.name, 64))
    return PlannedWaits(
        made_s=MADE_S,
        plan_version=3,
        profile_version=0,
        counted_to=waiting,
        queues=(queue,),
        classes=tuple(newcomer(assessment, each) for each in classes),
        instances={MODEL: 1},
    )


def outlook(waits: PlannedWaits, pauses: Sequence[Pause] = (), calibration: Sequence[CalibrationProfile] = ()) -> Outlook:
    profiles = replace(shipped_snapshot(), calibration=CalibrationTable(tuple(calibration)))
    return Outlook(waits, CATALOGUE, profiles, AcceptedSince(), pauses, read_s=0.0)


def test_publications_travel_whole() -> None:
    waits = published((group("a", 10, 1_010.0), group("b", 2_000, 1_020.0)), running=5, classes=(REQUEST, PATIENT))
    assert waits_wire.from_body(waits_wire.to_body(waits)) == waits


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x09\x00\x00\x00\x00\x00\x00\xf8\x7f"])
def test_what_are_no_waits_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"PlannedWaits|time"):
        waits_wire.from_body(body)


@pytest.mark.parametrize("column", ["wait_s", "token_s"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_waits_that_are_no_numbers_are_refused(column: str, value: float) -> None:
    waits = published()
    (known,) = waits.classes
    knots = list(getattr(known.curve, column))
    knots[1] = value
    broken = replace(waits, classes=(replace(known, curve=replace(known.curve, **{column: tuple(knots)})),))
    with pytest.raises(ValueError, match="finite"):
        waits_wire.from_body(waits_wire.to_body(broken))


def test_a_curve_has_whole_columns_and_goes_straight_on() -> None:
    with pytest.raises(ValueError, match="same number of knots"):
        WaitCurve((0.0, 1.0), (1.0,), (1.0,), (1.0,), (1.0,))
    curve = WaitCurve((0.0, 10.0), (1.0, 6.0), (4.0, 8.0), (0.1, 0.3), (0.01, 0.02))
    assert [curve.at(ahead).wait.mean for ahead in (0.0, 5.0, 10.0, 20.0)] == pytest.approx([1.0, 3.5, 6.0, 11.0])
    assert curve.at(20.0).token_s == 0.02
    single = WaitCurve((7.0,), (3.0,), (1.0,), (0.1,), (0.01,))
    assert [single.at(ahead).wait.mean for ahead in (0.0, 7.0, 9.0)] == [3.0, 3.0, 3.0]


def test_a_newcomer_has_the_wait_of_its_class_less_the_time_since() -> None:
    look = outlook(published((group("early", 2_000, 1_010.0), group("late", 5_000, 9_000.0))))
    found, later = look.predict_new(REQUEST, MADE_S), look.predict_new(REQUEST, MADE_S + 2.0)
    assert found is not None
    assert later is not None
    assert found.requests_ahead == 2_000
    assert found.wait.mean > 10.0
    assert later.wait.mean == pytest.approx(found.wait.mean - 2.0)
    alone = outlook(published()).predict_new(REQUEST, MADE_S)
    assert alone is not None
    assert alone.wait.mean < 1.0


def test_its_prompt_and_output_are_its_own() -> None:
    look = outlook(published((group("g", 3_000, 1_010.0),)))

    def own_s(request: RequestShape) -> float:
        found = look.predict_new(request, MADE_S)
        assert found is not None
        return found.completion.mean - found.wait.mean

    assert own_s(replace(REQUEST, prompt_tokens=250)) > own_s(REQUEST) > own_s(replace(REQUEST, output_tokens_max=5))


def test_an_unknown_class_goes_by_the_nearest_of_its_model() -> None:
    waits = published((group("g", 2_000, 1_100.0),), classes=(REQUEST, PATIENT))
    look = outlook(waits)
    for seconds, ahead in ((10.0, 0), (1e6, 2_000)):
        found = look.predict_new(replace(REQUEST, slo=Slo(kind=SloKind.COMPLETION, seconds=seconds)), MADE_S)
        assert found is not None
        assert found.requests_ahead == ahead
    assert look.predict_new(replace(REQUEST, slo=Slo(kind=SloKind.PRIORITY, priority=1)), MADE_S) is not None
    assert look.predict_new(replace(REQUEST, model="other"), MADE_S) is None


def test_requests_accepted_since_are_ahead_unless_they_have_time() -> None:
    look = outlook(published((group("g", 10, 1_010.0),), classes=(REQUEST, PATIENT)))
    first = look.predict_new(REQUEST, MADE_S)
    assert first is not None
    for number in range(11, 511):
        look.accepted(PATIENT, number)
    assert look.predict_new(REQUEST, MADE_S) == first
    for number in range(511, 1_011):
        look.accepted(REQUEST, number)
    urgent, patient = look.predict_new(REQUEST, MADE_S), look.predict_new(PATIENT, MADE_S)
    assert urgent is not None
    assert patient is not None
    assert (urgent.requests_ahead, patient.requests_ahead) == (510, 1_010)
    assert patient.wait.mean > urgent.wait.mean > first.wait.mean


def test_a_publication_counts_requests_before_it() -> None:
    since = AcceptedSince()
    for number in range(1, 101):
        since.add("a", 60.0, number)
    since.counted(40)
    assert (since.ahead("a", 60.0), since.ahead("a", 59.0), since.ahead("b", 60.0)) == (60, 0, 0)
    for number in range(101, 2 * SINCE_MAX):
        since.add("a", 60.0, number)
    assert since.ahead("a", 60.0) <= SINCE_MAX


def test_calibration_is_applied_and_the_formulas_word_kept() -> None:
    waits = published((group("g", 2_000, 1_010.0),))
    known = CalibrationProfile(model=MODEL, bias_factor=1.5, evidence_s=1e9, scores=(0.0,) * 24)
    rows = [replace(known, time=each) for each in CalibratedTime]
    own, found = outlook(waits).predict_new(REQUEST, MADE_S), outlook(waits, calibration=rows).predict_new(REQUEST, MADE_S)
    assert own is not None
    assert found is not None
    assert own.own_wait is None
    assert found.own_wait == own.wait
    assert found.wait.mean == pytest.approx(1.5 * own.wait.mean)
    assert found.wait_p99_s == pytest.approx(1.5 * own.wait.mean)


def test_a_waiting_request_goes_by_its_place() -> None:
    look = outlook(published((group("first", 3_000, 1_010.0), group("second", 3_001, 1_020.0))))
    means = [found.wait.mean for ahead in (3_000, 4_500, 6_000) if (found := look.predict_waiting(REQUEST, INSTANCE.name, ahead, MADE_S))]
    assert len(means) == 3
    assert means[0] < means[1] < means[2]
    assert means[1] == pytest.approx((means[0] + means[2]) / 2)
    assert look.predict_waiting(REQUEST, "nobody's", 0, MADE_S) is None
    broken_off, whole = (look.predict_waiting(REQUEST, INSTANCE.name, 2_000, MADE_S, produced) for produced in (190, 0))
    assert broken_off is not None
    assert whole is not None
    assert broken_off.wait == whole.wait
    assert broken_off.completion.mean - broken_off.wait.mean < 0.5 * (whole.completion.mean - whole.wait.mean)


@pytest.mark.parametrize("state", [RequestState.RUNNING, RequestState.PLACED])
def test_a_first_token_that_was_made_is_not_called_late(state: RequestState) -> None:
    """It may have been in time, however long the rest takes."""
    look = outlook(published((group("g", 10, 1_010.0),)))
    found = LiveRequest(
        queue_id="1-0",
        key=RequestKey("default", "r"),
        acceptance_number=1,
        accepted_s=900.0,
        state=state,
        group_id="g",
        incarnation="a100-0/1" if state is RequestState.RUNNING else "",
        attempt=1,
        failed_attempts=0,
        gateway="",
        body=b"",
    )
    for kind, produced, late in ((SloKind.FIRST_TOKEN, 0, 1.0), (SloKind.FIRST_TOKEN, 5, None), (SloKind.COMPLETION, 5, 1.0)):
        request = replace(REQUEST, slo=Slo(kind=kind, seconds=60.0))
        shown = predict_live(found, request, look, MADE_S, place=(INSTANCE.name, 0), produced_tokens=produced)
        assert shown is not None
        assert (shown.probability_late if shown.HasField("probability_late") else None) == late


def test_nothing_is_predicted_for_what_is_paused() -> None:
    look = outlook(published(), [Pause(kind=PauseKind.TENANT, name="a", since_s=1.0)])
    assert look.predict_new(replace(REQUEST, tenant="a"), MADE_S) is None
    assert look.predict_waiting(replace(REQUEST, tenant="a"), INSTANCE.name, 0, MADE_S) is None
    assert look.predict_new(replace(REQUEST, tenant="b"), MADE_S) is not None


def test_an_instance_has_its_share_of_all_that_ends() -> None:
    """A request that is refused waits for those ahead of it on one instance, and not for all that end anywhere."""
    sizes = {"a100-0": (20, 80), "a100-1": (100, 200), "a100-2": (0, 0)}
    queues = tuple(
        QueueWaits(instance=replace(INSTANCE, name=name), running=running, waiting=waiting, alike=0)
        for name, (running, waiting) in sizes.items()
    )
    look = outlook(replace(published(), queues=queues))
    assert look.share_of("a100-0") == pytest.approx(100 / 400)
    assert look.share_of("a100-1") == pytest.approx(300 / 400)
    # An empty instance makes nobody wait: its rate is unknown, and that of all is used.
    assert look.share_of("a100-2") == look.share_of("nobody's") == 1.0


def test_nonsense_in_an_instance_costs_predictions_and_nothing_else() -> None:
    waits = published()
    queue = replace(waits.queues[0], instance=replace(INSTANCE, time_scale=float("nan")))
    look = outlook(replace(waits, queues=(queue,)))
    assert look.predict_new(REQUEST, MADE_S) is None
    assert len(look.failures) == 1
