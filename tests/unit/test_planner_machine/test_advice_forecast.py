"""Forecasts and advice on questions made by hand: few seats, whole seconds, and answers that a pencil gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from qlm_planner.advice.advising import advise
from qlm_planner.advice.forecast import forecast
from qlm_planner.advice.question import Kind, LoadClass, Member, Question, ServedClass

STAY_S = 20.0
SEATS = 10.0
STEP_S = 0.5
"""Of a forecast: so much later than by hand a request may end."""


def served(
    *, stay_s: float = STAY_S, first_s: float = 0.0, cold_s: float = 10.0, warm_s: float = 2.0, sequence_s: float = 0.0
) -> ServedClass:
    """Ten seats; a request takes one for so long, whoever else sits there (but for `sequence_s` a step)."""
    return ServedClass(
        seats=SEATS,
        tokens=100.0,
        tokens_deviation=0.0,
        first_s=first_s,
        base_s=(stay_s - first_s) / 100.0,
        sequence_s=sequence_s,
        join_s=0.0,
        cold_s=cold_s,
        warm_s=warm_s,
    )


def load(model: str, count: float = 0.0, due_s: float = 1e3, *, per_s: float = 0.0, band: int = 0, first_token: bool = False) -> LoadClass:
    """`count` requests that wait, all due then, and others that come, due as long after they came."""
    backlog = ((count, due_s),) if count else ()
    return LoadClass(model=model, label="", band=band, slo_s=due_s, first_token=first_token, per_s=per_s, backlog=backlog)


def kind(*serves: ServedClass | None, gpu: str = "big", n_gpu: int = 1) -> Kind:
    """What it has of each class, the first of which is of "alpha", the second of "beta"."""
    models = tuple(model for model, each in zip(("alpha", "beta"), serves, strict=False) if each is not None)
    return Kind(gpu=gpu, n_gpu=n_gpu, models=models, served=serves)


def question(
    loads: Sequence[LoadClass], kinds: Sequence[Kind], fleet: Sequence[Member], *, clock: float = 1.0, late: float = 1.0, unserved: int = 0
) -> Question:
    return Question(
        made_s=0.0,
        classes=tuple(loads),
        kinds=tuple(kinds),
        fleet=tuple(fleet),
        misses=(),
        late=late,
        unserved=unserved,
        idle=0,
        clock=clock,
    )


def attainment(loads: Sequence[LoadClass], kinds: Sequence[Kind], *fleet: Member, clock: float = 1.0) -> float:
    return forecast(question(loads, kinds, fleet, clock=clock), fleet).attainment


ALPHA = Member(name="a", kind=0, active_model="alpha")


# Forecasts ------------------------------------------------------------------------------------------------------------


def test_what_waits_is_served_in_turns_of_all_seats() -> None:
    """Ten at a time, twenty seconds each: of a hundred that are due after 130 s six turns are in time."""
    assert attainment([load("alpha", 100.0, 130.0)], [kind(served())], ALPHA) == pytest.approx(0.6)
    assert attainment([load("alpha", 100.0, 130.0)], [kind(served())], ALPHA, replace(ALPHA, name="b")) == 1.0


def test_a_full_batch_makes_every_step_longer() -> None:
    """A hundred tokens of 0.1 s, and 0.1 s for each of ten sequences: 110 s, where ten alone would take 20 s."""
    slow = served(stay_s=10.0, sequence_s=0.1)
    assert attainment([load("alpha", 10.0, 100.0)], [kind(slow)], ALPHA) == 0.0
    assert attainment([load("alpha", 10.0, 112.0)], [kind(slow)], ALPHA) == 1.0
    assert attainment([load("alpha", 1.0, 70.0)], [kind(slow)], ALPHA) == 1.0


def test_what_is_due_too_soon_for_a_new_instance_does_not_count() -> None:
    one = [kind(served(stay_s=100.0))]
    assert attainment([load("alpha", 10.0, 50.0)], one, ALPHA) == 1.0
    assert attainment([load("alpha", 10.0, 61.0)], one, ALPHA) == 0.0
    assert attainment([load("alpha", 10.0, math.inf)], one, ALPHA) == 1.0
    both = [load("alpha", 10.0, 50.0), load("alpha", 10.0, 1e3)]
    found = forecast(question(both, [kind(served(stay_s=100.0), served(stay_s=100.0))], [ALPHA]), [ALPHA])
    assert (found.attainment, found.late) == (1.0, (0.0, 0.0))


@pytest.mark.parametrize(("due_s", "in_time"), [(69.0, 0.0), (71.0, 1.0)])
@pytest.mark.parametrize("warm", [False, True])
def test_a_swap_takes_its_time(due_s: float, in_time: float, warm: bool) -> None:
    """50 s from disk, 50 s from host memory where that is as slow, and 20 s of service."""
    of_alpha = served(cold_s=1e3 if warm else 50.0, warm_s=50.0 if warm else 1.0)
    member = Member(name="a", kind=0, active_model="beta", warm_models=("alpha",) if warm else ())
    assert attainment([load("alpha", 10.0, due_s)], [kind(of_alpha)], member) == in_time


@pytest.mark.parametrize(("due_s", "in_time"), [(79.0, 0.0), (81.0 + 2 * STEP_S, 1.0)])
def test_what_runs_ends_before_a_swap(due_s: float, in_time: float) -> None:
    """40 s until the last of beta has ended, 20 s of swapping, 20 s of service."""
    member = Member(name="a", kind=0, active_model="beta", busy=1.0, left_s=40.0)
    assert attainment([load("alpha", 10.0, due_s), load("beta")], [kind(served(cold_s=20.0), served())], member) == in_time


@pytest.mark.parametrize(("busy", "left_s", "late"), [(0.0, 80.0, 0.0), (0.4, 80.0, 4.0), (1.0, 80.0, 10.0), (1.0, 12.0, 0.0)])
def test_who_runs_has_the_seats_until_it_ends(busy: float, left_s: float, late: float) -> None:
    """What runs ends in four parts. Of requests of 50 s that are due after 65 s, those who find no seat within 15 s are late."""
    member = replace(ALPHA, busy=busy, left_s=left_s)
    found = forecast(question([load("alpha", 10.0, 65.0)], [kind(served(stay_s=50.0))], [member]), [member])
    assert sum(found.late) == pytest.approx(late)


def test_the_first_token_counts_where_the_slo_is_of_that() -> None:
    one = [kind(served(stay_s=100.0, first_s=1.0))]
    assert attainment([load("alpha", 10.0, 65.0, first_token=True)], one, ALPHA) == 1.0
    assert attainment([load("alpha", 10.0, 65.0)], one, ALPHA) == 0.0
    assert attainment([load("alpha", 20.0, 65.0, first_token=True)], one, ALPHA) == 0.5, "the others wait for a seat"


def test_bands_come_before_deadlines() -> None:
    loads = [load("alpha", 10.0, 80.0, band=1), load("alpha", 10.0, 90.0)]
    slow = served(stay_s=50.0)
    assert forecast(question(loads, [kind(slow, slow)], [ALPHA]), [ALPHA]).late == pytest.approx((10.0, 0.0))
    same_band = [replace(each, band=0) for each in loads]
    assert forecast(question(same_band, [kind(slow, slow)], [ALPHA]), [ALPHA]).late == pytest.approx((0.0, 10.0))


def test_fast_engines_are_looked_at_for_as_many_of_their_own_seconds() -> None:
    """7.5 a second come where 5 are served: who comes after t waits for t/2. That is late from 120 s on, of 300 s; those of an engine that
    runs ten times as fast are 30 s. What is due after 10 s is there in time for another one of these, but for no other."""
    loads, kinds = [load("alpha", 0.0, 62.0, per_s=7.5)], [kind(served(stay_s=2.0))]
    assert attainment(loads, kinds, ALPHA) == pytest.approx(0.4, abs=0.02)
    assert attainment(loads, kinds, ALPHA, clock=10.0) == 1.0
    late = [load("alpha", 10.0, 10.0)]
    assert attainment(late, [kind(served(stay_s=50.0))], ALPHA) == 1.0
    assert attainment(late, [kind(served(stay_s=50.0))], ALPHA, clock=10.0) == 0.0


def test_what_is_due_long_after_the_play_is_not_late_for_that() -> None:
    """A thousand at one every two seconds: served after 2,000 s, of which the play shows the first ten minutes. Of two instances, and with
    a band before them that takes a quarter of the time."""
    one = [kind(served())]
    assert attainment([load("alpha", 1000.0, 2_100.0)], one, ALPHA) == 1.0
    assert attainment([load("alpha", 1000.0, 1_500.0)], one, ALPHA) == pytest.approx(0.75, abs=0.02)
    assert attainment([load("alpha", 1000.0, 1_500.0)], one, ALPHA, replace(ALPHA, name="b")) == 1.0
    both = [load("alpha", 250.0, math.inf, band=-1), load("alpha", 1000.0, 1_500.0)]
    assert attainment(both, [kind(served(), served())], ALPHA) == pytest.approx(0.5, abs=0.02)
    assert attainment([load("alpha", 1000.0, 1e5)], [kind(None)], ALPHA) == 0.0, "nobody serves it"


# Advice ---------------------------------------------------------------------------------------------------------------


def test_the_fewest_that_are_enough() -> None:
    """A hundred that are due after two turns: five instances have seats for all of them, four do not."""
    advice = advise(question([load("alpha", 100.0, 61.0)], [kind(served(stay_s=30.0, cold_s=0.0))], [ALPHA]))
    [option] = advice.options
    assert (option.instances, option.enough) == (4, True)
    assert option.attainment == 1.0
    assert advice.attainment == pytest.approx(0.2)


def test_of_two_kinds_the_one_with_fewer_gpus_in_all_comes_first() -> None:
    """Two instances of two GPUs each are enough, and three of one GPU each."""
    loads = [load("alpha", 60.0, 61.0)]
    both = [kind(served(stay_s=20.0, cold_s=0.0), gpu="wide", n_gpu=2), kind(served(stay_s=30.0, cold_s=0.0), gpu="narrow")]
    advice = advise(question(loads, both, []))
    assert [(option.gpu, option.instances) for option in advice.options] == [("narrow", 3), ("wide", 2)]
    assert advice.line.startswith("add 3 more narrow:")


def test_the_model_that_is_late_most_is_named() -> None:
    loads = [load("alpha", 10.0, 1e3), load("beta", 20.0, 61.0)]
    fast, slow = served(), served(stay_s=40.0)
    advice = advise(question(loads, [kind(fast, slow)], [replace(ALPHA, active_model="beta")]))
    assert advice.model == "beta"
    assert advice.line.endswith(", beta most")


def test_the_least_used_go_first_and_no_more_than_the_load_lets_go() -> None:
    """Two of four have the model; the others would have to load it."""
    loads = [load("alpha", 0.0, 100.0, per_s=0.7)]
    fleet = [Member(name=name, kind=0, active_model="alpha" if name in "bd" else "beta") for name in "abcd"]
    advice = advise(question(loads, [kind(served())], fleet, late=0.0))
    assert advice.spare == ("a", "c")


def test_the_last_instance_does_not_go_while_there_is_work() -> None:
    """Requests without a deadline are never late, even where nobody serves them."""
    loads = [load("alpha", 50.0, math.inf)]
    fleet = [replace(ALPHA, name=name) for name in "abc"]
    assert len(advise(question(loads, [kind(served())], fleet, late=0.0)).spare) == 2
    assert len(advise(question([], [kind()], fleet, late=0.0)).spare) == 3


def test_a_model_that_nobody_serves_is_advised_for_however_few_want_it() -> None:
    """One request in a thousand: the SLOs are met without it, and another instance of those that are there does not help it."""
    loads = [load("alpha", 999.0, 1e5), load("beta", 1.0, 1e5)]
    kinds = [kind(served(), None, gpu="old"), kind(served(), served(), gpu="new")]
    advice = advise(question(loads, kinds, [ALPHA], late=0.0, unserved=1))
    assert advice.attainment >= 0.99
    assert [(option.gpu, option.instances) for option in advice.options] == [("new", 1)]
    assert advice.line.startswith("add 1 more new:")


def test_the_only_one_that_serves_a_model_does_not_go() -> None:
    """However seldom it is asked for: one request in a thousand."""
    loads = [load("alpha", 999.0, 1e5), load("beta", 1.0, 1e5)]
    kinds = [kind(served(), None), kind(None, served(), gpu="other")]
    fleet = [ALPHA, replace(ALPHA, name="b"), Member(name="c", kind=1, active_model="beta")]
    assert advise(question(loads, kinds, fleet, late=0.0)).spare == ("a",)
    fleet = [ALPHA, Member(name="c", kind=1), Member(name="d", kind=1, active_model="beta")]
    assert advise(question(loads, kinds, fleet, late=0.0)).spare == ("c",), "nor does the last of two"


def test_the_only_one_that_serves_a_model_that_nobody_asks_for_does_not_go() -> None:
    kinds = [kind(served()), replace(kind(None, gpu="other"), models=("beta",))]
    fleet = [ALPHA, replace(ALPHA, name="b"), Member(name="c", kind=1, active_model="beta")]
    assert advise(question([load("alpha", 9.0, 1e5)], kinds, fleet, late=0.0)).spare == ("a",)
    assert advise(question([], [replace(each, served=()) for each in kinds], fleet, late=0.0)).spare == ("a",)
