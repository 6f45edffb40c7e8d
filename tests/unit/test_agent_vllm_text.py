"""Output tokens as text in an engine's process, by which stop strings are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from qlm_agent.delivery.stop_strings import TokenStops
from qlm_agent.engines.vllm.runner.prompts import NewText, eos_ids

HELLO, X, SPACE_X = 257, 258, 259


@pytest.fixture(params=["bytes", "pieces"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """One token a byte (token of byte b: b + 1), in the two ways that models have: all tokens are bytes, or those of rare characters."""
    if request.param == "bytes":
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        by_byte = [letter for _, letter in sorted((_byte_of(letter), letter) for letter in letters)]
        vocabulary = {"<unk>": 0, **{letter: byte + 1 for byte, letter in enumerate(by_byte)}, "Ġhello": HELLO, "xx": X, "Ġx": SPACE_X}
        made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        made.decoder = decoders.ByteLevel()
        return made
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁hello": HELLO, "xx": X, "▁x": SPACE_X}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return made


def _byte_of(letter: str) -> int:
    """The byte that a letter of the byte-level alphabet stands for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return ord(letter) if ord(letter) in plain else others[ord(letter) - 256]


def ids_of(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()]


def pieces(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> list[str | None]:
    text = NewText(tokenizer.decode, before)
    return [text.feed(token) for token in tokens]


def test_a_character_is_delivered_with_its_last_token(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, [HELLO], [*ids_of("é"), SPACE_X, *ids_of("😀"), X]) == [None, "é", " x", None, None, None, "😀", "xx"]


def test_a_token_without_text_takes_nothing_from_the_next(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens(["<eos>"])
    end = tokenizer.token_to_id("<eos>")
    assert end is not None
    assert pieces(tokenizer, [HELLO], [SPACE_X, end, SPACE_X]) == [" x", None, " x"]


def test_what_comes_before_is_not_new_where_it_ends_within_a_character(tokenizer: Tokenizer) -> None:
    before = [HELLO, SPACE_X, *ids_of("😀")[:2]]
    assert pieces(tokenizer, before, [*ids_of("😀")[2:], X]) == [None, "😀", "xx"]
    stops = TokenStops([" x"], NewText(tokenizer.decode, before).feed)
    assert stops.feed([*ids_of("😀")[2:], X]) == ([*ids_of("😀")[2:], X], False), "the prompt's text is no stop string"


def test_what_comes_before_is_not_new_where_it_ends_with_a_replacement_character(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, [HELLO, *ids_of("\ufffd")], [X, SPACE_X]) == ["xx", " x"]


def test_bytes_that_are_no_character_change_what_they_follow(tokenizer: Tokenizer) -> None:
    """Some decoders replace all bytes of a sequence in which not all are characters."""
    half = ids_of("é")[0]
    delivered = pieces(tokenizer, [HELLO], [*ids_of("é"), half, X, SPACE_X])
    assert delivered[:3] == [None, "é", None]
    assert delivered[3] is not None
    assert delivered[3].strip("\ufffd") == "xx"
    assert delivered[4] == " x"


def test_bytes_that_never_become_a_character_are_delivered(tokenizer: Tokenizer) -> None:
    half = ids_of("é")[0]
    delivered = pieces(tokenizer, [HELLO], [half] * 50)
    assert sum(each is not None for each in delivered) >= 12, "tokens without text are held back by a search for stop strings"
    assert pieces(tokenizer, [HELLO], [*[half] * 8, X])[-1] == "xx"


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, {2}),
        ({"generation_config.json": [7, 9], "config.json": 8}, {2, 7, 9}),
        ({"config.json": [7, 9]}, {2, 7, 9}),
        ({"generation_config.json": None, "config.json": 8}, {2}),
    ],
)
def test_what_ends_an_answer_is_what_vllm_reads(tmp_path: Path, files: dict[str, object], ends: set[int]) -> None:
    """It reads config.json where a model has no generation_config.json."""
    for name, said in files.items():
        (tmp_path / name).write_text(json.dumps({} if said is None else {"eos_token_id": said}))
    assert eos_ids(tmp_path, 2) == ends
