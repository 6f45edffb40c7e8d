"""Strikes of a campaign: by seed or as written, their times, and the signals to each process."""

from __future__ import annotations

import signal
from collections import Counter
from itertools import pairwise

import pytest

from qlm_core.vocabulary.errors import ConfigError
from qlm_load.campaign.strikes import SERVER, SPREAD, Action, Strike, Striker, draw_strikes, parse_strikes

NAMES = ("a100-0", "h100-0", "planner-0", "estimator-0", "gateway-0", "gateway-1")
PIDS = {name: 10 + index for index, name in enumerate((*NAMES, SERVER))}


def kill_of(process: str, share: float = 0.5) -> Strike:
    return Strike(action=Action.KILL, process=process, share=share)


class Signals:
    """Takes a striker's signals; `gone`: pids that are not there any more."""

    def __init__(self, gone: frozenset[int] = frozenset()) -> None:
        self.sent: list[tuple[int, int]] = []
        self._gone = gone

    def __call__(self, pid: int, number: int) -> None:
        if pid in self._gone:
            raise ProcessLookupError(pid)
        self.sent.append((pid, number))


def test_drawn_strikes_are_of_the_seed_spread_over_the_run_and_fair() -> None:
    strikes = draw_strikes(7, 12, 2, NAMES)
    assert strikes == draw_strikes(7, 12, 2, NAMES[::-1])
    assert strikes != draw_strikes(8, 12, 2, NAMES)
    assert Counter(strike.process for strike in strikes) == {**dict.fromkeys(NAMES, 2), SERVER: 2}
    shares = [strike.share for strike in strikes]
    assert shares == sorted(shares)
    assert SPREAD[0] <= shares[0] < 0.2
    assert 0.8 < shares[-1] <= SPREAD[1]
    assert max(right - left for left, right in pairwise(shares)) < 0.2


@pytest.mark.parametrize(("kills", "server_kills"), [(0, 0), (0, 3), (1, 0), (7, 1)])
def test_draws_as_many_as_were_requested(kills: int, server_kills: int) -> None:
    counts = Counter(strike.process == SERVER for strike in draw_strikes(1, kills, server_kills, NAMES))
    assert (counts[False], counts[True]) == (kills, server_kills)


def test_reads_written_strikes() -> None:
    assert parse_strikes("kill:gateway-0+gateway-1@0.4") == (kill_of("gateway-0", 0.4), kill_of("gateway-1", 0.4))
    assert parse_strikes("term:a100-0@0.9") == (Strike(action=Action.TERM, process="a100-0", share=0.9),)
    assert parse_strikes("stop:server:5@0.25") == (Strike(action=Action.STOP, process=SERVER, share=0.25, for_s=5.0),)
    assert parse_strikes("stopkill:planner-0:6.5@0") == (Strike(action=Action.STOPKILL, process="planner-0", share=0.0, for_s=6.5),)


@pytest.mark.parametrize(
    "text",
    [
        *("", "kill:a", "kill:@0.5", "kill:a+@0.5", "kill:a:5@0.5", "kill:a@1", "kill:a@-0.1", "kill:a@nan", "kill:a@x", "burn:a@0.5"),
        *("stop:a@0.5", "stop:a:-1@0.5", "stop:a:nan@0.5", "stop:a:inf@0.5", "stop:a:1:2@0.5"),
    ],
)
def test_refuses_what_is_no_strike(text: str) -> None:
    with pytest.raises(ConfigError, match="a strike is written"):
        parse_strikes(text)


