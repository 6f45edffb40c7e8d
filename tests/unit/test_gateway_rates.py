"""Rates of API keys: the limit of a minute, and the wait for more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_core.vocabulary.errors import QueueFull
from qlm_gateway.front import rates
from qlm_gateway.front.rates import KeyRates
from qlm_process.identity.keys import Key, Role, new_key


class Clock:
    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def key_of(requests: float | None = None, tokens: float | None = None) -> Key:
    return new_key(Role.CLIENT, "acme", requests_per_min=requests, prompt_tokens_per_min=tokens)[0]


def refused(limited: KeyRates, key: Key) -> QueueFull:
    with pytest.raises(QueueFull) as found:
        limited.take(key)
    assert found.value.reason == "RATE_LIMITED"
    return found.value


@given(st.lists(st.floats(0.0, 30.0), max_size=60), st.floats(1.0, 50.0))
def test_no_window_of_a_minute_has_more_than_two_minutes_worth(gaps_s: list[float], per_min: float) -> None:
    clock, key = Clock(), key_of(per_min)
    limited, sent = KeyRates(clock), list[float]()
    for gap_s in gaps_s:
        clock.now_s += gap_s
        try:
            limited.take(key)
            sent.append(clock.now_s)
        except QueueFull as error:
            clock.now_s += float(error.details["retry_after_s"]) + 0.001
            limited.take(key)
            sent.append(clock.now_s)
    for begin_s in sent:
        assert sum(begin_s <= at_s < begin_s + 60.0 for at_s in sent) <= 2.0 * per_min + 1.0


def test_prompts_are_counted_when_they_are_accepted_and_paid_back_over_time() -> None:
    clock, key, other = Clock(), key_of(tokens=600.0), key_of(tokens=600.0)
    limited = KeyRates(clock)
    limited.take(key)
    limited.charge(key, 1_200)
    assert refused(limited, key).details == {"bound": "prompt_tokens_per_min", "limit": "600", "retry_after_s": "60.100"}
    limited.take(other)
    clock.now_s += 60.2
    limited.take(key)


def test_a_key_without_rates_sends_as_it_likes() -> None:
    limited, key = KeyRates(Clock()), key_of()
    for _ in range(1_000):
        limited.take(key)
        limited.charge(key, 10**9)


def test_a_refused_request_uses_nothing_up() -> None:
    clock, key = Clock(), key_of(1.0, 60.0)
    limited = KeyRates(clock)
    limited.take(key)
    for _ in range(5):
        refused(limited, key)
    clock.now_s += 60.0
    limited.take(key)


def test_as_many_buckets_as_bounded_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "KEYS_MAX", 2)
    clock, keys = Clock(), [key_of(1.0) for _ in range(3)]
    limited = KeyRates(clock)
    for key in keys:
        limited.take(key)
    limited.take(keys[0])
    refused(limited, keys[2])
