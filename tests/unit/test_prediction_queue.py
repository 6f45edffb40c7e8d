"""Times of the groups of a virtual queue: order, swaps, what runs already, lateness and the place of a new request."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predicted_times import GroupTime, NewcomerTimes, group_times, predict_request
from qlm_core.prediction.prediction_service import service
from qlm_core.prediction.prediction_views import GroupView, QueueView, probability_late
from qlm_core.prediction.queue_reader import NoProfile
from qlm_core.profiles.profile import WorkloadProfile
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.statistics.distribution import Normal
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec

SHIPPED = shipped_snapshot()
CATALOGUE = {
    "chat": ModelSpec(name="chat", profile="Mistral-7B"),
    "code": ModelSpec(name="code", profile="Mistral-7B"),
    "big": ModelSpec(name="big", profile="Vicuna-13B"),
    "alien": ModelSpec(name="alien", profile="Unheard-of"),
}
MODELS = ("chat", "code", "big")
A100 = InstanceFacts(name="a100", incarnation="a100/1", gpu="A100-80GB", n_gpu=1, engine="simulated", models=MODELS)
A10 = replace(A100, name="a10", incarnation="a10/1", gpu="A10", models=("chat", "code"))
NOW_S = 1_000.0


def _group(waiting: int, model: str = "chat", *, deadline_s: float = 1e6, group_id: str = "g", prompt: int = 500) -> GroupView:
    return GroupView(
        group_id=group_id,
        model=model,
        slo_class="64s",
        token_class="1024",
        waiting=waiting,
        waiting_prompt_tokens=waiting * prompt,
        first_deadline_s=deadline_s,
    )


def _times(*groups: GroupView, active: str = "chat", running: int = 0, instance: InstanceFacts = A100) -> tuple[GroupTime, ...]:
    view = QueueView(instance=instance, active_model=active, running=running, groups=groups)
    return group_times(view, CATALOGUE, SHIPPED)


def _predict(*views: QueueView, deadline_s: float = 2_000.0, model: str = "chat", output_tokens_max: int = 4_000) -> NewcomerTimes | None:
    return predict_request(views, CATALOGUE, SHIPPED, model, 500, output_tokens_max, deadline_s)


def test_an_idle_instance_with_the_model_serves_at_once() -> None:
    (time,) = _times(_group(1))
    served = service(500, SHIPPED.workload_for("chat", "", "").output_tokens, SHIPPED.hardware[2])
    assert time.wait == Normal.point(0.0)
    assert time.prefill_s == pytest.approx(served.prefill_s)
    assert time.completion.mean == pytest.approx(served.prefill_s + served.decode(1, 0).mean, rel=0.01)
    assert time.completion.variance > 0.0


def test_a_queue_deep_in_a_full_engine_waits_for_the_work_ahead() -> None:
    """Equation 2 with prompts: one more group ahead adds its service time."""
    group = _group(500)
    served = service(500, SHIPPED.workload_for("chat", "", "").output_tokens, SHIPPED.hardware[2])
    times = _times(*(replace(group, group_id=str(number)) for number in range(4)))
    gaps = [after.wait.mean - before.wait.mean for before, after in pairwise(times[1:])]
    assert gaps == pytest.approx([served.work.mean * 500] * 2)
    spread = times[3].wait.variance - times[2].wait.variance
    assert spread == pytest.approx(served.work.variance * 500, rel=0.01)


def test_a_prefill_rides_along_with_those_that_decode_then() -> None:
    """The last of a burst beside a full batch, however many there were, the first beside nobody."""
    (burst,), (larger,) = _times(_group(600)), _times(_group(5_000))
    (behind,) = _times(_group(1), running=256)
    assert burst.prefill_s == _times(_group(1))[0].prefill_s
    assert burst.last_prefill_s == pytest.approx(larger.last_prefill_s, rel=1e-6)
    assert burst.last_prefill_s == pytest.approx(behind.prefill_s, rel=0.2)
    assert burst.last_prefill_s > 1.3 * burst.prefill_s


@given(st.lists(st.tuples(st.integers(1, 600), st.sampled_from(MODELS)), min_size=1, max_size=8), st.integers(0, 256))
def test_later_groups_never_start_earlier(parts: list[tuple[int, str]], running: int) -> None:
    groups = [_group(waiting, model, group_id=str(number)) for number, (waiting, model) in enumerate(parts)]
    times = _times(*groups, running=running)
    assert [time.group_id for time in times] == [group.group_id for group in groups]
    for before, after in pairwise(times):
        assert after.wait.mean >= before.last_wait.mean - 1e-6
    for group, time in zip(groups, times, strict=True):
        assert 0.0 <= time.wait.mean <= time.last_wait.mean + 1e-9
        assert time.completion.mean >= time.last_wait.mean
        if group.waiting == 1:
            assert time.wait == time.last_wait


@given(st.lists(st.tuples(st.integers(1, 400), st.sampled_from(MODELS)), min_size=1, max_size=6), st.integers(0, 256), st.integers(1, 200))
def test_more_requests_ahead_never_shorten_a_wait(parts: list[tuple[int, str]], running: int, more: int) -> None:
    groups = [_group(waiting, model, group_id=str(number)) for number, (waiting, model) in enumerate(parts)]
    fewer = _times(*groups, _group(1, "chat"), running=running)[-1]
    grown = [replace(groups[0], waiting=groups[0].waiting + more, waiting_prompt_tokens=groups[0].waiting_prompt_tokens + 500 * more)]
    later = _times(*grown, *groups[1:], _group(1, "chat"), running=running)[-1]
    # The batch in flight when the group starts is a mixture of the groups ahead, so the order holds up to that mixture.
    assert later.wait.mean >= fewer.wait.mean - 1.0


@given(st.integers(1, 400), st.integers(0, 256), st.floats(0.1, 50.0))
def test_all_times_follow_the_clock_of_the_instance(waiting: int, running: int, scale: float) -> None:
    fast = replace(A100, time_scale=scale)
    groups = (_group(waiting), _group(20, "big", group_id="h"))
    for slow_time, fast_time in zip(_times(*groups, running=running), _times(*groups, running=running, instance=fast), strict=True):
        assert fast_time.wait.mean * scale == pytest.approx(slow_time.wait.mean, abs=1e-6)
        assert fast_time.completion.mean * scale == pytest.approx(slow_time.completion.mean)
        assert fast_time.completion.deviation * scale == pytest.approx(slow_time.completion.deviation)


def test_a_swap_waits_for_all_that_runs_and_for_the_weights() -> None:
    alone = _times(_group(50))[0]
    first, second = _times(_group(50), _group(10, "big", group_id="h"))
    assert first == alone, "the engine is not shared with a group of another model"
    # 8.1 s from disk are hidden behind the first group, 1.39 s from host memory are not.
    assert second.wait.mean == pytest.approx(first.completion.mean + max(1.39, 9.49 - first.completion.mean), rel=0.03)
    assert second.wait.variance >= first.completion.variance
    (behind_nothing,) = _times(_group(10, "big", group_id="h"), active="big")
    assert second.completion.variance == pytest.approx(second.wait.variance + behind_nothing.completion.variance), "it adds to their own"


def test_a_swap_on_an_idle_instance_takes_the_whole_load() -> None:
    (cold,) = _times(_group(1, "big"), active="chat")
    assert cold.wait.mean == pytest.approx(8.1 + 1.39)
    (empty,) = _times(_group(1, "big"), active="")
    assert empty.wait.mean == pytest.approx(8.1 + 1.39)
    view = QueueView(instance=A100, active_model="chat", running=0, groups=(_group(1, "big"),), warm_models=("big",))
    assert group_times(view, CATALOGUE, SHIPPED)[0].wait.mean == pytest.approx(1.39)
    assert group_times(replace(view, warm_models=("code",)), CATALOGUE, SHIPPED)[0].wait == cold.wait, "the weights of another model"


def test_a_model_that_leaves_the_gpu_returns_from_host_memory() -> None:
    view = QueueView(instance=A100, active_model="chat", running=0, groups=(_group(1, "big"), _group(1)), warm_models=("big",))
    both = replace(view, warm_models=("big", "chat"))
    assert [time.wait for time in group_times(view, CATALOGUE, SHIPPED)] == [time.wait for time in group_times(both, CATALOGUE, SHIPPED)]


def test_nothing_starts_before_a_load_under_way_has_ended() -> None:
    row = SHIPPED.hardware_for(A100, CATALOGUE["chat"])
    assert row is not None
    loading = QueueView(instance=A100, active_model="chat", running=0, groups=(_group(1), _group(1, "big", group_id="b")), loading_s=1.0)
    loaded = group_times(replace(loading, loading_s=None), CATALOGUE, SHIPPED)
    warm = replace(loading, warm_models=("chat",), loading_s=0.0)
    from_disk, from_memory = (group_times(view, CATALOGUE, SHIPPED) for view in (loading, warm))
    assert loaded[0].wait.mean == 0.0
    assert from_disk[0].wait.mean == pytest.approx(row.swap_s(warm=False) - 1.0)
    assert from_memory[0].wait.mean == pytest.approx(row.swap_s(warm=True))
    assert from_disk[0].completion.mean - from_disk[0].wait.mean == pytest.approx(loaded[0].completion.mean)
    assert from_disk[1].wait.mean > loaded[1].wait.mean
    overdue = group_times(replace(loading, loading_s=1_000.0), CATALOGUE, SHIPPED)
    assert [time.wait for time in overdue] == [time.wait for time in loaded]
    unknown = replace(loading, active_model="alien", groups=loading.groups[:1])
    assert group_times(unknown, CATALOGUE, SHIPPED) == group_times(replace(unknown, loading_s=None), CATALOGUE, SHIPPED)


def test_another_model_waits_for_a_load_under_way_too() -> None:
    row = SHIPPED.hardware_for(A100, CATALOGUE["chat"])
    assert row is not None
    loading = QueueView(instance=A100, active_model="chat", running=0, groups=(_group(1, "big"),), warm_models=("big",), loading_s=0.0)
    ((waits,), (at_once,)) = (group_times(view, CATALOGUE, SHIPPED) for view in (loading, replace(loading, loading_s=None)))
    assert waits.wait.mean - at_once.wait.mean == pytest.approx(row.swap_s(warm=False))


def test_a_swap_waits_for_running_requests_behind_whom_others_of_their_model_come() -> None:
    """A request that joins what runs, and is done long before it, brings the next model no sooner."""
    view = QueueView(instance=A100, active_model="chat", running=4, groups=(_group(1, "big"),), running_output_left=Normal(3_000.0, 0.0))
    (straight,) = group_times(view, CATALOGUE, SHIPPED)
    _, behind = group_times(replace(view, groups=(_group(1, group_id="h"), *view.groups)), CATALOGUE, SHIPPED)
    assert straight.wait.mean > 30.0
    assert behind.wait.mean == pytest.approx(straight.wait.mean, rel=0.01)


def test_the_rest_of_running_outputs_can_be_given() -> None:
    view = QueueView(instance=A100, active_model="chat", running=256, groups=(_group(300),))
    known = replace(view, running_output_left=Normal(1_500.0, 10.0))
    assert group_times(known, CATALOGUE, SHIPPED)[0].last_wait.mean > group_times(view, CATALOGUE, SHIPPED)[0].last_wait.mean
    one = replace(known, running=1, groups=(_group(1, "big"),), warm_models=("big",), running_output_left=Normal(500.0, 100.0**2))
    (time,) = group_times(one, CATALOGUE, SHIPPED)
    step_s = SHIPPED.hardware[2].decode_step_s(1.0, 1_500.0)
    assert time.wait.mean == pytest.approx(500 * step_s + 1.39, rel=0.05)
    assert time.wait.deviation == pytest.approx(100 * step_s, rel=0.05)


def test_a_smaller_batch_limit_lengthens() -> None:
    (wide,) = _times(_group(300))
    (narrow,) = _times(_group(300), instance=replace(A100, batch_max=16))
    assert narrow.last_wait.mean > 2 * wide.last_wait.mean
    chosen = replace(A100, active_model="chat", batch=16)
    assert _times(_group(300), instance=chosen) == (narrow,), "that an agent chose"
    assert _times(_group(300), instance=replace(chosen, active_model="code")) == (wide,), "for another model"
    assert _times(_group(300), instance=replace(chosen, batch=10 * A100.batch_max)) == (wide,), "at most the engine's"


@pytest.mark.parametrize("model", ["alien", "nobody"])
def test_a_pair_without_profile_cannot_be_predicted(model: str) -> None:
    with pytest.raises(NoProfile, match=f"{model} on a100"):
        _times(_group(1), _group(1, model))


def test_impossible_views_are_refused() -> None:
    with pytest.raises(ValueError, match="counts"):
        _group(-1)
    with pytest.raises(ValueError, match="first_deadline_s"):
        _group(1, deadline_s=math.nan)
    with pytest.raises(ValueError, match="running"):
        QueueView(instance=A100, active_model="", running=-1, groups=())


def test_an_empty_queue_has_no_times() -> None:
    assert _times() == ()
    assert _times(running=12) == ()


def test_probability_late() -> None:
    assert probability_late(Normal(10.0, 4.0), NOW_S + 10.0, NOW_S) == pytest.approx(0.5)
    assert probability_late(Normal(10.0, 4.0), math.inf, NOW_S) == 0.0
    assert probability_late(Normal(10.0, 400.0), NOW_S, NOW_S) == 1.0, "nothing ends before now"


# A new request --------------------------------------------------------------------------------------------------------


def test_a_new_request_goes_before_later_deadlines() -> None:
    early, late = _group(300, deadline_s=1_500.0), _group(400, deadline_s=2_500.0, group_id="h")
    view = QueueView(instance=A100, active_model="chat", running=256, groups=(early, late))
    between = _predict(view, deadline_s=2_000.0)
    assert between is not None
    assert (between.requests_ahead, between.instance) == (300, "a100")
    first, last = _predict(view, deadline_s=1_000.0), _predict(view, deadline_s=math.inf)
    assert first is not None
    assert last is not None
    assert (first.requests_ahead, last.requests_ahead) == (0, 700)
    assert first.wait.mean < between.wait.mean < last.wait.mean
    assert between.completion.mean > between.wait.mean


def test_draining_unable_and_unknown_instances_are_left_out() -> None:
    view = QueueView(instance=A10, active_model="chat", running=0, groups=())
    assert _predict(view, model="big") is None, "not one of its models"
    assert _predict(replace(view, instance=replace(A10, draining=True))) is None
    assert _predict(replace(view, instance=replace(A10, gpu="B300"))) is None
    assert _predict() is None


def test_a_group_that_cannot_be_predicted_spoils_its_own_queue_only() -> None:
    broken = QueueView(instance=A100, active_model="chat", running=0, groups=(_group(1, "alien", deadline_s=0.0),))
    healthy = QueueView(instance=A10, active_model="chat", running=0, groups=())
    found = _predict(broken, healthy)
    assert found is not None
    assert found.instance == "a10"


@pytest.mark.parametrize(("slo_class", "token_class", "mean"), [("8s", "1024", 40.0), ("64s", "1024", 900.0), ("64s", "128", 200.0)])
def test_outputs_are_those_of_the_own_class(slo_class: str, token_class: str, mean: float) -> None:
    """As if they were given: of the SLO class and the token class of the group."""
    row = WorkloadProfile(
        model="chat",
        prompt_tokens_mean=500.0,
        prompt_tokens_variance=0.0,
        output_tokens_mean=300.0,
        output_tokens_variance=100.0**2,
        samples=10**9,
    )
    rows = [
        replace(row, slo_class=of[0], token_class=of[1], output_tokens_mean=tokens)
        for of, tokens in ((("", ""), 300.0), (("8s", "1024"), 40.0), (("64s", "1024"), 900.0), (("64s", "128"), 200.0))
    ]
    profiles = replace(SHIPPED, workload=tuple(rows))
    group = replace(_group(1), slo_class=slo_class, token_class=token_class)
    (found,), (stated,) = (
        group_times(QueueView(instance=A100, active_model="chat", running=0, groups=(each,)), CATALOGUE, profiles)
        for each in (group, replace(group, output_tokens=Normal(mean, 100.0**2)))
    )
    assert found.decode.mean == pytest.approx(stated.decode.mean)
