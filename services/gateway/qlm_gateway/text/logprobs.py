"""Parts of the log probabilities of an output, by token."""

from __future__ import annotations

from qlm.api.v1.request_pb2 import Logprobs, Result


def stored_logprobs(stored: bytes) -> Logprobs | None:
    """From what the queue keeps of a live request: fields of Result; None where there are none. Raises DecodeError."""
    return Result.FromString(stored).logprobs if stored else None


def logprobs_part(whole: Logprobs, start: int, end: int) -> Logprobs:
    """Those of tokens `start` to `end`."""
    top = len(whole.top_token_ids) // len(whole.of_token) if whole.of_token else 0
    return Logprobs(
        of_token=whole.of_token[start:end],
        top_token_ids=whole.top_token_ids[start * top : end * top],
        of_top=whole.of_top[start * top : end * top],
    )
