"""The queue as it was a moment ago, and what can be predicted from it. Pure; replaced as a whole at each look."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qlm_core.assessment import Assessment
from qlm_core.group import slo_class, token_class
from qlm_core.instance import InstanceFacts
from qlm_core.model import ModelSpec
from qlm_core.new_request import slo_band
from qlm_core.open_groups import OpenGroups
from qlm_core.pauses import is_paused
from qlm_core.prediction_views import GroupView, QueueView, RequestPrediction
from qlm_core.profile import ProfileSnapshot
from qlm_core.request import Slo, SloKind
from qlm_core.running_request import predict_running, resumed
from qlm_gateway.joined import Joined, is_stale
from qlm_queue.values import Overview

PREDICTIONS_MAX = 1_024
"""Kinds of request that are predicted from one look; more are not predicted until the next."""
AGAIN_MAX = 32
"""Predictions of one look that are made anew because many have joined since."""

FAILURES_MAX = 100
"""Failures of one look that are remembered."""

_Kind = tuple[str, SloKind, str, str, int]
"""(model, SLO kind and class, token class, output limit in powers of two): the requests of one share a prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as predictions see it. `predicted_output_tokens`: by the length model, 0 where that is not in use."""

    model: str
    slo: Slo
    prompt_tokens: int
    output_tokens_max: int
    predicted_output_tokens: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A prediction, and how many had joined its queue by then."""

    found: RequestPrediction | None
    joined: int


