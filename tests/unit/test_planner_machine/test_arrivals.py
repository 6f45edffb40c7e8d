"""Arrivals: a request that was read and lost on the way is looked for again, however busy the planner is."""

from __future__ import annotations

import itertools

from qlm_core.vocabulary.request import RequestFacts, RequestKey, Slo, SloKind
from qlm_planner.board.arrivals import BUSY_OVERVIEWS, MISSED_OVERVIEWS, ArrivalBuffer
from qlm_planner.board.snapshot import Arrival
from qlm_planner.policy import Policy

NUMBERS = itertools.count(1)


def arrival() -> Arrival:
    number = next(NUMBERS)
    facts = RequestFacts(
        queue_id=f"{number}-0",
        key=RequestKey("tenant", f"r{number}"),
        acceptance_number=number,
        accepted_s=1.0,
        model="alpha",
        slo=Slo(kind=SloKind.COMPLETION, seconds=60.0),
        prompt_tokens=10,
        output_tokens_max=10,
    )
    return Arrival(facts=facts)


def scanned() -> ArrivalBuffer:
    arrivals = ArrivalBuffer(policy=Policy())
    arrivals.add_page((), "")
    assert not arrivals.scanning
    return arrivals


def overviews_until_scan(arrivals: ArrivalBuffer, unplaced: int, *, busy: bool) -> int:
    """How many overviews it takes until a scan begins. `busy`: at each of them something else has just come."""
    for count in range(1, 10 * BUSY_OVERVIEWS):
        if busy:
            arrivals.add_arrivals((arrival(),))
        arrivals.compare(unplaced)
        if arrivals.scanning:
            return count
        arrivals.take()
    raise AssertionError("the lost request is never looked for")


def test_a_lost_request_is_looked_for_when_nothing_is_pending() -> None:
    assert overviews_until_scan(scanned(), 1, busy=False) == MISSED_OVERVIEWS


def test_a_lost_request_is_looked_for_under_a_load_that_never_pauses() -> None:
    arrivals = scanned()
    assert overviews_until_scan(arrivals, 2, busy=True) == BUSY_OVERVIEWS
    lost = arrival()
    arrivals.add_page((lost,), lost.facts.queue_id)
    arrivals.add_page((), "")
    assert lost in arrivals.take()
    assert overviews_until_scan(arrivals, 2, busy=True) == BUSY_OVERVIEWS, "a scan begins the count anew"


def test_an_arrival_found_again_is_reported_once() -> None:
    arrivals, first, second = scanned(), arrival(), arrival()
    assert arrivals.add_arrivals((first,)) == [first]
    arrivals.rescan()
    assert arrivals.add_page((first, second), second.facts.queue_id) == [second]
    assert arrivals.add_arrivals((first, second)) == []


def test_an_overview_without_unplaced_requests_ends_the_doubt() -> None:
    arrivals = scanned()
    for _ in range(3 * BUSY_OVERVIEWS):
        arrivals.compare(1)
        arrivals.compare(0)
        assert not arrivals.scanning
