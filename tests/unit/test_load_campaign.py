"""The verdict of a campaign and its last line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from qlm_load.campaign.campaign import CampaignOutcome, ended_by_themselves, find_failures
from qlm_load.campaign.strikes import Action, Strike, Struck, parse_strikes
from qlm_load.replay.ledger import Report
from qlm_process.cluster.state import ClusterState, ProcessState

REPORT = Report(
    sent=20,
    accepted=20,
    refused=0,
    completed=20,
    failed=0,
    lost=0,
    doubled=0,
    wrong=0,
    recovered=3,
    attempts_repeated=2,
    streams_resumed=1,
    streams_broken=0,
    verified=20,
    tokens=400,
    classes=(),
    wait_p50_s=1.0,
    wait_p99_s=2.0,
    late_sends=0,
    run_s=10.0,
    requests_per_s=2.0,
    tokens_per_s=40.0,
)


def test_a_clean_campaign_has_no_failures() -> None:
    assert find_failures(REPORT, hung=0, left=0, undone=(), unsettled=False, crashed=()) == ()


@pytest.mark.parametrize(
    "report",
    [
        replace(REPORT, lost=2),
        replace(REPORT, doubled=2),
        replace(REPORT, wrong=2),
        replace(REPORT, failed=2),
        replace(REPORT, refused=2),
        replace(REPORT, streams_broken=2),
    ],
)
def test_anything_in_the_ledger_fails_it(report: Report) -> None:
    failures = find_failures(report, hung=0, left=0, undone=(), unsettled=False, crashed=())
    assert len(failures) == 1
    assert failures[0].startswith("2 ")


def test_hangs_leftovers_and_strikes_that_did_not_happen_fail_it() -> None:
    assert find_failures(REPORT, hung=1, left=0, undone=(), unsettled=False, crashed=()) == ("1 requests hung",)
    assert find_failures(REPORT, hung=0, left=4, undone=(), unsettled=False, crashed=()) == ("4 live requests left in the queue",)
    assert find_failures(REPORT, hung=0, left=0, undone=parse_strikes("kill:a@0.9"), unsettled=False, crashed=()) == (
        "did not happen: kill a",
    )
    assert find_failures(REPORT, hung=0, left=0, undone=(), unsettled=False, crashed=("a", "b")) == ("ended by themselves: a, b",)
    assert find_failures(REPORT, hung=0, left=0, undone=(), unsettled=True, crashed=()) == ("not all processes serve again",)


def struck(action: Action, process: str) -> Struck:
    return Struck(strike=Strike(action=action, process=process, share=0.5), pid=1, at_s=1.0, at_utc="", ended_share=0.5)


def test_a_process_that_was_started_more_often_than_it_was_ended_has_crashed() -> None:
    restarts = {"server": 1, "a100-0": 3, "planner-0": 1, "gateway-0": 1, "gateway-1": 0}
    processes = tuple(ProcessState(name=name, service="any", restarts=count) for name, count in restarts.items())
    state = ClusterState(pid=1, queue="q", queue_url="", ready=True, processes=processes)
    log = [
        struck(Action.KILL, "server"),
        struck(Action.TERM, "a100-0"),
        struck(Action.STOPKILL, "a100-0"),
        struck(Action.STOP, "gateway-0"),
    ]
    assert ended_by_themselves(state, [*log, struck(Action.KILL, "planner-0")]) == ("a100-0", "gateway-0")
    assert ended_by_themselves(None, log) == ()


def test_the_last_line_counts_kills_by_victim() -> None:
    log = (
        struck(Action.KILL, "server"),
        struck(Action.KILL, "a100-0"),
        struck(Action.STOPKILL, "planner-0"),
        struck(Action.STOP, "server"),
        struck(Action.TERM, "gateway-0"),
    )
    outcome = CampaignOutcome(report=REPORT, log=log, requests=20, hung=0, left=0, greedy_equal=20, seconds=9.87, failures=())
    line = outcome.as_json(seed=5)
    assert "\n" not in line
    document = json.loads(line)
    expected = {
        "kills": 2,
        "server_kills": 1,
        "other_strikes": 2,
        "requests": 20,
        "greedy_equal": 20,
        "lost": 0,
        "hung": 0,
        "seconds": 9.9,
        "seed": 5,
    }
    assert expected.items() <= document.items()
