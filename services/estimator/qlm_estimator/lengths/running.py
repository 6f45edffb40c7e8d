"""Requests that have begun and not ended: how many tokens each has made at least."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from qlm_core.profile import WorkloadKey

RUNNING_MAX = 65_536
"""Requests that are followed; beyond it the oldest is forgotten."""
SURE_SHARE = 0.8
"""Of the tokens that a run is taken to have made, it is sure to have made this share: a bound that is too high would count a request as
longer than it is."""

Made = Callable[[str, str], float]
"""Tokens that an incarnation is taken to have made of a request by now, by what it is busy with (`activity`)."""


@dataclass(slots=True, kw_only=True)
class Begun:
    """A request that has been pulled. `classes`: each with that class's clock when it first started. `produced_tokens`: made
    at least in runs that ended; `incarnation`: that runs it, "" while it waits again. `output_tokens_max`: what the
    context of its model holds beside its prompt, so that one that hangs is not taken for endless."""

    model: str
    classes: Mapping[WorkloadKey, float]
    incarnation: str
    output_tokens_max: float
    produced_tokens: float = 0.0


@dataclass(slots=True)
class RunningRequests:
    """Of one queue."""

    made: Made
    _begun: dict[str, Begun] = field(default_factory=dict)

    def pulled(self, queue_id: str, incarnation: str) -> bool:
        """It runs again; False if its first pull was not seen."""
        begun = self._begun.get(queue_id)
        if begun is None:
            return False
        begun.incarnation = incarnation
        return True

    def begin(self, queue_id: str, begun: Begun) -> None:
        while len(self._begun) >= RUNNING_MAX:
            del self._begun[next(iter(self._begun))]
        self._begun[queue_id] = begun

    def released(self, queue_id: str, *, started: bool) -> None:
        """It waits again. `started`: it had really begun to run."""
        begun = self._begun.get(queue_id)
        if begun is None:
            return
        if started:
            begun.produced_tokens = self._made(queue_id, begun)
        begun.incarnation = ""
        if begun.produced_tokens == 0.0:
            del self._begun[queue_id]

    def ended(self, queue_id: str) -> tuple[Begun, float] | None:
        """It ended; with what it made at least. None if its pull was not seen."""
        begun = self._begun.pop(queue_id, None)
        return None if begun is None else (begun, self._made(queue_id, begun))

    def lower_bounds(self) -> Iterator[tuple[Begun, float]]:
        """Each request with the tokens that it has made at least."""
        for queue_id, begun in self._begun.items():
            yield begun, self._made(queue_id, begun)

    def forget(self) -> None:
        """Events were missed: who runs is not known."""
        self._begun.clear()

    def _made(self, queue_id: str, begun: Begun) -> float:
        made = self.made(begun.incarnation, queue_id) if begun.incarnation else 0.0
        return min(begun.produced_tokens + SURE_SHARE * made, begun.output_tokens_max)
