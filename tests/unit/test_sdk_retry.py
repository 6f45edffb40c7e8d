"""When the SDK tries again, and for how long."""

from __future__ import annotations

import pytest

from qlm.errors import CallDeadlineExceeded, InvalidRequest, NotFound, QlmError, QueueFull, Unavailable
from qlm.retry import Backoff, may_retry


def backoff(*, attempts_max: int = 5, addresses: int = 1, random: float = 1.0) -> Backoff:
    return Backoff(attempts_max=attempts_max, max_s=2.0, addresses=addresses, random=lambda: random)


@pytest.mark.parametrize(
    ("error", "retried"),
    [
        (Unavailable("x"), True),
        (Unavailable("x", reason="DRAINING"), True),
        (CallDeadlineExceeded("x"), True),
        (QueueFull("x"), False),
        (InvalidRequest("x"), False),
        (NotFound("x"), False),
    ],
)
def test_only_what_says_nothing_about_the_request_is_tried_again(error: QlmError, retried: bool) -> None:
    assert may_retry(error) is retried
    if not retried:
        with pytest.raises(type(error)):
            backoff().next_pause_s(error)


def test_pauses_double_up_to_their_bound_and_end() -> None:
    pauses = backoff(attempts_max=8)
    assert [pauses.next_pause_s(Unavailable("x")) for _ in range(8)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    last = Unavailable("the last")
    with pytest.raises(Unavailable) as ended:
        pauses.next_pause_s(last)
    assert ended.value is last


def test_every_address_is_tried_before_there_is_a_pause() -> None:
    pauses = backoff(addresses=3)
    assert [pauses.next_pause_s(Unavailable("x")) for _ in range(4)] == [0.0, 0.0, 0.05, 0.1]


def test_half_of_a_pause_is_random() -> None:
    assert backoff(random=0.0).next_pause_s(Unavailable("x")) == 0.025
    assert backoff(random=0.5).next_pause_s(Unavailable("x")) == pytest.approx(0.0375)


def test_a_server_may_ask_for_more_up_to_the_bound() -> None:
    assert backoff().next_pause_s(Unavailable("x", details={"retry_after_s": "1.5"})) == 1.5
    assert backoff().next_pause_s(Unavailable("x", details={"retry_after_s": "60"})) == 2.0


def test_progress_makes_the_next_failure_the_first() -> None:
    pauses = backoff(attempts_max=2)
    for _ in range(10):
        pauses.next_pause_s(Unavailable("x"))
        pauses.next_pause_s(Unavailable("x"))
        pauses.progress()
