"""What the events of requests tell of output lengths: rows of classes, requests that have not ended, and the length model. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from qlm_core.group import token_class
from qlm_core.length_model import LengthGuess, LengthModel
from qlm_core.model import ModelSpec
from qlm_core.profile import ProfileSnapshot, WorkloadKey, WorkloadProfile
from qlm_estimator.events import GroupClass, Lifecycle
from qlm_estimator.length_predictor import LengthPredictor
from qlm_estimator.length_shift import LengthShift
from qlm_estimator.lengths import LengthLearner
from qlm_estimator.running_requests import Begun, RunningRequests
from qlm_estimator.start_order import StartOrder

SHIFT_SAMPLES_KEPT = 5.0
"""Finishes that a class's past weighs as much as, once the outputs of its model have changed."""


class RequestLengths:
    """Of one queue. A request's class, and what it weighs, are those at its first start; one whose start was not seen counts as if it had
    started at its end."""

    def __init__(self, *, memory: float, rows_max: int) -> None:
        """As `LengthLearner`."""
        self.rows = LengthLearner(memory=memory, rows_max=rows_max)
        self._running = RunningRequests()
        self._predictor = LengthPredictor()
        self._shifts: dict[str, LengthShift] = {}  # by model of the catalogue
        self._orders: dict[str, StartOrder] = {}  # by model of the catalogue

    def restore(self, snapshot: ProfileSnapshot) -> None:
        self.rows.restore(snapshot.workload)
        self._predictor.restore(snapshot.length_model)

    def pulled(self, event: Lifecycle, spec: ModelSpec, group: GroupClass | None) -> None:
        """An agent took a request of a model."""
        at_s = event.entry_id[0] / 1000.0
        if self._running.pulled(event.queue_id, event.incarnation, at_s) or event.prompt_tokens < 1:
            return
        tokens = token_class(event.prompt_tokens) if group is None or not group.token_class else group.token_class
        classes = self.rows.classes(spec.name, "" if group is None else group.slo_class, tokens)
        begun = Begun(
            model=spec.name,
            classes=classes,
            incarnation=event.incarnation,
            pulled_s=at_s,
            output_tokens_max=max(1.0, float(spec.context_tokens_max - event.prompt_tokens)),
        )
        self._running.begin(event.queue_id, begun)
        self._orders.setdefault(spec.name, StartOrder()).begin(event.queue_id)

    def released(self, event: Lifecycle) -> None:
        """A request waits again."""
        self._running.released(event.queue_id, event.entry_id[0] / 1000.0, started=event.started)

    def ended(self, event: Lifecycle) -> None:
        """A request was cancelled, expired or failed: its output would have been longer than what it made."""
        found = self._gone(event)
        if found is not None:
            begun, produced_tokens = found
            claimed_tokens = min(float(event.output_tokens), begun.output_tokens_max)
            self.rows.give_up(begun.classes, max(produced_tokens, claimed_tokens))

    def refused(self, event: Lifecycle) -> None:
        """A request ended with figures that are not believed: it tells no length, and runs no longer."""
        self._gone(event)

    def _gone(self, event: Lifecycle) -> tuple[Begun, float] | None:
        """A request that tells no length is over, also one that was given back before it had begun, which nobody follows any more."""
        for order in self._orders.values():
            order.leave(event.queue_id)
        return self._running.ended(event.queue_id, event.entry_id[0] / 1000.0)

    def completed(self, event: Lifecycle, model: str, slo_class: str) -> None:
        """A request made all its output; its figures have been checked."""
        found = self._running.ended(event.queue_id, event.entry_id[0] / 1000.0)
        guess = event.length_guess
        now = self.rows.classes(model, slo_class, token_class(event.prompt_tokens, 0 if guess is None else guess.class_tokens))
        began = {} if found is None else found[0].classes
        if self._changed(event.queue_id, model, now, guess, float(event.output_tokens)):
            self.rows.forget(model, SHIFT_SAMPLES_KEPT)
        self.rows.finish({key: began.get(key, clock) for key, clock in now.items()}, event.prompt_tokens, event.output_tokens)
        if guess is not None:
            self._predictor.learn(model, guess, event.output_tokens)
        if found is not None and event.attempt == 1 and event.first_token_s > 0.0:
            first_token_s = event.first_token_s - found[0].pulled_s
            seconds = event.finished_s - event.first_token_s
            self._running.learn_pace(event.incarnation, model, first_token_s, seconds, event.output_tokens)

    def _changed(self, queue_id: str, model: str, classes: Iterable[WorkloadKey], guess: LengthGuess | None, output_tokens: float) -> bool:
        """Whether the outputs of a model have changed, by this finish and those before it, in the order of their starts."""
        order, shift = self._orders.setdefault(model, StartOrder()), self._shifts.setdefault(model, LengthShift())
        expected_tokens = self.rows.expected_tokens(classes)
        if expected_tokens is None:
            order.leave(queue_id)
            return False
        median_tokens = expected_tokens if guess is None else float(guess.expected_tokens)
        for told in order.end(queue_id, (expected_tokens, median_tokens, output_tokens)):
            if shift.add(*told):
                order.forget_ended()
                return True
        return False

    def missed(self) -> None:
        """Events were trimmed unread."""
        self._running.forget()
        self._orders.clear()

    def profiles(self, now_s: float) -> tuple[WorkloadProfile, ...]:
        """The workload rows to publish."""
        return self.rows.profiles(self._running.lower_bounds(now_s))

    def length_model(self) -> LengthModel:
        """The length model to publish."""
        return self._predictor.model()
