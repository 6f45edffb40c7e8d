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


def all_at_once(tokens: list[int], stop: list[str]) -> tuple[list[int], bool]:
    """All tokens at once."""
    strings = TokenStops(stop, text_of)
    output, stopped = strings.feed(tokens)
    return (output, True) if stopped else (output + strings.flush(), False)


@pytest.mark.parametrize(
    ("tokens", "stop", "output", "stopped"),
    [
        ([0, 1, 4], ["c"], [0, 1], True),
        ([0, 1, 4], ["x"], [0, 1, 4], False),
        ([0, 1, 4, 0], ["abc"], [], True),
        ([4, 0, 1, 0], ["abc"], [4, 0, 1, 0], False),
        ([4, 2, 4], ["bc"], [4], True),  # it begins in the middle of a token, which is part of it
        ([2, 2, 6], ["bb", "ca"], [2], True),
    ],
)
def test_output_ends_before_a_stop_string(tokens: list[int], stop: list[str], output: list[int], stopped: bool) -> None:
    assert all_at_once(tokens, stop) == (output, stopped)


def test_a_possible_beginning_is_held_back_until_that_is_decided() -> None:
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
    """Each attempt continues after the tokens reported before, in some steps of its own."""
    whole = all_at_once(tokens, stop)
    output: list[int] = []
    for steps in sorted(seams):
        strings = TokenStops(stop, text_of)
        for token in tokens[len(output) :][:steps]:
            more, stopped = strings.feed([token])
            output += more
            if stopped:
                assert (output, True) == whole
                return
    more, stopped = all_at_once(tokens[len(output) :], stop)
    assert (output + more, stopped) == whole
