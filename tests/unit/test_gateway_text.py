"""Prompts in and text out, with a tokenizer that is trained here."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.errors import ConfigError
from qlm_gateway.admission.drafts import RequestDraft
from qlm_gateway.text.exact import WINDOW_TOKENS_MAX, ExactText
from qlm_gateway.text.model_text import PIECE_TOKENS, ApproximateText, decode_in_pieces, open_text
from qlm_gateway.text.prompts import INLINE_BYTES_MAX, prepare


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE as of GPT-2 and its kin: characters are split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 20, trainer)
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def metaspace_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As of Llama and its kin: the decoder strips the first blank of a text, so tokens cannot be decoded one by one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 20, trainer)
    path = tmp_path_factory.mktemp("llama") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def byte_fallback_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As of Llama 2 and its kin: characters that are no tokens are a token a byte."""
    letters = {letter: 257 + place for place, letter in enumerate(["a", "▁", "▁a"])}
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, **letters}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    path = tmp_path_factory.mktemp("llama2") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def byte_token(text: ExactText, byte: int) -> int:
    """The token of a byte, which either kind of tokenizer has."""
    fallback = text._tokenizer.token_to_id(f"<0x{byte:02X}>")
    if fallback is not None:
        return fallback
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {**{number: chr(number) for number in plain}}
    letters |= {number: chr(256 + place) for place, number in enumerate(number for number in range(256) if number not in plain)}
    found = text._tokenizer.token_to_id(letters[byte])
    assert found is not None
    return found


def pieces(text: ExactText, ids: list[int], cuts: list[int], start: int = 0) -> str:
    """The output from token `start` on, fed in parts."""
    detokenizer = text.detokenizer(ids[max(0, start - 8) : start])
    borders = sorted({start, *(cut for cut in cuts if start < cut < len(ids)), len(ids)})
    parts = [detokenizer.feed(ids[first:last]) for first, last in pairwise(borders)]
    return "".join(parts) + detokenizer.flush()


@settings(max_examples=100)
@given(content=st.text(max_size=60), cuts=st.lists(st.integers(0, 200), max_size=40))
def test_parts_add_up_to_the_whole(tokenizer_path: Path, content: str, cuts: list[int]) -> None:
    text = ExactText(str(tokenizer_path), "")
    ids = text.encode_text(content, control_tokens=False)
    assert ids is not None
    assert pieces(text, ids, cuts) == text.decode(ids)


@pytest.mark.parametrize("tokens", [0, PIECE_TOKENS, PIECE_TOKENS + 1, 3 * PIECE_TOKENS + 2])
async def test_others_have_their_turn_while_a_long_output_is_decoded(tokenizer_path: Path, tokens: int) -> None:
    text = ExactText(str(tokenizer_path), "")
    ids = text.encode_text("the quick é😀 " * PIECE_TOKENS, control_tokens=False)
    assert ids is not None
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    waiting = asyncio.create_task(others())
    assert await decode_in_pieces(text, ids[:tokens]) == text.decode(ids[:tokens])
    waiting.cancel()
    assert turns >= tokens // PIECE_TOKENS if tokens > PIECE_TOKENS else turns == 0


@settings(max_examples=100)
@given(content=st.text(alphabet="aé😀\u0301", max_size=12), start=st.integers(0, 40))
def test_a_stream_that_is_taken_up_elsewhere_goes_on_in_the_middle_of_a_character(tokenizer_path: Path, content: str, start: int) -> None:
    text = ExactText(str(tokenizer_path), "")
    ids = text.encode_text(content, control_tokens=False)
    assert ids is not None
    start = min(start, len(ids))
    first = text.detokenizer()
    given_ = "".join(first.feed([token]) for token in ids[:start])
    assert given_ + pieces(text, ids, list(range(len(ids))), start) == text.decode(ids)


@settings(max_examples=100)
@given(words=st.lists(st.sampled_from(["the", "fox", "dog", "over"]), min_size=1, max_size=12), start=st.integers(0, 30))
def test_blanks_are_neither_lost_nor_added(metaspace_path: Path, words: list[str], start: int) -> None:
    text = ExactText(str(metaspace_path), "")
    ids = text.encode_text(" ".join(words), control_tokens=False)
    assert ids is not None
    assert text.decode(ids) == " ".join(words)
    start = min(start, len(ids))
    first = text.detokenizer()
    assert "".join(first.feed([token]) for token in ids[:start]) + pieces(text, ids, list(range(99)), start) == " ".join(words)


