"""Answers of simulated models: fixed by model and prompt, resumable anywhere."""

from __future__ import annotations

import statistics
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_core.vocabulary.simulated_model import (
    ANSWER_TOKENS_MAX,
    LENGTH_TOKEN_BASE,
    answer_length,
    answer_token,
    answer_tokens,
    prompt_digest,
    text_token_count,
    text_token_ids,
)


@given(st.integers(0, 2**64 - 1), st.integers(0, 5000), st.integers(0, 50), st.integers(2, 200_000))
def test_any_part_of_an_answer_is_the_same_as_in_the_whole(digest: int, start: int, count: int, vocabulary: int) -> None:
    part = answer_tokens(digest, start, count, vocabulary)
    assert part == b"".join(struct.pack("<I", answer_token(digest, start + index, vocabulary)) for index in range(count))
    assert all(token < vocabulary for (token,) in struct.iter_unpack("<I", part))


def test_answers_are_the_same_for_ever() -> None:
    """Across processes, platforms and versions: results that are stored are compared with it."""
    digest = prompt_digest("m", [1, 2, 3])
    assert digest == 16739806717931780063
    assert list(struct.unpack("<5I", answer_tokens(digest, 0, 5, 32_000))) == [23762, 24400, 13696, 16133, 7612]
    assert answer_length([1, 2, 3]) == 396
    assert text_token_ids("hello world", 32_000) == [3243, 18093, 2990]


def test_model_and_prompt_change_the_answer() -> None:
    digests = {prompt_digest("m", [1, 2]), prompt_digest("n", [1, 2]), prompt_digest("m", [2, 1]), prompt_digest("m", [1, 2, 0])}
    assert len(digests) == 4


@pytest.mark.parametrize(("last", "length"), [(LENGTH_TOKEN_BASE, 1), (LENGTH_TOKEN_BASE + 77, 77), (2**32 - 1, ANSWER_TOKENS_MAX)])
def test_a_prompt_states_the_length_it_wants(last: int, length: int) -> None:
    assert answer_length([5, last]) == length


def test_drawn_lengths_are_spread_as_stated() -> None:
    lengths = [answer_length([number, 7]) for number in range(3000)]
    assert 165 < statistics.median(lengths) < 195
    quartiles = statistics.quantiles(lengths, n=4)
    assert 2.6 < quartiles[2] / quartiles[0] < 3.3  # exp(2 * 0.674 * 0.8) = 2.94


@given(st.text())
def test_text_is_counted_as_stated(text: str) -> None:
    ids = text_token_ids(text, 32_000)
    assert len(ids) == text_token_count(text) == (len(text.encode()) + 3) // 4
    assert all(0 <= token < 32_000 for token in ids)