class Outlook:
    """One look at the queue. `seen_s`: monotonic; `made_s`: seconds of the queue's clock at that time. `failures`: of predictions that
    could not be worked out, which are None: nonsense in a profile or an instance costs predictions, not the queue."""

    def __init__(
        self,
        overview: Overview,
        views: Sequence[QueueView],
        catalogue: Mapping[str, ModelSpec],
        profiles: ProfileSnapshot,
        *,
        seen_s: float,
        made_s: float,
    ) -> None:
        self.overview = overview
        self.views = tuple(views)
        self.seen_s = seen_s
        self.made_s = made_s
        self._catalogue = catalogue
        self._profiles = profiles
        self._by_name = {view.instance.name: view for view in self.views}
        self._assessed: Assessment | None = None
        self._slo_band: int | None = None
        self._requests_on: dict[str, int] | None = None
        self._open_groups: OpenGroups | None = None
        self._joined = Joined()
        self._kept: dict[_Kind, _Kept] = {}
        self._again = 0
        self.failures: list[str] = []

    def instance(self, name: str) -> InstanceFacts | None:
        """A live instance by its name."""
        view = self._by_name.get(name)
        return None if view is None else view.instance

    def instances_of(self, model: str) -> int:
        """Live instances that can serve a model."""
        return sum(1 for view in self.views if model in view.instance.models)

    def share_of(self, instance: str) -> float:
        """Of the requests that wait for the live instances, or run there, the share that one of them has: of those that end, about as
        many are its own, where the instances' queues last about equally long. 1 where there is none, or for an instance that is not
        there. Costs O(groups) once."""
        if self._requests_on is None:
            self._requests_on = {name: view.running + sum(group.waiting for group in view.groups) for name, view in self._by_name.items()}
        own = self._requests_on.get(instance, 0)
        return own / sum(self._requests_on.values()) if own else 1.0

    def is_paused(self, asked: Asked) -> bool:
        """Whether a request that waits does so until an operator says otherwise: nothing is predicted for it."""
        return is_paused(self.overview.pauses, asked.model, asked.tenant)

    def predict_new(self, asked: Asked, accepted_s: float | None = None) -> RequestPrediction | None:
        """A request that joins now, or joined at `accepted_s` and is in no group yet: as the last of the group that it may join, else
        where it would end first. Requests that are alike share the prediction of the first one, as long as few have joined since:
        where they join no group, each would cost O(groups)."""
        if self.is_paused(asked):
            return None
        if accepted_s is not None:
            return self._predict(asked, accepted_s)
        kind = _kind(asked)
        kept = self._kept.get(kind)
        if kept is not None and not self._is_stale(kept):
            return kept.found
        if kept is None and len(self._kept) >= PREDICTIONS_MAX:
            return None
        found = self._predict(asked, self.made_s)
        self._kept[kind] = _Kept(found, 0 if found is None else self._joined.count(found.instance))
        return found

    def _predict(self, asked: Asked, accepted_s: float) -> RequestPrediction | None:
        request = self._request(asked, accepted_s)
        return self._tried(lambda: self._assessment.arriving(request, self._group_for(request, asked), self.made_s))

    def _group_for(self, request: GroupView, asked: Asked) -> str:
        if self._open_groups is None:
            self._open_groups = OpenGroups(self.views)
        return self._open_groups.group_for(request, asked.slo.seconds)

    def _tried(self, predict: Callable[[], RequestPrediction | None]) -> RequestPrediction | None:
        try:
            return predict()
        except (ArithmeticError, ValueError) as error:
            if len(self.failures) < FAILURES_MAX:
                self.failures.append(f"{type(error).__name__}: {error}")
            return None

    def join(self, asked: Asked, instance: str) -> None:
        """A request was accepted after the look, and is expected to be served by this instance: later ones count it as ahead."""
        if instance in self._by_name:
            request = self._request(asked)
            self._joined.add(instance, _kind(asked), request, self._group_for(request, asked))

    def predict_waiting(self, asked: Asked, group_id: str, requests_ahead: int, produced_tokens: int = 0) -> RequestPrediction | None:
        """A request in a group, with so many before it on its virtual queue. `produced_tokens`: made in runs that were broken off."""
        if self.is_paused(asked):
            return None

        def predict() -> RequestPrediction | None:
            request = self._request(asked)
            if produced_tokens:
                request = resumed(self._profiles, request, produced_tokens)
            return self._assessment.waiting(group_id, requests_ahead, request=request)

        return self._tried(predict)

    def predict_running(self, asked: Asked, instance: str, produced_tokens: int) -> RequestPrediction | None:
        """A request that an instance runs, with so many output tokens made."""
        view = self._by_name.get(instance)
        if view is None:
            return None
        return self._tried(lambda: predict_running(view, self._catalogue, self._profiles, self._request(asked), produced_tokens))

    @property
    def _assessment(self) -> Assessment:
        """Made when something is asked."""
        if self._assessed is None:
            self._assessed = Assessment(self._catalogue, self._profiles, self.views)
        return self._assessed

    def _is_stale(self, kept: _Kept) -> bool:
        """Counts what it lets be made anew, and brings its queue up to date for that."""
        if kept.found is None or self._again >= AGAIN_MAX:
            return False
        if not is_stale(kept.found.requests_ahead, self._joined.count(kept.found.instance) - kept.joined):
            return False
        self._again += 1
        view = self._joined.on(self._by_name[kept.found.instance])
        self._tried(lambda: self._assessment.update(view))
        return True

    def _request(self, asked: Asked, accepted_s: float | None = None) -> GroupView:
        if self._slo_band is None:
            self._slo_band = slo_band(self.views)
        return _group_of_one(asked, asked.slo.deadline_s(self.made_s if accepted_s is None else accepted_s), self._slo_band)


def _kind(asked: Asked) -> _Kind:
    tokens = token_class(asked.prompt_tokens, asked.predicted_output_tokens)
    return (asked.model, asked.slo.kind, slo_class(asked.slo), tokens, asked.output_tokens_max.bit_length())


def _group_of_one(asked: Asked, deadline_s: float, slo_band: int) -> GroupView:
    return GroupView(
        group_id="",
        model=asked.model,
        slo_kind=asked.slo.kind,
        slo_class=slo_class(asked.slo),
        token_class=token_class(asked.prompt_tokens, asked.predicted_output_tokens),
        waiting=1,
        waiting_prompt_tokens=asked.prompt_tokens,
        first_deadline_s=deadline_s,
        output_tokens_max=float(asked.output_tokens_max),
        band=asked.slo.priority if asked.slo.kind is SloKind.PRIORITY else slo_band,
    )
