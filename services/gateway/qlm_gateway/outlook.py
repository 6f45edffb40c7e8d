"""The queue as it was a moment ago, and what can be predicted from it. Pure; replaced as a whole at each look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qlm_core.errors import Unavailable
from qlm_core.group import slo_class, token_class
from qlm_core.model import ModelSpec
from qlm_core.prediction import GroupTime, QueueView, RequestPrediction, group_times, predict_request
from qlm_core.profile import ProfileSnapshot
from qlm_core.request import Slo
from qlm_queue.values import Overview

PREDICTIONS_MAX = 1_024
"""Kinds of request that are predicted from one look; more are not predicted until the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as predictions see it."""

    model: str
    slo: Slo
    prompt_tokens: int
    output_tokens_max: int


class Outlook:
    """One look at the queue. `seen_s`: monotonic; `made_s`: seconds of the queue's clock at that time."""

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
        self._made_s = made_s
        self._catalogue = catalogue
        self._profiles = profiles
        self._new: dict[tuple[str, Slo, str, int], RequestPrediction | None] = {}
        self._groups: dict[str, dict[str, GroupTime]] = {}

    def instances_of(self, model: str) -> int:
        """Live instances that can serve a model."""
        return sum(1 for view in self.views if model in view.instance.models)

    def predict_new(self, asked: Asked, accepted_s: float | None = None) -> RequestPrediction | None:
        """A request that joins now, or joined at `accepted_s` and is in no group yet. Requests that are alike (model, SLO, prompt length
        within a factor of four, output limit) share the prediction of the first one: acceptance must not cost O(groups) each."""
        kind = (asked.model, asked.slo, token_class(asked.prompt_tokens), asked.output_tokens_max)
        if accepted_s is None and kind in self._new:
            return self._new[kind]
        if accepted_s is None and len(self._new) >= PREDICTIONS_MAX:
            return None
        found = predict_request(
            self.views,
            self._catalogue,
            self._profiles,
            asked.model,
            asked.prompt_tokens,
            asked.output_tokens_max,
            asked.slo.deadline_s(self._made_s if accepted_s is None else accepted_s),
            slo_class=slo_class(asked.slo),
            token_class=token_class(asked.prompt_tokens),
        )
        if accepted_s is None:
            self._new[kind] = found
        return found

    def predict_waiting(self, group_id: str, requests_ahead: int) -> RequestPrediction | None:
        """A request in a group, with so many before it on its virtual queue. Times go evenly from the first to the last of a group."""
        group = self.overview.groups.get(group_id)
        view = None if group is None else next((view for view in self.views if view.instance.name == group.instance), None)
        if group is None or view is None:
            return None
        time = self._times(view).get(group_id)
        if time is None:
            return None
        before = 0
        for other in view.groups:
            if other.group_id == group_id:
                break
            before += other.waiting
        share = min(max(requests_ahead - before, 0) / max(group.waiting - 1, 1), 1.0)
        wait = time.wait.scaled(1.0 - share) + time.last_wait.scaled(share)
        completion = time.first_completion.scaled(1.0 - share) + time.last_completion.scaled(share)
        return RequestPrediction(
            instance=view.instance.name,
            wait=wait,
            completion=completion,
            requests_ahead=requests_ahead,
            profile_version=self._profiles.version,
        )

    def _times(self, view: QueueView) -> Mapping[str, GroupTime]:
        times = self._groups.get(view.instance.name)
        if times is None:
            try:
                times = {time.group_id: time for time in group_times(view, self._catalogue, self._profiles)}
            except Unavailable:  # no profile of a model on this queue
                times = {}
            self._groups[view.instance.name] = times
        return times
