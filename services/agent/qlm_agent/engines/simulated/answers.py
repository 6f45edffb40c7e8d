"""Computes the whole answer of a simulated model to a request, before its first step."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from qlm_agent.delivery.logprobs import record
from qlm_agent.engines.port import EngineRequest, Prompt, TextPrompt, TokenPrompt
from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.errors import InvalidRequest
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.simulated_model import (
    LENGTH_TOKEN_BASE,
    TOKEN_BYTES,
    answer_length,
    answer_token,
    answer_tokens,
    prompt_digest,
    text_token_ids,
)

LOGPROB_STEPS = 1024
"""Invented log probabilities lie between -1 and 0, in so many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer of `target_tokens`, of which `resumed_tokens` were produced before; `tokens` holds the rest as little-endian uint32. `cut`:
    `output_tokens_max` ended it. `digest`: of model and prompt; `logprobs`: how many likeliest tokens each record names, None for none."""

    prompt_tokens: int
    target_tokens: int
    resumed_tokens: int
    cut: bool
    tokens: bytes
    digest: int
    vocabulary_size: int
    logprobs: int | None

    def slice(self, start: int, end: int) -> bytes:
        """Tokens `start` to `end` of the whole answer."""
        return self.tokens[(start - self.resumed_tokens) * TOKEN_BYTES : (end - self.resumed_tokens) * TOKEN_BYTES]

    def records(self, start: int, end: int) -> bytes:
        """Log probabilities of tokens `start` to `end`, for an answer that has them: like the tokens, a function of prompt and position."""
        tokens = struct.unpack(f"<{end - start}I", self.slice(start, end))
        return b"".join(self._record(place, token) for place, token in enumerate(tokens, start))

    def _record(self, place: int, token: int) -> bytes:
        """The token is the likeliest, the next ids follow, each half as likely as the one before."""
        count = min(self.logprobs or 0, self.vocabulary_size)
        of_token = -(1 + answer_token(self.digest, place, LOGPROB_STEPS)) / LOGPROB_STEPS
        return record(of_token, [((token + n) % self.vocabulary_size, of_token - n * math.log(2.0)) for n in range(count)])


def answer_to(request: EngineRequest, spec: ModelSpec) -> Answer:
    """Raises InvalidRequest for a prompt that is empty, has ids outside the vocabulary or leaves no room in the context, and for produced
    tokens that are not this model's answer to this prompt: continuing after them would hide a fault."""
    ids = _prompt_ids(request.prompt, spec)
    if len(ids) == 0:
        raise InvalidRequest("the prompt has no tokens")
    # A simulated model takes one kind of id beyond its vocabulary: the answer's length, last in the prompt.
    highest = max(ids[:-1], default=0)
    if highest >= spec.vocabulary_size or (ids[-1] >= spec.vocabulary_size and ids[-1] < LENGTH_TOKEN_BASE):
        raise InvalidRequest(f"token ids of {spec.name} are below {spec.vocabulary_size}")
    room = spec.context_tokens_max - len(ids)
    if room < 1:
        raise InvalidRequest(f"a prompt of {len(ids)} tokens leaves no room in a context of {spec.context_tokens_max}")
    limit = min(request.output_tokens_max, room)
    wanted = limit if request.sampling.ignore_eos else answer_length(ids)
    target = min(wanted, limit)
    resumed = len(request.produced) // TOKEN_BYTES
    digest = prompt_digest(spec.name, ids)
    tokens = answer_tokens(digest, 0, target, spec.vocabulary_size)
    if resumed > target or tokens[: resumed * TOKEN_BYTES] != request.produced:
        raise InvalidRequest(f"the {resumed} tokens produced before are not the beginning of the model's answer")
    return Answer(
        prompt_tokens=len(ids),
        target_tokens=target,
        resumed_tokens=resumed,
        cut=target < wanted or request.sampling.ignore_eos,
        tokens=tokens[resumed * TOKEN_BYTES :],
        digest=digest,
        vocabulary_size=spec.vocabulary_size,
        logprobs=request.sampling.logprobs,
    )


def _prompt_ids(prompt: Prompt, spec: ModelSpec) -> list[int]:
    match prompt:
        case TokenPrompt():
            return list(prompt.ids)
        case TextPrompt():
            return text_token_ids(prompt.text, spec.vocabulary_size)
        case ChatPrompt():
            return text_token_ids(prompt.plain_text(), spec.vocabulary_size)
