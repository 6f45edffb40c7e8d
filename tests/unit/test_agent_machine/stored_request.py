"""A request at the server of the small world."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Stored:
    """A request at the server."""

    queue_id: str
    model: str
    target: int
    arrives_s: float = 0.0
    slo_s: float = math.inf
    resumable: bool = True
    evictions: int = 0
    owner: str = ""
    attempt: int = 0
    failed: int = 0
    progress: int = 0
    ended: str = ""

    @property
    def run_id(self) -> str:
        return f"{self.queue_id}/{self.attempt}"

    @property
    def deadline_s(self) -> float:
        return self.arrives_s + self.slo_s

    @property
    def group_id(self) -> str:
        return f"{self.model}-{self.slo_s}"
