"""Arguments and results of the queue's operations for operators (see `qlm_queue.port`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qlm_core.vocabulary.errors import QueueFull
from qlm_queue.values import LiveRequest

PAGE_BYTES_MAX = 4 << 20
"""Bytes of bodies after which `live_requests` ends a page; as in lua/operator.lua."""

PAUSES_MAX = 100
"""Models and tenants that are paused at a time: each pull reads them."""

HELD_BACK_MAX = 100
"""Requests of paused tenants that one pull takes out of its way; as in lua/pauses.lua."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePage:
    """A page of `live_requests`. `body` of each: the serialized api `Request` with its model and admission alone, b"" where the body is
    damaged. `after`: the queue id to go on after, "" where none is behind the page."""

    after: str
    requests: Sequence[LiveRequest]


def too_many_pauses() -> QueueFull:
    return QueueFull(
        f"{PAUSES_MAX} models and tenants are paused, which is the bound: resume one first",
        details={"bound": "pauses", "limit": f"{PAUSES_MAX}"},
    )
