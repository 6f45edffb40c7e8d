"""Models and tenants whose requests wait until an operator says otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class PauseKind(StrEnum):
    """Whose requests wait."""

    MODEL = "model"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A model or a tenant (`name`) that is paused. `since_s`: seconds since the epoch by the queue's clock."""

    kind: PauseKind
    name: str
    since_s: float


def is_paused(pauses: Iterable[Pause], model: str, tenant: str) -> bool:
    """Whether a request for a model, of a tenant ("": of none that is known), waits for an operator. O(pauses)."""
    return any(pause.name == (model if pause.kind is PauseKind.MODEL else tenant) for pause in pauses)