@settings(max_examples=100)
@example(content="😀aaaaa漢漢漢漢😀😀😀", cuts=[33], start=33)
@given(content=st.text(alphabet="a 漢é😀", max_size=24), cuts=st.lists(st.integers(0, 60), max_size=20), start=st.integers(0, 60))
def test_characters_of_a_token_a_byte_are_whole_however_many_stand_in_a_row(
    byte_fallback_path: Path, content: str, cuts: list[int], start: int
) -> None:
    text = ExactText(str(byte_fallback_path), "")
    ids = text.encode_text(content, control_tokens=False)
    assert ids is not None
    assert pieces(text, ids, cuts) == pieces(text, ids, list(range(len(ids)))) == text.decode(ids) == content
    start = min(start, len(ids))
    assert text.detokenizer().feed(ids[:start]) + pieces(text, ids, cuts, start) == content


def test_output_of_random_tokens_is_the_same_in_parts(tokenizer_path: Path) -> None:
    text = ExactText(str(tokenizer_path), "")
    ids = [(index * 37) % 256 for index in range(300)]  # bytes that are mostly no characters
    assert pieces(text, ids, list(range(300))) == text.decode(ids)


@pytest.mark.parametrize("kind", ["tokenizer_path", "byte_fallback_path"])
@pytest.mark.parametrize("byte", [0x80, 0xC3, 0xE6, 0xF0, 0xFF])
def test_bytes_that_are_no_characters_are_given_as_they_come_at_a_bounded_cost(
    kind: str, byte: int, request: pytest.FixtureRequest
) -> None:
    text = ExactText(request.getfixturevalue(kind), "")
    token = byte_token(text, byte)
    detokenizer = text.detokenizer()
    given_ = [detokenizer.feed([token]) for _ in range(2_000)]
    assert len("".join(given_)) > 1_900
    assert max(len(each) for each in given_) <= 2 * WINDOW_TOKENS_MAX
    assert "".join(given_) + detokenizer.flush() == text.decode([token] * 2_000) == "\ufffd" * 2_000
    ids = text.encode_text("é", control_tokens=False)
    assert ids is not None
    assert detokenizer.feed([*ids, *(text.encode_text(" the fox", control_tokens=False) or ())]).endswith("fox")


@settings(max_examples=100)
@given(content=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=40))
def test_any_bytes_are_the_same_in_parts(tokenizer_path: Path, content: bytes, cuts: list[int]) -> None:
    text = ExactText(str(tokenizer_path), "")
    ids = [byte_token(text, byte) for byte in content]
    assert pieces(text, ids, cuts) == pieces(text, ids, list(range(len(ids)))) == text.decode(ids)


async def test_prompts_of_real_models_are_stored_as_tokens(tokenizer_path: Path) -> None:
    text = ExactText(str(tokenizer_path), "")
    short = await prepare(RequestDraft(model="m", text="the fox"), text)
    assert short.token_ids == text.encode_text("the fox", control_tokens=False)
    assert short.tokens == len(short.token_ids or ())
    long = "the fox " * INLINE_BYTES_MAX
    assert (await prepare(RequestDraft(model="m", text=long), text)).token_ids == text.encode_text(long, control_tokens=False)
    given_ = await prepare(RequestDraft(model="m", token_ids=(1, 2, 3)), text)
    assert (given_.tokens, given_.token_ids) == (3, (1, 2, 3))


async def test_prompts_of_simulated_models_are_approximated_and_stored_as_text() -> None:
    text = ApproximateText()
    plain = await prepare(RequestDraft(model="m", text="12345"), text)
    assert (plain.tokens, plain.text, plain.token_ids) == (2, "12345", None)
    chat = await prepare(RequestDraft(model="m", chat=ChatPrompt(messages=({"role": "user", "content": "hi"},))), text)
    assert chat.text == "<|user|>hi\n<|assistant|>"
    assert text.detokenizer().feed([1, 22]) == " t1 t22" == text.decode([1, 22])


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("{% if %}")
    alone = tmp_path / "template.jinja"
    alone.write_text("x")
    for tokenizer, template in ((str(broken), ""), ("/nowhere", ""), ("", str(alone))):
        with pytest.raises(ConfigError, match="models"):
            open_text(tokenizer, template)
    assert not open_text("", "").exact
