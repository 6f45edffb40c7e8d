"""Answers of the simulated engine to each kind of prompt, and its refusals."""

from __future__ import annotations

import struct

import pytest

from qlm_agent.engines.port import EngineRequest, Prompt, Sampling, TextPrompt, TokenPrompt
from qlm_agent.engines.simulated.answers import answer_to
from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.errors import InvalidRequest
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.simulated_model import LENGTH_TOKEN_BASE, answer_length, answer_tokens, prompt_digest, text_token_ids

SPEC = ModelSpec(name="m", profile="Mistral-7B", context_tokens_max=1000, vocabulary_size=32_000)


def ask(prompt: Prompt, *, output_max: int = 800, produced: bytes = b"", ignore_eos: bool = False) -> EngineRequest:
    return EngineRequest(
        run_id="r",
        model="m",
        prompt=prompt,
        prompt_tokens=1,
        output_tokens_max=output_max,
        produced=produced,
        sampling=Sampling(ignore_eos=ignore_eos),
    )


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        (TokenPrompt(ids=(1, 2, 3)), [1, 2, 3]),
        (TextPrompt(text="What is it?"), text_token_ids("What is it?", 32_000)),
        (ChatPrompt(messages=({"role": "user", "content": "hi"},)), text_token_ids("<|user|>hi\n<|assistant|>", 32_000)),
    ],
)
def test_each_kind_of_prompt_is_answered_by_its_tokens(prompt: Prompt, ids: list[int]) -> None:
    answer = answer_to(ask(prompt), SPEC)
    assert (answer.prompt_tokens, answer.target_tokens, answer.cut) == (len(ids), min(answer_length(ids), 800), answer_length(ids) > 800)
    assert answer.tokens == answer_tokens(prompt_digest("m", ids), 0, answer.target_tokens, 32_000)


def test_a_resumed_answer_holds_the_rest() -> None:
    prompt = TokenPrompt(ids=(1, LENGTH_TOKEN_BASE + 10))
    whole = answer_to(ask(prompt), SPEC)
    rest = answer_to(ask(prompt, produced=whole.tokens[:12]), SPEC)
    assert (rest.resumed_tokens, rest.target_tokens) == (3, 10)
    assert rest.slice(3, 5) == whole.slice(3, 5) == whole.tokens[12:20]


def test_limits_cut() -> None:
    prompt = TokenPrompt(ids=(1, LENGTH_TOKEN_BASE + 10))
    assert (answer_to(ask(prompt, output_max=4), SPEC).target_tokens, answer_to(ask(prompt, output_max=4), SPEC).cut) == (4, True)
    assert (answer_to(ask(prompt, output_max=10), SPEC).target_tokens, answer_to(ask(prompt, output_max=10), SPEC).cut) == (10, False)
    on = answer_to(ask(prompt, output_max=40, ignore_eos=True), SPEC)
    assert (on.target_tokens, on.cut) == (40, True)
    room = answer_to(ask(TokenPrompt(ids=[1] * 995 + [LENGTH_TOKEN_BASE + 10])), SPEC)
    assert (room.target_tokens, room.cut) == (4, True)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (ask(TokenPrompt(ids=())), "no tokens"),
        (ask(TextPrompt(text="")), "no tokens"),
        (ask(TokenPrompt(ids=(1, 32_000))), "below 32000"),
        (ask(TokenPrompt(ids=(LENGTH_TOKEN_BASE + 5, 1))), "below 32000"),
        (ask(TokenPrompt(ids=[1] * 1000)), "no room"),
        (ask(TokenPrompt(ids=(1, LENGTH_TOKEN_BASE + 10)), produced=struct.pack("<I", 7)), "not the beginning"),
        (ask(TokenPrompt(ids=(1, LENGTH_TOKEN_BASE + 1)), produced=bytes(8)), "not the beginning"),
    ],
)
def test_an_unanswerable_request_is_refused_with_the_reason(request_: EngineRequest, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        answer_to(request_, SPEC)
