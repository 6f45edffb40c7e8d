"""The one model of virtual queues: many at once as each alone, one group at a time as all at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predicted_times import GroupTime, group_times
from qlm_core.prediction.batch_mix import BatchMix, batch_mix, mixed
from qlm_core.prediction.prediction_service import EngineColumns, ServiceColumns, services
from qlm_core.prediction.prediction_views import GroupView, QueueView, RunningView
from qlm_core.prediction.queue_reader import QueueReader
from qlm_core.prediction.queue_times import queue_times
from qlm_core.profiles.profile import WorkloadProfile
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.statistics.distribution import Normal
from qlm_core.statistics.normal_arrays import Floats
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec

SHIPPED = shipped_snapshot()
CATALOGUE = {
    "chat": ModelSpec(name="chat", profile="Mistral-7B"),
    "code": ModelSpec(name="code", profile="Mistral-7B"),
    "big": ModelSpec(name="big", profile="Vicuna-13B"),
}
A100 = InstanceFacts(name="a100", incarnation="a100/1", gpu="A100-80GB", n_gpu=1, engine="simulated", models=tuple(CATALOGUE))


def _group(model: str, waiting: int, prompt: int = 500, number: int = 0) -> GroupView:
    return GroupView(
        group_id=str(number),
        model=model,
        slo_class="64s",
        token_class="1024",
        waiting=waiting,
        waiting_prompt_tokens=waiting * prompt,
        first_deadline_s=1e6,
    )


parts = st.lists(st.tuples(st.sampled_from(tuple(CATALOGUE)), st.integers(1, 900), st.integers(10, 6_000)), min_size=1, max_size=7)
queues = st.lists(st.tuples(parts, st.sampled_from(("", *CATALOGUE)), st.integers(0, 256)), min_size=1, max_size=5)


def _views(made: list[tuple[list[tuple[str, int, int]], str, int]]) -> list[QueueView]:
    return [
        QueueView(
            instance=replace(A100, name=f"a100-{number}", incarnation=f"a100-{number}/1", batch_max=256 >> number, time_scale=1.0 + number),
            active_model=active,
            running=running if active else 0,
            groups=tuple(_group(model, waiting, prompt, place) for place, (model, waiting, prompt) in enumerate(groups)),
        )
        for number, (groups, active, running) in enumerate(made)
    ]


@given(queues)
def test_many_queues_are_each_as_alone(made: list[tuple[list[tuple[str, int, int]], str, int]]) -> None:
    views = _views(made)
    _, groups = QueueReader(CATALOGUE, SHIPPED).read(views)
    times = queue_times(groups)
    for number, view in enumerate(views):
        alone = group_times(view, CATALOGUE, SHIPPED)
        for place, time in enumerate(alone):
            at = int(groups.first[number]) + place
            assert times.wait_s[:, at] == pytest.approx([time.wait.mean, time.last_wait.mean], rel=1e-6, abs=1e-6)
            assert times.wait_variance[:, at] == pytest.approx([time.wait.variance, time.last_wait.variance], rel=1e-6, abs=1e-6)
            assert times.end_s[at] == pytest.approx(time.completion.mean, rel=1e-6)
            assert times.token_s[1, at] * time.decode.mean == pytest.approx(times.token_s[0, at] * time.last_decode.mean)


def test_a_batch_of_one_class_is_that_class() -> None:
    engine = EngineColumns.of([(SHIPPED.hardware[0], 64.0), (SHIPPED.hardware[1], 256.0)])
    of, prompt, spread = np.array([0, 1]), np.array([300.0, 4_000.0]), np.zeros(2)
    alone = services(engine, of, prompt, spread, np.array([200.0, 90.0]), np.array([150.0**2, 60.0**2]), np.ones(2))
    together = mixed(alone, of, batch_mix(engine, of, np.array([10.0, 700.0]), prompt, alone))
    for name in ("batch", "step_s", "token_s", "left_tokens", "sequence_s", "joining_s"):
        assert getattr(together, name) == pytest.approx(getattr(alone, name)), name


def test_classes_share_a_batch_and_each_pays_for_its_own_tokens() -> None:
    """Short outputs behind long prompts would have few seats to themselves; between others they take one of the common batch."""
    row = SHIPPED.hardware_for(A100, CATALOGUE["chat"])
    assert row is not None
    engine, of = EngineColumns.of([(row, 256.0)]), np.zeros(2, dtype=np.int64)
    prompt = np.array([4_000.0, 300.0])
    alone = services(engine, of, prompt, np.zeros(2), np.array([60.0, 300.0]), np.array([30.0**2, 100.0**2]), np.ones(2))
    both = mixed(alone, of, batch_mix(engine, of, np.array([100.0, 400.0]), prompt, alone))
    assert alone.batch[0] < both.batch[0] == both.batch[1] <= alone.batch[1]
    assert both.token_s[0] > both.token_s[1], "a longer context costs more to read"
    assert both.token_s[0] < alone.token_s[0]


def test_a_mix_is_kept_for_engines_that_were_not_read_again() -> None:
    views = _views([([("chat", 50, 500), ("chat", 50, 6_000)], "chat", 20), ([("chat", 30, 100)], "chat", 0)])
    reader = QueueReader(CATALOGUE, SHIPPED)
    reader.read(views)
    before = reader.request_rows([(view, _group("chat", 1)) for view in views])
    reader.read(views[1:])
    assert reader.request_rows([(view, _group("chat", 1)) for view in views]) == pytest.approx(before)


# The running batch ----------------------------------------------------------------------------------------------------


def _waits(view: QueueView) -> GroupTime:
    return group_times(view, CATALOGUE, SHIPPED)[0]


def _running(*produced: int, waiting: int = 300) -> QueueView:
    runner = RunningView(slo_class="", token_class="", count=len(produced), produced_tokens=produced)
    return QueueView(instance=A100, active_model="chat", running=len(produced), groups=(_group("chat", waiting),), runners=(runner,))


@pytest.mark.parametrize(
    "running",
    [
        [("long", 1, range(300, 301))],  # who knows how long
        [("even", 30, range(300, 301))],  # all are as far
        [("even", 30, range(200, 500))],  # some have far more to make than others
        [("even", 30, range(480, 481)), ("even", 1, range(10, 11))],  # one has just begun
    ],
)
@pytest.mark.parametrize("prompt", [300, 3_000])
def test_a_swap_waits_for_what_is_left_of_those_that_run(running: list[tuple[str, int, range]], prompt: int) -> None:
    """Against draws of their outputs, each given what it made: so many steps as the longest takes, in which each adds its own."""
    row = SHIPPED.hardware_for(A100, CATALOGUE["chat"])
    assert row is not None
    lengths = {"short": Normal(100.0, 100.0**2), "long": Normal(1_500.0, 900.0**2), "even": Normal(500.0, 50.0**2)}
    workload = tuple(
        WorkloadProfile(
            model="chat",
            token_class=name,
            prompt_tokens_mean=300.0,
            prompt_tokens_variance=0.0,
            output_tokens_mean=output.mean,
            output_tokens_variance=output.variance,
            samples=10**9,
        )
        for name, output in (("", lengths["short"]), *lengths.items())
    )
    dice = np.random.default_rng(3)
    runners: list[RunningView] = []
    steps, ms = np.zeros(2_000), np.zeros(2_000)
    for name, count, tokens in running:
        produced = tuple(tokens[len(tokens) * number // count] for number in range(count))
        runners.append(RunningView(slo_class="", token_class=name, count=count, produced_tokens=produced, prompt_tokens=count * prompt))
        output = lengths[name]
        for made in produced:
            drawn = dice.gamma(output.mean**2 / output.variance, output.variance / output.mean, 100_000)
            left = np.ceil(drawn[drawn > made][: len(ms)] - made)
            steps = np.maximum(steps, left)
            ms += left * (row.decode_b_ms_per_seq + row.decode_c_ms_per_context_token * (prompt + made + left / 2.0))
    drain_s = 1e-3 * (row.decode_a_ms * steps + ms)
    view = QueueView(
        instance=A100,
        active_model="chat",
        running=sum(runner.count for runner in runners),
        groups=(_group("big", 10),),
        warm_models=("big",),
        runners=tuple(runners),
    )
    big = SHIPPED.hardware_for(A100, CATALOGUE["big"])
    assert big is not None
    found = group_times(view, CATALOGUE, replace(SHIPPED, workload=workload))[0].wait
    assert found.mean - big.swap_s(warm=True) == pytest.approx(drain_s.mean(), rel=0.1)
    assert found.deviation == pytest.approx(drain_s.std(), rel=0.4)


def test_a_limit_bounds_what_is_left() -> None:
    view = _running(*([90] * 256))
    limited = replace(view, runners=(replace(view.runners[0], output_tokens_max=100.0),))
    assert _waits(limited).last_wait.mean < _waits(view).last_wait.mean - 1.0


def test_prefills_and_transfers_of_what_runs_are_waited_for() -> None:
    view = _running(*([50] * 20), waiting=10)
    row = SHIPPED.hardware_for(A100, CATALOGUE["chat"])
    assert row is not None
    outstanding = replace(view, runners=(replace(view.runners[0], prefill_left_tokens=30_000),))
    of_model = SHIPPED.workload_for("chat", "", "")
    each = of_model.prompt_tokens_mean + of_model.prompt_tokens_variance / of_model.prompt_tokens_mean
    work_s = row.prefill_work_s(30_000, 30_000 * each)
    assert _waits(outstanding).wait.mean - _waits(view).wait.mean == pytest.approx(work_s)
    offloaded = replace(view, runners=(replace(view.runners[0], offloaded_tokens=50_000),))
    assert _waits(offloaded).wait.mean - _waits(view).wait.mean == pytest.approx(row.kv_swap_us_per_token * 0.05)
    before, after = (replace(each, groups=(_group("big", 10),), warm_models=("big",)) for each in (view, outstanding))
    assert _waits(after).wait.mean - _waits(before).wait.mean == pytest.approx(work_s), "before another model comes"


def test_unreported_requests_count_as_any() -> None:
    unreported = QueueView(instance=A100, active_model="chat", running=200, groups=(_group("chat", 300),))
    partly = replace(unreported, runners=(RunningView(slo_class="", token_class="", count=80),))
    assert _waits(partly).last_wait.mean == pytest.approx(_waits(unreported).last_wait.mean)


def test_a_batch_with_free_seats_makes_nobody_wait_for_one() -> None:
    """However alike the outputs are: the wait is for the prefills ahead."""
    view = QueueView(instance=A100, active_model="chat", running=0, groups=(_group("chat", 250),))
    time = _waits(view)
    row = SHIPPED.hardware_for(A100, CATALOGUE["chat"])
    assert row is not None
    assert time.last_wait.mean == pytest.approx(249 * row.prefill_work_s(500, 250_000))
    assert time.last_wait.variance == 0.0


def test_few_arrivals_while_one_decodes_lengthen_it_by_their_number() -> None:
    view = QueueView(instance=A100, active_model="chat", running=0, groups=(_group("chat", 1),))
    alone_s = _waits(view).decode.mean
    longer_s = [_waits(replace(view, arrivals_per_s=number / alone_s)).decode.mean - alone_s for number in (0.25, 0.5, 0.95)]
    assert longer_s[0] > 0.0
    assert longer_s[1:] == pytest.approx([2.0 * longer_s[0], 3.8 * longer_s[0]], rel=0.05)


def test_expected_arrivals_lengthen_decoding_and_no_wait() -> None:
    view = QueueView(instance=A100, active_model="chat", running=100, groups=(_group("chat", 20),))
    quiet, busy = _waits(view), _waits(replace(view, arrivals_per_s=8.0))
    assert busy.wait == quiet.wait
    assert busy.last_wait == quiet.last_wait
    assert busy.last_decode.mean > 1.2 * quiet.last_decode.mean
    other = replace(view, groups=(_group("chat", 20), _group("big", 5, number=1)), arrivals_per_s=8.0)
    assert _waits(other).decode == quiet.decode, "they come to the end of the queue"


@pytest.mark.parametrize(
    ("count", "produced", "prefill_left", "message"),
    [(2, (1,), 0, "produced"), (-1, (), 0, "count"), (1, (-1,), 0, "produced"), (1, (), -1, "tokens")],
)
def test_impossible_runners_are_refused(count: int, produced: tuple[int, ...], prefill_left: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunningView(slo_class="", token_class="", count=count, produced_tokens=produced, prefill_left_tokens=prefill_left)


def test_runners_are_among_those_that_run() -> None:
    with pytest.raises(ValueError, match="runners"):
        QueueView(instance=A100, active_model="chat", running=1, groups=(), runners=(RunningView(slo_class="", token_class="", count=2),))
    with pytest.raises(ValueError, match="arrivals"):
        QueueView(instance=A100, active_model="chat", running=1, groups=(), arrivals_per_s=float("nan"))


# The batch that classes share where a few requests are far longer than all others -------------------------------------


ROW = next(row for row in shipped_snapshot().hardware if (row.gpu, row.n_gpu, row.model) == ("A100-80GB", 1, "Mistral-7B"))
ENGINE = EngineColumns.of([(ROW, 256.0)])
SHORT, LONG = 0, 1


def mix_of(count: Floats, output: Floats) -> tuple[ServiceColumns, BatchMix]:
    """Classes of memoryless outputs behind prompts of 300 tokens, and the batch that they share."""
    of, prompt = np.zeros(len(count), dtype=np.int64), np.full(len(count), 300.0)
    served = services(ENGINE, of, prompt, np.zeros(len(count)), output, output**2, np.ones(len(count)))
    return served, batch_mix(ENGINE, of, count, prompt, served)


def in_flight_s(count: Floats, output: Floats) -> Floats:
    """The decode work that one request of each class adds to that of a full batch."""
    served, mix = mix_of(count, output)
    whole = mixed(served, np.zeros(len(count), dtype=np.int64), mix)
    found: Floats = whole.batch_left_s / whole.batch
    return found


def test_one_endless_request_leaves_the_batch_to_the_others() -> None:
    _, alone = mix_of(np.array([5_000.0]), np.array([50.0]))
    _, beside = mix_of(np.array([5_000.0, 1.0]), np.array([50.0, 50_000.0]))
    assert alone.batch[0] == beside.batch[0] == 256.0


def test_many_long_requests_make_the_batch_smaller() -> None:
    _, few = mix_of(np.array([5_000.0, 1.0]), np.array([50.0, 5_000.0]))
    _, many = mix_of(np.array([1_000.0, 4_000.0]), np.array([50.0, 5_000.0]))
    assert many.batch[0] < 0.5 * few.batch[0]


def test_the_work_of_long_requests_is_on_every_seat() -> None:
    """They are seldom among the last that fill a batch, and there all the time."""
    count = np.array([5_000.0, 10.0])
    short, long = in_flight_s(count, np.array([50.0, 50.0])), in_flight_s(count, np.array([50.0, 5_000.0]))
    assert long[SHORT] > 1.5 * short[SHORT]
    assert long[LONG] < long[SHORT]


def test_no_more_is_in_flight_than_there_is_work() -> None:
    count, output = np.array([5_000.0, 10.0]), np.array([50.0, 50_000.0])
    served, mix = mix_of(count, output)
    whole = mixed(served, np.zeros(2, dtype=np.int64), mix)
    work_s = float((count * output * whole.token_s).sum())
    assert 0.0 < mix.batch[0] * float(in_flight_s(count, output)[SHORT]) < work_s
