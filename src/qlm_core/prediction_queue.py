"""Waiting and completion of the groups of one virtual queue, as values: the array model (`qlm_core.queue_model`) group by group."""

from __future__ import annotations

from collections.abc import Mapping

from qlm_core.distribution import Normal
from qlm_core.model import ModelSpec
from qlm_core.prediction_views import GroupTime, QueueView
from qlm_core.profile import ProfileSnapshot
from qlm_core.queue_reader import QueueReader
from qlm_core.queue_times import QueueTimes, queue_times


def group_times(view: QueueView, catalogue: Mapping[str, ModelSpec], profiles: ProfileSnapshot) -> tuple[GroupTime, ...]:
    """Times of each group of a virtual queue, in its order. Costs O(groups). Raises Unavailable (NO_PREDICTION) where a group's
    model is not in the catalogue or has no hardware profile on the instance."""
    groups = QueueReader(catalogue, profiles).read_one(view)
    if not view.groups:
        return ()
    times = queue_times(groups)
    return tuple(group_time(times, number, group.group_id) for number, group in enumerate(view.groups))


def group_time(times: QueueTimes, number: int, group_id: str) -> GroupTime:
    """One group's times as a value."""
    served = times.groups.service
    output = Normal(float(served.output[number]), float(served.output_variance[number]))
    waits = [Normal(float(times.wait_s[which, number]), float(times.wait_variance[which, number])) for which in (0, 1)]
    return GroupTime(
        group_id=group_id,
        wait=waits[0],
        last_wait=waits[1],
        prefill_s=float(times.prefill_s[0, number]),
        last_prefill_s=float(times.prefill_s[1, number]),
        decode=output.scaled(float(times.token_s[0, number])),
        last_decode=output.scaled(float(times.token_s[1, number])),
        completion=Normal(float(times.end_s[number]), float(times.end_variance[number])),
    )