def test_kills_when_due_and_notes_who_serves_again() -> None:
    signals = Signals()
    striker = Striker([kill_of("planner-0", 0.6), kill_of("a100-0", 0.3)], start_s=100.0, send=signals)
    assert striker.poll(101.0, 0.29, PIDS, PIDS) == []
    assert [struck.strike.process for struck in striker.poll(102.0, 0.30, PIDS, PIDS)] == ["a100-0"]
    assert signals.sent == [(PIDS["a100-0"], signal.SIGKILL)]
    assert [strike.process for strike in striker.waiting] == ["planner-0"]
    striker.poll(103.0, 0.4, {**PIDS, "a100-0": 99}, {name: pid for name, pid in PIDS.items() if name != "a100-0"})
    assert not striker.log[0].new_pid
    striker.poll(105.0, 0.4, {**PIDS, "a100-0": 99}, {**PIDS, "a100-0": 99})
    assert (striker.log[0].new_pid, striker.log[0].at_s, striker.log[0].again_s) == (99, 2.0, 5.0)


def test_who_is_down_when_due_is_struck_as_soon_as_it_lives() -> None:
    signals = Signals()
    striker = Striker([kill_of("a100-0"), kill_of("planner-0")], start_s=0.0, send=signals)
    striker.poll(1.0, 0.5, {"planner-0": 12}, {})
    assert signals.sent == [(12, signal.SIGKILL)]
    striker.poll(2.0, 0.5, {"a100-0": 77}, {})
    assert signals.sent[1:] == [(77, signal.SIGKILL)]
    assert striker.waiting == ()


def test_one_process_gets_one_strike_a_look() -> None:
    signals = Signals()
    striker = Striker([kill_of("a100-0"), kill_of("a100-0")], start_s=0.0, send=signals)
    assert len(striker.poll(1.0, 0.5, PIDS, PIDS)) == 1
    assert len(striker.waiting) == 1


def test_a_term_is_one_signal_and_waits_for_the_next_life() -> None:
    signals = Signals()
    striker = Striker(parse_strikes("term:a100-0@0.5"), start_s=0.0, send=signals)
    striker.poll(1.0, 0.5, PIDS, PIDS)
    striker.poll(2.0, 0.5, PIDS, PIDS)
    striker.poll(9.0, 0.5, {"a100-0": 77}, {"a100-0": 77})
    assert signals.sent == [(PIDS["a100-0"], signal.SIGTERM)]
    assert (striker.log[0].new_pid, striker.log[0].again_s, striker.log[0].kills) == (77, 9.0, False)


def test_who_is_gone_before_the_signal_keeps_its_strike() -> None:
    striker = Striker([kill_of("a100-0")], start_s=0.0, send=Signals(gone=frozenset({PIDS["a100-0"]})))
    assert striker.poll(1.0, 0.5, PIDS, PIDS) == []
    assert len(striker.waiting) == 1


def test_the_stopped_are_woken_or_killed_after_their_time() -> None:
    signals = Signals()
    strikes = (*parse_strikes("stop:a100-0:5@0.5"), *parse_strikes("stopkill:planner-0:3@0.5"), kill_of("a100-0", 0.6))
    striker = Striker(strikes, start_s=0.0, send=signals)
    a100, planner = PIDS["a100-0"], PIDS["planner-0"]
    striker.poll(10.0, 0.5, PIDS, PIDS)
    assert sorted(signals.sent) == sorted([(a100, signal.SIGSTOP), (planner, signal.SIGSTOP)])
    signals.sent.clear()
    striker.poll(12.9, 0.7, PIDS, PIDS)
    assert signals.sent == [], "a stopped process keeps its later strike until it is awake"
    striker.poll(13.0, 0.7, PIDS, PIDS)
    assert signals.sent == [(planner, signal.SIGKILL)]
    striker.poll(15.0, 0.7, PIDS, PIDS)
    assert signals.sent[1:] == [(a100, signal.SIGCONT), (a100, signal.SIGKILL)]
    assert [struck.kills for struck in striker.log] == [False, True, True]


def test_nobody_stays_stopped_after_a_run() -> None:
    signals = Signals()
    striker = Striker(parse_strikes("stop:server:500@0.5"), start_s=0.0, send=signals)
    striker.poll(10.0, 0.5, PIDS, PIDS)
    striker.wake(11.0, all_now=True)
    assert signals.sent == [(PIDS[SERVER], signal.SIGSTOP), (PIDS[SERVER], signal.SIGCONT)]
