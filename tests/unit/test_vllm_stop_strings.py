"""Stop strings on tokens, across the seam of an eviction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_agent.delivery.stop_strings import TokenStops

PIECES = ["a", "b", "ab", "ba", "c", "", "bc"]
"""The text of tokens 0, 1, ..."""


def text_of(token: int) -> str | None:
    return PIECES[token]


def told_in_one(tokens: list[int], stop: list[str]) -> tuple[list[int], bool]:
    """All tokens at once."""
    strings = TokenStops(stop, text_of)
    told, stopped = strings.feed(tokens)
    return (told, True) if stopped else (told + strings.flush(), False)


@pytest.mark.parametrize(
    ("tokens", "stop", "told", "stopped"),
    [
        ([0, 1, 4], ["c"], [0, 1], True),
        ([0, 1, 4], ["x"], [0, 1, 4], False),
        ([0, 1, 4, 0], ["abc"], [], True),
        ([4, 0, 1, 0], ["abc"], [4, 0, 1, 0], False),
        ([4, 2, 4], ["bc"], [4], True),  # it begins in the middle of a token, which is part of it
        ([2, 2, 6], ["bb", "ca"], [2], True),
    ],
)
def test_output_ends_before_a_stop_string(tokens: list[int], stop: list[str], told: list[int], stopped: bool) -> None:
    assert told_in_one(tokens, stop) == (told, stopped)


def test_what_may_begin_one_is_held_back_until_that_is_decided() -> None:
    strings = TokenStops(["abc"], text_of)
    assert strings.feed([4, 0]) == ([4], False)
    assert strings.feed([1]) == ([], False)
    assert strings.feed([0]) == ([0, 1], False)
    assert strings.flush() == [0]


def test_incomplete_characters_are_held_back() -> None:
    texts = iter([None, None, "é", "a"])
    strings = TokenStops(["x"], lambda token: next(texts))
    assert strings.feed([1]) == ([], False)
    assert strings.feed([2, 3, 4]) == ([1, 2, 3, 4], False)


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    seams=st.lists(st.integers(0, 12), max_size=3),
)
def test_evictions_change_nothing(tokens: list[int], stop: list[str], seams: list[int]) -> None:
    """Each attempt makes what follows the tokens that were told before, in some steps of its own."""
    whole = told_in_one(tokens, stop)
    told: list[int] = []
    for steps in sorted(seams):
        strings = TokenStops(stop, text_of)
        for token in tokens[len(told) :][:steps]:
            more, stopped = strings.feed([token])
            told += more
            if stopped:
                assert (told, True) == whole
                return
    more, stopped = told_in_one(tokens[len(told) :], stop)
    assert (told + more, stopped) == whole
