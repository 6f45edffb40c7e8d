"""What the events of requests tell of output lengths: rows of classes, requests that have not ended, and the length model. Pure."""

from __future__ import annotations

from qlm_core.group import token_class
from qlm_core.length_model import LengthModel
from qlm_core.model import ModelSpec
from qlm_core.profile import ProfileSnapshot, WorkloadProfile
from qlm_estimator.events import GroupClass, Lifecycle
from qlm_estimator.lengths.classes import LengthLearner
from qlm_estimator.lengths.predictor import LengthPredictor
from qlm_estimator.lengths.running import Begun, Made, RunningRequests


class RequestLengths:
    """Of one queue. A request's class, and what it weighs, are those at its first start; one whose start was not seen counts as if it had
    started at its end."""

    def __init__(self, *, memory: float, rows_max: int, made: Made) -> None:
        """As `LengthLearner`; `made`: see `running_requests`."""
        self.rows = LengthLearner(memory=memory, rows_max=rows_max)
        self._running = RunningRequests(made)
        self._predictor = LengthPredictor()

    def restore(self, snapshot: ProfileSnapshot) -> None:
        self.rows.restore(snapshot.workload)
        self._predictor.restore(snapshot.length_model)

    def pulled(self, event: Lifecycle, spec: ModelSpec, group: GroupClass | None) -> None:
        """An agent took a request of a model."""
        if self._running.pulled(event.queue_id, event.incarnation) or event.prompt_tokens < 1:
            return
        tokens = token_class(event.prompt_tokens) if group is None or not group.token_class else group.token_class
        classes = self.rows.classes(spec.name, "" if group is None else group.slo_class, tokens)
        begun = Begun(
            model=spec.name,
            classes=classes,
            incarnation=event.incarnation,
            output_tokens_max=max(1.0, float(spec.context_tokens_max - event.prompt_tokens)),
        )
        self._running.begin(event.queue_id, begun)

    def released(self, event: Lifecycle) -> None:
        """A request waits again."""
        self._running.released(event.queue_id, started=event.started)

    def ended(self, event: Lifecycle) -> None:
        """A request was cancelled, expired or failed: its output would have been longer than what it made."""
        found = self._running.ended(event.queue_id)
        if found is not None:
            begun, produced_tokens = found
            claimed_tokens = min(float(event.output_tokens), begun.output_tokens_max)
            self.rows.give_up(begun.classes, max(produced_tokens, claimed_tokens))

    def refused(self, event: Lifecycle) -> None:
        """A request ended with figures that are not believed: it tells no length, and runs no longer."""
        self._running.ended(event.queue_id)

    def completed(self, event: Lifecycle, model: str, slo_class: str) -> None:
        """A request made all its output; its figures have been checked."""
        found = self._running.ended(event.queue_id)
        guess = event.length_guess
        now = self.rows.classes(model, slo_class, token_class(event.prompt_tokens, 0 if guess is None else guess.class_tokens))
        began = {} if found is None else found[0].classes
        self.rows.finish({key: began.get(key, clock) for key, clock in now.items()}, event.prompt_tokens, event.output_tokens)
        if guess is not None:
            self._predictor.learn(model, guess, event.output_tokens)

    def missed(self) -> None:
        """Events were trimmed unread."""
        self._running.forget()

    def profiles(self) -> tuple[WorkloadProfile, ...]:
        """The workload rows to publish."""
        return self.rows.profiles(self._running.lower_bounds())

    def length_model(self) -> LengthModel:
        """The length model to publish."""
        return self._predictor.model()
