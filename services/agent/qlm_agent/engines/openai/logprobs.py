"""Log probabilities of a streamed chunk, in the format of vLLM's server with tokens named by their ids ("token_id:12")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from qlm_agent.delivery.logprobs import likeliest, record

PREFIX = "token_id:"


def records_of(said: Any, token_ids: Sequence[int], top: int) -> bytes:
    """A record for each token of a chunk. `said`: `logprobs` of its choice. Raises ValueError if they do not match the request."""
    if not isinstance(said, dict) or not isinstance(said.get("token_logprobs"), list):
        raise ValueError("a chunk without the requested log probabilities")
    of_tokens, tops = said["token_logprobs"], said.get("top_logprobs") or [None] * len(token_ids)
    if not len(of_tokens) == len(tops) == len(token_ids):
        raise ValueError(f"log probabilities of {len(of_tokens)} tokens with {len(token_ids)} tokens")
    made = []
    for of_token, found in zip(of_tokens, tops, strict=True):
        if not isinstance(of_token, int | float):
            raise ValueError(f"a log probability that is none: {of_token!r}")
        likely = likeliest(_pairs(found), top)
        if len(likely) != top:
            raise ValueError(f"{len(likely)} likeliest tokens instead of {top}")
        made.append(record(of_token, likely))
    return b"".join(made)


def _pairs(found: Any) -> Iterator[tuple[int, float]]:
    if found is None:
        return
    if not isinstance(found, dict):
        raise ValueError("likeliest tokens that are none")
    for name, value in found.items():
        digits = name.removeprefix(PREFIX)
        if not (name.startswith(PREFIX) and digits.isdecimal() and isinstance(value, int | float)):
            raise ValueError(f"a likeliest token that is none: {name!r}")
        yield int(digits), float(value)
