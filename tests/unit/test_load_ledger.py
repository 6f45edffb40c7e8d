"""The ledger notices what it is for: lost, doubled and wrong tokens and requests, each tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qlm.values import RequestState, Result, Timing
from qlm_load.replay.ledger import Ledger, quantile
from qlm_load.workload.trace import Trace, TraceRow
from qlm_load.workload.workload import ModelShare, Workload, make_workload

TIME_SCALE = 4.0


@pytest.fixture
def workload() -> Workload:
    rows = tuple(TraceRow(arrival_s=4.0 * n, input_tokens=8, output_tokens=10 + n) for n in range(3))
    return make_workload(Trace(rows=rows), (ModelShare(name="m", share=1.0),), seed=1)


@pytest.fixture
def ledger(workload: Workload) -> Ledger:
    return Ledger(workload, TIME_SCALE, start_s=100.0)


def result_of(workload: Workload, index: int, **changes: object) -> Result:
    request = workload.requests[index]
    result = Result(
        tenant="default",
        request_id=request.request_id,
        queue_id=f"{index}-1",
        model="m",
        state=RequestState.COMPLETED,
        finish_reason="stop",
        error_reason="",
        error_message="",
        prompt_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        attempts=1,
        incarnation="a/1",
        timing=Timing(accepted_s=0, placed_s=0, started_s=0, first_token_s=0, finished_s=0),
        token_ids=tuple(workload.expected_output(request)),
        pieces=(),
        text="",
    )
    return replace(result, **changes)  # type: ignore[arg-type]


def serve(ledger: Ledger, workload: Workload, index: int) -> None:
    """One request with nothing wrong: due at 100 + index, accepted .1 s later, first token 1 s, end 2 s after it was due."""
    due_s = 100.0 + index
    tokens = workload.expected_output(workload.requests[index])
    ledger.sent(index, due_s + 0.01)
    ledger.accepted(index, due_s + 0.1, f"{index}-1")
    ledger.tokens(index, due_s + 1.0, 0, tokens[:4])
    ledger.tokens(index, due_s + 2.0, 4, tokens[4:])
    ledger.end(index, due_s + 2.0, result_of(workload, index))


def test_a_clean_run(ledger: Ledger, workload: Workload) -> None:
    for index in range(3):
        serve(ledger, workload, index)
        ledger.read_again(index, result_of(workload, index))
    report = ledger.report(now_s=110.0)
    assert report.clean
    assert (report.sent, report.accepted, report.completed, report.verified, report.failed) == (3, 3, 3, 3, 0)
    assert (report.lost, report.doubled, report.wrong, report.recovered, report.refused) == (0, 0, 0, 0, 0)
    assert report.tokens == 33
    assert report.problems == ()
    # Trace time is four times real time: acceptance to first token .9 s, and 2 s from due to the last token.
    assert report.wait_p50_s == pytest.approx(3.6)
    assert report.run_s == pytest.approx(4.0)
    assert report.requests_per_s == pytest.approx(0.75)
    for each in report.classes:
        assert each.attained == each.requests
        assert each.latency_p50_s == pytest.approx(8.0)
    assert sum(each.requests for each in report.classes) == 3


def test_a_request_that_never_ended_is_lost(ledger: Ledger, workload: Workload) -> None:
    serve(ledger, workload, 0)
    ledger.sent(1, 101.0)
    ledger.accepted(1, 101.1, "1-1")
    ledger.sent(2, 102.0)
    report = ledger.report(now_s=200.0)
    assert (report.lost, report.refused, report.completed) == (1, 1, 1)
    assert not report.clean


def test_a_request_that_completed_without_all_its_tokens_is_lost(ledger: Ledger, workload: Workload) -> None:
    ledger.sent(0, 100.0)
    ledger.accepted(0, 100.1, "0-1")
    ledger.tokens(0, 100.2, 0, workload.expected_output(workload.requests[0])[:9])
    ledger.end(0, 100.3, result_of(workload, 0))
    report = ledger.report(now_s=200.0)
    assert report.lost == 1
    assert "completed with 9 of 10 tokens" in report.problems[0]


def test_a_result_that_is_gone_is_lost(ledger: Ledger, workload: Workload) -> None:
    serve(ledger, workload, 0)
    ledger.read_again(0, None)
    assert ledger.report(now_s=200.0).lost == 1


def test_a_token_delivered_twice_is_doubled(ledger: Ledger, workload: Workload) -> None:
    tokens = workload.expected_output(workload.requests[0])
    ledger.accepted(0, 100.1, "0-1")
    ledger.tokens(0, 100.2, 0, tokens[:5])
    ledger.tokens(0, 100.3, 4, tokens[4:])
    ledger.end(0, 100.4, result_of(workload, 0))
    report = ledger.report(now_s=200.0)
    assert (report.doubled, report.wrong, report.lost) == (1, 0, 0)
    assert "token 4 again" in report.problems[0]


def test_tokens_after_the_end_are_doubled(ledger: Ledger, workload: Workload) -> None:
    serve(ledger, workload, 0)
    ledger.tokens(0, 105.0, 10, [1])
    assert ledger.report(now_s=200.0).doubled == 1


@pytest.mark.parametrize("at", [0, 3, 9])
def test_a_wrong_token_is_noticed(ledger: Ledger, workload: Workload, at: int) -> None:
    tokens = list(workload.expected_output(workload.requests[0]))
    tokens[at] ^= 1
    ledger.accepted(0, 100.1, "0-1")
    ledger.tokens(0, 100.2, 0, tokens)
    ledger.end(0, 100.3, result_of(workload, 0))
    report = ledger.report(now_s=200.0)
    assert (report.wrong, report.lost, report.doubled) == (1, 0, 0)
    assert not report.clean


def test_a_gap_and_a_token_too_many_are_wrong(ledger: Ledger, workload: Workload) -> None:
    tokens = workload.expected_output(workload.requests[0])
    ledger.tokens(0, 100.2, 0, tokens[:4])
    ledger.tokens(0, 100.3, 5, tokens[5:])
    ledger.tokens(1, 100.3, 0, [*workload.expected_output(workload.requests[1]), 7])
    report = ledger.report(now_s=200.0)
    assert report.wrong == 2
    assert any("a gap" in problem for problem in report.problems)


@pytest.mark.parametrize(
    "changes",
    [{"state": RequestState.FAILED}, {"queue_id": "9-9"}, {"attempts": 2}, {"token_ids": (1, 2, 3)}],
)
def test_a_result_that_differs_when_read_again_is_doubled(ledger: Ledger, workload: Workload, changes: dict[str, object]) -> None:
    serve(ledger, workload, 0)
    ledger.read_again(0, result_of(workload, 0, **changes))
    report = ledger.report(now_s=200.0)
    assert report.doubled == 1
    assert not report.clean


def test_two_acceptances_or_ends_are_doubled(ledger: Ledger, workload: Workload) -> None:
    serve(ledger, workload, 0)
    ledger.accepted(0, 103.0, "0-2")
    serve(ledger, workload, 1)
    ledger.end(1, 104.0, result_of(workload, 1))
    ledger.accepted(2, 102.0, "2-1")
    ledger.tokens(2, 102.1, 0, workload.expected_output(workload.requests[2]))
    ledger.end(2, 103.0, result_of(workload, 2, queue_id="2-2"))
    assert ledger.report(now_s=200.0).doubled == 3


def test_the_same_acceptance_heard_twice_is_not_doubled(ledger: Ledger, workload: Workload) -> None:
    serve(ledger, workload, 0)
    ledger.accepted(0, 103.0, "0-1")
    assert ledger.report(now_s=200.0).doubled == 0


def test_recovered_counts_repeated_attempts_and_resumed_streams(ledger: Ledger, workload: Workload) -> None:
    for index in range(3):
        tokens = workload.expected_output(workload.requests[index])
        ledger.accepted(index, 100.1, f"{index}-1")
        if index == 1:
            ledger.resumed(index)
        ledger.tokens(index, 100.2, 0, tokens)
        ledger.end(index, 100.3, result_of(workload, index, attempts=2 if index == 0 else 1))
    report = ledger.report(now_s=200.0)
    assert (report.recovered, report.attempts_repeated, report.streams_resumed) == (2, 1, 1)


def test_a_broken_stream_is_not_lost_if_the_result_is_whole(ledger: Ledger, workload: Workload) -> None:
    for index in range(2):
        ledger.sent(index, 100.0)
        ledger.accepted(index, 100.1, f"{index}-1")
        ledger.give_up(index, "UNAVAILABLE")
    ledger.read_again(0, result_of(workload, 0))
    ledger.read_again(1, result_of(workload, 1, token_ids=(1, 2)))
    report = ledger.report(now_s=200.0)
    assert (report.streams_broken, report.lost, report.wrong) == (2, 1, 1)


def test_missing_the_slo_and_late_sends_are_counted(workload: Workload) -> None:
    ledger = Ledger(workload, TIME_SCALE, start_s=100.0)
    for index, request in enumerate(workload.requests):
        over_s = request.slo_s / TIME_SCALE * (0.99 if index else 1.01)
        ledger.sent(index, 100.0 + index + 0.5)
        ledger.accepted(index, 100.0 + index + 0.5, f"{index}-1")
        ledger.tokens(index, 100.0 + index + over_s, 0, workload.expected_output(request))
        ledger.end(index, 100.0 + index + over_s, result_of(workload, index))
    report = ledger.report(now_s=9000.0)
    assert sum(each.attained for each in report.classes) == 2
    assert report.late_sends == 3


def test_quantile_interpolates() -> None:
    assert quantile([], 0.5) == 0.0
    assert quantile([3.0], 0.99) == 3.0
    assert quantile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert quantile([1.0, 2.0], 1.0) == 2.0
