"""An agent's report of its runs to the queue, and how it is read."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm.api.v1 import instance_pb2
from qlm_agent.decisions.runs import Run, RunPhase, RunTable
from qlm_agent.delivery.held_run import HeldRun
from qlm_agent.delivery.requests import read_pulled
from qlm_agent.shell.running_report import running_report
from qlm_core.operations.preemption import Urgency
from qlm_core.prediction.prediction_views import GroupView, QueueView, RequestPrediction, RunningView
from qlm_core.prediction.reported_runs import GroupRuns, ReportedRuns, with_reported_outputs
from qlm_core.prediction.running_request import output_left, predict_running
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.statistics.distribution import Normal
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.request import RequestKey
from qlm_process.wire import instance as instance_wire
from qlm_process.wire.running import RUNS_MAX, from_body, to_body
from qlm_queue.values import Pulled

FACTS = InstanceFacts(name="a", incarnation="a/1", gpu="A10", n_gpu=1, engine="simulated", models=("m",), active_model="m")
REPORTED = ReportedRuns(
    at_s=1_000.0,
    token_s=0.02,
    groups={
        "1-1": GroupRuns(output_tokens=(5, 0, 300), prompt_tokens=90, prefill_left_tokens=30),
        "1-2": GroupRuns(output_tokens=(7,), prompt_tokens=10, offloaded_tokens=17),
    },
)


def run(number: int, *, produced: int, started: bool = True) -> Run:
    return Run(
        run_id=f"{number}-0/1",
        queue_id=f"{number}-0",
        model="m",
        prompt_tokens=10 * number,
        output_tokens_max=1_000,
        resumed=0,
        produced=produced,
        stored=0,
        urgency=Urgency(band=0, deadline_s=math.inf),
        started=started,
    )


def held(number: int, group_id: str) -> HeldRun:
    pulled = Pulled(
        queue_id=f"{number}-0",
        key=RequestKey("t", str(number)),
        group_id=group_id,
        acceptance_number=number,
        accepted_s=1.0,
        attempt=1,
        failed_attempts=0,
        gateway="g",
        body=b"",
        progress=b"",
    )
    return read_pulled(pulled, text_output=False, pulled_s=2.0, engine_clock_s=0.0)


def test_runs_are_reported_by_group() -> None:
    runs, of = RunTable(), {}
    for number, (group_id, produced, started) in enumerate([("x", 40, True), ("x", 0, False), ("y", 9, True), ("y", 5, True)], start=1):
        each = run(number, produced=produced, started=started)
        runs.add(each)
        of[each.run_id] = held(number, group_id)
    away, ended = runs.all()[2:]
    runs.move(away, RunPhase.OFFLOADED)
    runs.move(ended, RunPhase.ENDED)
    report = running_report(runs, of, now_s=5.0, token_s=0.5)
    assert report is not None
    assert (report.at_s, report.token_s) == (5.0, 0.5)
    assert runs.prefill_left_tokens == 20
    assert report.groups == {
        "x": GroupRuns(output_tokens=(40, 0), prompt_tokens=30, prefill_left_tokens=20),
        "y": GroupRuns(output_tokens=(9,), prompt_tokens=30, offloaded_tokens=39),
    }
    for number in range(10, 10 + RUNS_MAX):
        runs.add(run(number, produced=1))
    assert running_report(runs, of, now_s=5.0, token_s=0.5) is None


def test_a_report_is_read_as_written() -> None:
    body = to_body(FACTS, REPORTED)
    assert from_body(body) == REPORTED
    assert instance_wire.from_body(body) == FACTS
    assert from_body(to_body(FACTS)) is None
    assert REPORTED.made_since(1_000.1) == 5
    assert REPORTED.made_since(900.0) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"token_s": 0.0},
        {"token_s": math.nan},
        {"token_s": -1.0},
        {"token_s": 5e-324},
        {"running_reported_s": math.inf},
        {"running": [instance_pb2.RunningGroup(group_id="g", output_tokens=[1] * (RUNS_MAX + 1))]},
    ],
)
def test_nonsense_is_not_taken(fields: dict[str, object]) -> None:
    message = instance_pb2.Instance.FromString(to_body(FACTS, REPORTED))
    for name, value in fields.items():
        if isinstance(value, list):
            message.running.extend(value)
        else:
            setattr(message, name, value)
    assert from_body(message.SerializeToString()) is None
    assert from_body(b"\xff\xff") is None


@pytest.mark.parametrize(("lookahead", "produced", "unstarted"), [(False, [0, 0, 10, 15, 310], 1.0), (True, [0, 0, 0, 15, 310], 3.0)])
def test_with_lookahead_those_without_output_still_wait(lookahead: bool, produced: list[int], unstarted: float) -> None:
    """Ten tokens later, with two that were pulled since the report."""
    view = RunningView(slo_class="", token_class="", count=5, lookahead=lookahead)
    found = with_reported_outputs(view, [REPORTED.groups["1-1"], None], 10)
    assert sorted(found.produced_tokens) == produced
    assert found.unstarted(30.0) == unstarted


# When a request that runs now will end --------------------------------------------------------------------------------


CATALOGUE = {"m": ModelSpec(name="m", profile="Mistral-7B")}
SHIPPED = shipped_snapshot()


def running(
    produced_tokens: int,
    *,
    output_tokens_max: float = math.inf,
    beside: int = 10,
    waiting: int = 0,
    waiting_for: str = "m",
    time_scale: float = 1.0,
) -> RequestPrediction:
    facts = InstanceFacts(
        name="a", incarnation="a/1", gpu="A100-80GB", n_gpu=1, engine="simulated", models=("m",), time_scale=time_scale
    )  # fmt: skip
    groups = () if not waiting else (request(waiting=waiting, model=waiting_for),)
    view = QueueView(instance=facts, active_model="m", running=beside, groups=groups)
    found = predict_running(view, CATALOGUE, SHIPPED, request(output_tokens_max=output_tokens_max), produced_tokens)
    assert found is not None
    return found


def request(*, waiting: int = 1, output_tokens_max: float = math.inf, model: str = "m") -> GroupView:
    return GroupView(
        group_id="", model=model, slo_class="64s", token_class="1024", waiting=waiting, waiting_prompt_tokens=600 * waiting,
        first_deadline_s=100.0, output_tokens_max=output_tokens_max,
    )  # fmt: skip


@pytest.mark.parametrize("made", [1, 40, 200, 420])
def test_output_so_far_counts(made: int) -> None:
    """Not what is left of the mean: one that has made twice that still has some to make. Against draws of outputs that were longer."""
    output = SHIPPED.workload_for("m", "64s", "1024").output_tokens
    drawn = np.random.default_rng(3).gamma(output.mean**2 / output.variance, output.variance / output.mean, 400_000)
    left = drawn[drawn > made] - made
    found = running(made)
    step_s = running(10, output_tokens_max=11.0).completion.mean  # one token, beside as many
    assert found.wait == Normal.point(0.0)
    assert found.completion.mean / step_s == pytest.approx(left.mean(), rel=0.05)
    assert found.completion.deviation / step_s == pytest.approx(left.std(), rel=0.05)


@pytest.mark.parametrize("made", [10, 100_000])
def test_its_limit_bounds_what_is_not_known(made: int) -> None:
    """With two tokens left at the most it makes one or two, whatever its class does: half a token either way."""
    last, two = running(made, output_tokens_max=made + 1.0).completion, running(made, output_tokens_max=made + 2.0).completion
    assert last.variance == 0.0
    assert last.mean <= two.mean <= 2.0 * last.mean
    assert two.deviation <= 0.5 * last.mean * (1.0 + 1e-9)


def test_before_the_first_token_the_prefill_is_to_come() -> None:
    assert running(0).completion.mean > running(1).completion.mean
    assert running(0).prefill_s > 0.0
    assert running(1).prefill_s == 0.0


def test_a_full_engine_and_others_that_join_are_slower() -> None:
    assert running(5, beside=100).completion.mean > running(5, beside=1).completion.mean
    assert running(5, waiting=500).completion.mean > running(5).completion.mean
    assert running(5, waiting=500, waiting_for="other") == running(5), "who waits for another model does not join"
    assert running(5, time_scale=10.0).completion.mean == pytest.approx(running(5).completion.mean / 10.0)


def test_no_more_join_than_there_is_time_for() -> None:
    """Seats become free as others end, however little the request itself has left: no batch of prefills is beside its last token."""
    last, hundred = (running(100, output_tokens_max=100.0 + left, beside=200, waiting=500).completion.mean for left in (1.0, 100.0))
    alone = running(100, output_tokens_max=101.0, beside=200).completion.mean
    assert alone < last < 10.0 * alone
    assert hundred > 30.0 * last


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_it_ends_at_its_limit(produced_tokens: int, output_tokens_max: int) -> None:
    found = running(produced_tokens, output_tokens_max=float(output_tokens_max))
    room = max(1, output_tokens_max - produced_tokens)
    step_s = 1.0  # no decode step of this engine is nearly that long
    assert 0.0 <= found.completion.mean <= room * step_s + found.prefill_s
    assert found.completion.variance >= 0.0


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_the_output_that_is_left_is_within_the_limit(produced_tokens: int, output_tokens_max: int) -> None:
    left = output_left(SHIPPED, request(output_tokens_max=float(output_tokens_max)), produced_tokens)
    room = max(1, output_tokens_max - produced_tokens)
    assert 1.0 <= left.mean <= room
    assert left.deviation <= 0.5 * (room - 1) * (1.0 + 1e-9), "half of it makes one token, half all that it may"


def test_no_output_is_negative() -> None:
    with pytest.raises(ValueError, match="tokens"):
        output_left(SHIPPED, request(), -1)


def test_without_a_profile_nothing_is_said() -> None:
    facts = InstanceFacts(name="a", incarnation="a/1", gpu="unheard-of", n_gpu=1, engine="simulated", models=("m",))
    view = QueueView(instance=facts, active_model="m", running=1, groups=())
    assert predict_running(view, {}, SHIPPED, request(), 3) is None
    assert predict_running(view, CATALOGUE, SHIPPED, request(model="other"), 3) is None
