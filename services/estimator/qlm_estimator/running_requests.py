"""Requests that have begun and not ended: how many tokens each has made at least, from how long it runs and how fast its agent is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from qlm_core.profile import WorkloadKey

RUNNING_MAX = 65_536
"""Requests that are followed; beyond it the oldest is forgotten."""
PACES_MAX = 4_096
PACE_MEMORY = 50.0
"""Finished runs of an incarnation after which an old pace weighs 1 / e."""
SURE_SHARE = 0.8
"""Of the tokens that a run has made at the usual pace, it is sure to have made this share: a bound that is too high would count a request
as longer than it is."""
RUN_S_MAX = 7 * 86_400.0


@dataclass(slots=True)
class _Pace:
    """Of one incarnation: seconds from a pull to the first token, and from token to token."""

    first_token_s: float
    token_s: float

    def add(self, first_token_s: float, token_s: float) -> None:
        self.first_token_s += (first_token_s - self.first_token_s) / PACE_MEMORY
        self.token_s += (token_s - self.token_s) / PACE_MEMORY


@dataclass(slots=True, kw_only=True)
class Begun:
    """A request that has been pulled. `classes`: each with that class's clock when it first started. `produced_tokens`: made
    at least in runs that ended; `incarnation`: that runs it since `pulled_s`, "" while it waits again. `output_tokens_max`: what the
    context of its model holds beside its prompt, so that one that hangs is not taken for endless."""

    model: str
    classes: Mapping[WorkloadKey, float]
    incarnation: str
    pulled_s: float
    output_tokens_max: float
    produced_tokens: float = 0.0


@dataclass(slots=True)
class RunningRequests:
    """Of one queue. Times in seconds of the queue's clock; what goes back counts as no time."""

    _begun: dict[str, Begun] = field(default_factory=dict)
    _paces: dict[tuple[str, str], _Pace] = field(default_factory=dict)

    def pulled(self, queue_id: str, incarnation: str, at_s: float) -> bool:
        """It runs again; False if its first pull was not seen."""
        begun = self._begun.get(queue_id)
        if begun is None:
            return False
        begun.incarnation, begun.pulled_s = incarnation, at_s
        return True

    def begin(self, queue_id: str, begun: Begun) -> None:
        while len(self._begun) >= RUNNING_MAX:
            del self._begun[next(iter(self._begun))]
        self._begun[queue_id] = begun

    def released(self, queue_id: str, at_s: float, *, started: bool) -> None:
        """It waits again. `started`: it had really begun to run."""
        begun = self._begun.get(queue_id)
        if begun is None:
            return
        if started:
            begun.produced_tokens = self._made(begun, at_s)
        begun.incarnation = ""
        if begun.produced_tokens == 0.0:
            del self._begun[queue_id]

    def ended(self, queue_id: str, at_s: float) -> tuple[Begun, float] | None:
        """It ended; with what it made at least. None if its pull was not seen."""
        begun = self._begun.pop(queue_id, None)
        return None if begun is None else (begun, self._made(begun, at_s))

    def learn_pace(self, incarnation: str, model: str, first_token_s: float, seconds: float, output_tokens: int) -> None:
        """A run made `output_tokens` in `seconds` after its first one, which came `first_token_s` after its pull."""
        if output_tokens < 2 or not (0.0 <= first_token_s <= RUN_S_MAX and 0.0 < seconds <= RUN_S_MAX):
            return
        token_s = seconds / (output_tokens - 1)
        pace = self._paces.get((incarnation, model))
        if pace is None:
            while len(self._paces) >= PACES_MAX:
                del self._paces[next(iter(self._paces))]
            self._paces[incarnation, model] = _Pace(first_token_s, token_s)
        else:
            pace.add(first_token_s, token_s)

    def lower_bounds(self, now_s: float) -> Iterator[tuple[Begun, float]]:
        """Each request with the tokens that it has made at least."""
        for begun in self._begun.values():
            yield begun, self._made(begun, now_s)

    def forget(self) -> None:
        """Events were missed: who runs is not known."""
        self._begun.clear()

    def _made(self, begun: Begun, now_s: float) -> float:
        pace = self._paces.get((begun.incarnation, begun.model)) if begun.incarnation else None
        if pace is None:
            return begun.produced_tokens
        decoding_s = now_s - begun.pulled_s - pace.first_token_s
        made = begun.produced_tokens + max(0.0, SURE_SHARE * decoding_s / pace.token_s)
        return min(made, begun.output_tokens_max)
