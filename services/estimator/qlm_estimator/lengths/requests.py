"""Learns output lengths from the events of requests: rows of classes, requests that have not ended, and the length model. Pure."""

from __future__ import annotations

from collections.abc import Callable

from qlm_core.profiles.profile import ProfileSnapshot, WorkloadProfile
from qlm_core.vocabulary.group import token_class
from qlm_core.vocabulary.model import ModelSpec
from qlm_estimator.events import GroupClass, Lifecycle
from qlm_estimator.lengths.classes import Begun, LengthLearner
from qlm_estimator.lengths.predictor import LengthPredictor

RUNNING_MAX = 65_536
"""Requests that are followed; beyond it the oldest is forgotten."""
SURE_SHARE = 0.8
"""Share of its expected tokens that a run has surely made: too high a bound would count a request as longer than it is."""


class RequestLengths:
    """Output lengths of one queue. A request's class, and what it weighs, are those at its first start; one whose start was not seen counts
    as if it had started at its end."""

    def __init__(self, *, memory: float, rows_max: int, made: Callable[[str, str], float]) -> None:
        """`made`: tokens that an incarnation is taken to have made of a request by now, by what it is busy with (`activity`)."""
        self.rows = LengthLearner(memory=memory, rows_max=rows_max)
        self._made_by = made
        self._begun: dict[str, Begun] = {}
        self.predictor = LengthPredictor()

    def restore(self, snapshot: ProfileSnapshot) -> None:
        self.rows.restore(snapshot.workload)
        self.predictor.restore(snapshot.length_model)

    def pulled(self, event: Lifecycle, spec: ModelSpec, group: GroupClass | None) -> float:
        """An agent took a request of a model; returns the share of its prompt that is expected to be computed."""
        begun = self._begun.get(event.queue_id)
        if begun is not None:
            begun.incarnation = event.incarnation
        elif event.prompt_tokens >= 1:
            tokens = token_class(event.prompt_tokens) if group is None or not group.token_class else group.token_class
            while len(self._begun) >= RUNNING_MAX:
                del self._begun[next(iter(self._begun))]
            begun = self._begun[event.queue_id] = Begun(
                classes=self.rows.classes(spec.name, "" if group is None else group.slo_class, tokens),
                incarnation=event.incarnation,
                output_tokens_max=max(1.0, float(spec.context_tokens_max - event.prompt_tokens)),
            )
        return 1.0 if begun is None else self.rows.uncached_share(begun.classes)

    def released(self, event: Lifecycle) -> None:
        """A request waits again."""
        begun = self._begun.get(event.queue_id)
        if begun is None:
            return
        if event.started:
            begun.produced_tokens = self._made(event.queue_id, begun)
        begun.incarnation = ""
        if begun.produced_tokens == 0.0:
            del self._begun[event.queue_id]

    def ended(self, event: Lifecycle) -> None:
        """A request was cancelled, expired or failed: its output would have been longer than what it made."""
        begun = self._begun.pop(event.queue_id, None)
        if begun is not None:
            claimed_tokens = min(float(event.output_tokens), begun.output_tokens_max)
            self.rows.give_up(begun.classes, max(self._made(event.queue_id, begun), claimed_tokens))

    def refused(self, event: Lifecycle) -> None:
        """A request ended with invalid figures: no length is learned, and it runs no longer."""
        self._begun.pop(event.queue_id, None)

    def completed(self, event: Lifecycle, model: str, slo_class: str) -> None:
        """A request made all its output; its figures have been checked."""
        begun = self._begun.pop(event.queue_id, None)
        guess = event.length_guess
        now = self.rows.classes(model, slo_class, token_class(event.prompt_tokens, 0 if guess is None else guess.class_tokens))
        began = {} if begun is None else begun.classes
        cached_tokens = event.cached_tokens if event.attempt == 1 else None
        classes = {key: began.get(key, clock) for key, clock in now.items()}
        self.rows.finish(classes, event.prompt_tokens, event.output_tokens, cached_tokens)
        if guess is not None:
            self.predictor.learn(model, guess, event.output_tokens)

    def missed(self) -> None:
        """Events were trimmed unread: the runs are not known."""
        self._begun.clear()

    def profiles(self) -> tuple[WorkloadProfile, ...]:
        """The workload rows to publish."""
        return self.rows.profiles((begun, self._made(queue_id, begun)) for queue_id, begun in self._begun.items())

    def _made(self, queue_id: str, begun: Begun) -> float:
        """Tokens that a request has made at least."""
        made = self._made_by(begun.incarnation, queue_id) if begun.incarnation else 0.0
        return min(begun.produced_tokens + SURE_SHARE * made, begun.output_tokens_max)
