"""Predictions of one virtual queue as values, group by group, and of one new request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qlm_core.prediction.new_request import place_new
from qlm_core.prediction.prediction_views import GroupView, QueueView
from qlm_core.prediction.queue_reader import QueueReader
from qlm_core.prediction.queue_times import queue_times
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.statistics.distribution import Normal
from qlm_core.vocabulary.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTime:
    """Seconds from now. `wait`, `last_wait`: W, until the prefill of the group's first and last request begins. `prefill_s`,
    `last_prefill_s`, `decode`, `last_decode`: P and D of those two. `completion`: C of the whole group (equation 5)."""

    group_id: str
    wait: Normal
    last_wait: Normal
    prefill_s: float
    last_prefill_s: float
    decode: Normal
    last_decode: Normal
    completion: Normal

    @property
    def first_completion(self) -> Normal:
        """C = W + P + D (equation 1) of the group's first request."""
        return self.wait.shifted(self.prefill_s) + self.decode

    @property
    def last_completion(self) -> Normal:
        """C = W + P + D of the group's last request, which need not end last."""
        return self.last_wait.shifted(self.last_prefill_s) + self.last_decode


def group_times(view: QueueView, catalogue: Mapping[str, ModelSpec], profiles: ProfileSnapshot) -> tuple[GroupTime, ...]:
    """Times of each group of a virtual queue, in its order. Raises NoProfile."""
    reader = QueueReader(catalogue, profiles)
    for group in view.groups:
        reader.engine(view, group.model)
    _, groups = reader.read([view])
    if not view.groups:
        return ()
    times, served = queue_times(groups), groups.service
    found: list[GroupTime] = []
    for number, group in enumerate(view.groups):
        output = Normal(float(served.output[number]), float(served.output_variance[number]))
        waits = [Normal(float(times.wait_s[which, number]), float(times.wait_variance[which, number])) for which in (0, 1)]
        found.append(
            GroupTime(
                group_id=group.group_id,
                wait=waits[0],
                last_wait=waits[1],
                prefill_s=float(times.prefill_s[0, number]),
                last_prefill_s=float(times.prefill_s[1, number]),
                decode=output.scaled(float(times.token_s[0, number])),
                last_decode=output.scaled(float(times.token_s[1, number])),
                completion=Normal(float(times.end_s[number]), float(times.end_variance[number])),
            )
        )
    return tuple(found)


def predict_request(
    views: Sequence[QueueView],
    catalogue: Mapping[str, ModelSpec],
    profiles: ProfileSnapshot,
    model: str,
    prompt_tokens: int,
    output_tokens_max: int,
    deadline_s: float,
    *,
    slo_class: str = "",
    token_class: str = "",
) -> NewcomerTimes | None:
    """A new request that is a group of its own."""
    request = GroupView(
        group_id="",
        model=model,
        slo_class=slo_class,
        token_class=token_class,
        waiting=1,
        waiting_prompt_tokens=prompt_tokens,
        first_deadline_s=deadline_s,
        output_tokens_max=float(output_tokens_max),
    )
    return newcomer_times(views, catalogue, profiles, request)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewcomerTimes:
    """When a new request would start and end on the instance where it would end first: seconds from now, before calibration."""

    instance: str
    requests_ahead: int
    wait: Normal
    prefill_s: float
    completion: Normal


def newcomer_times(
    views: Sequence[QueueView],
    catalogue: Mapping[str, ModelSpec],
    profiles: ProfileSnapshot,
    request: GroupView,
    now_s: float | None = None,
) -> NewcomerTimes | None:
    """A new request, as a group of one, as `qlm_core.prediction.new_request` places it."""
    reader = QueueReader(catalogue, profiles)
    kept, groups = reader.read(views)
    (place,) = place_new(reader, kept, groups, [request], now_s)
    if place is None:
        return None
    times = place.table.times([place.number], [0.0])
    return NewcomerTimes(
        instance=place.view.instance.name,
        requests_ahead=place.requests_ahead,
        wait=Normal(float(times.wait_s[0]), float(times.wait_variance[0])),
        prefill_s=float(times.prefill_s[0]),
        completion=Normal(float(times.completion_s[0]), float(times.completion_variance[0])),
    )
