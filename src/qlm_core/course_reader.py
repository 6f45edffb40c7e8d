"""From views of virtual queues to the courses of what runs on them (`qlm_core.running_course`), on one profile snapshot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from qlm_core.length_curve import LengthCurve
from qlm_core.normal_arrays import Floats
from qlm_core.prediction_service import EngineColumns, Integers
from qlm_core.prediction_views import GroupView, QueueView, RunningView
from qlm_core.profile import PRIOR_SAMPLES, ProfileSnapshot
from qlm_core.queue_columns import COUNT, PROMPT, SERVICE
from qlm_core.queue_model import FULL_SHARE
from qlm_core.running_course import COURSE_ROWS, Runners, Waiting, courses

TOKEN_S = SERVICE + 4
"""The row of `ServiceColumns.token_s`."""


COURSES_MAX = 8
"""A course costs a millisecond, and who asks for predictions does not wait for many: where more queues would have one, none has, and
what has told what it made counts by what it has left alone."""


class CourseReader:
    """Keeps the curves that it saw: at most one for each class that the snapshot or a view names."""

    def __init__(self, profiles: ProfileSnapshot) -> None:
        self._profiles = profiles
        self._curves: list[LengthCurve] = []
        self._samples: list[float] = []
        self._number_of: dict[tuple[str, str, str], int] = {}

    def read(
        self,
        views: Sequence[QueueView],
        engine_of: Callable[[QueueView, str], int],
        columns: Callable[[], EngineColumns],
        first: Integers,
        rows: Floats,
    ) -> Floats:
        """[COURSE_ROWS, views]. There is one where all that runs has told what it made, nearly all of it decodes and more of its model is
        next, for up to COURSES_MAX views. `engine_of`: the number of a model's engine on an instance, of those in `columns`; `first`
        [views + 1]: where the groups of each view begin in `rows`."""
        waiting = [(queue, at) for queue, view in enumerate(views) if self._decodes(view) for at in range(_alike(view))]
        if not 0 < len({queue for queue, _ in waiting}) <= COURSES_MAX:
            return np.zeros((COURSE_ROWS, len(views)))
        chosen = sorted({queue for queue, _ in waiting})
        of, usual = np.zeros(len(views), dtype=np.int64), np.zeros(len(views))
        for queue in chosen:
            model = views[queue].active_model
            of[queue] = engine_of(views[queue], model)
            usual[queue] = self._profiles.workload_for(model, "", "").output_tokens_mean
        curve = [self._number(views[queue].active_model, views[queue].groups[at]) for queue, at in waiting]
        queue_of, place = np.array(waiting, dtype=np.int64).T
        told = rows[:, first[queue_of] + place]
        runners = self._runners([(queue, views[queue], runner) for queue in chosen for runner in views[queue].runners if runner.count])
        return courses(
            columns(),
            of,
            usual,
            self._curves,
            np.array(self._samples),
            runners,
            Waiting(
                queue=queue_of,
                curve=np.array(curve, dtype=np.int64),
                count=told[COUNT],
                prompt=told[PROMPT],
                output=told[SERVICE],
                token_s=told[TOKEN_S],
            ),
        )

    def _runners(self, classes: Sequence[tuple[int, QueueView, RunningView]]) -> Runners:
        count = np.array([runner.count for _, _, runner in classes])
        numbers = [self._number(view.active_model, runner) for _, view, runner in classes]
        prompts = [self._prompt_tokens(view.active_model, runner) for _, view, runner in classes]
        return Runners(
            queue=np.repeat(np.array([queue for queue, _, _ in classes], dtype=np.int64), count),
            curve=np.repeat(np.array(numbers, dtype=np.int64), count),
            prompt=np.repeat(np.array(prompts, dtype=np.float64), count),
            produced=np.concatenate([np.array(runner.produced_tokens, dtype=np.float64) for _, _, runner in classes]),
            limit=np.repeat(np.array([runner.output_tokens_max for _, _, runner in classes], dtype=np.float64), count),
        )

    def _decodes(self, view: QueueView) -> bool:
        """Whether all that runs has told what it made, nobody knows better than its classes, and nearly all of it decodes: where requests
        wait in the engine for their prefills, these set the pace."""
        told = sum(len(runner.produced_tokens) for runner in view.runners)
        if view.running_output_left is not None or not 0 < view.running == told:
            return False
        unstarted = sum(runner.unstarted(self._prompt_tokens(view.active_model, runner)) for runner in view.runners if runner.count)
        return unstarted <= (1.0 - FULL_SHARE) * told

    def _prompt_tokens(self, model: str, runner: RunningView) -> float:
        if runner.prompt_tokens is not None:
            return runner.prompt_tokens / runner.count
        return self._profiles.workload_for(model, runner.slo_class, runner.token_class).prompt_tokens_mean

    def _number(self, model: str, of: GroupView | RunningView) -> int:
        """That of the curve of a class."""
        key = (model, of.slo_class, of.token_class)
        number = self._number_of.get(key)
        if number is None:
            number = self._number_of[key] = len(self._curves)
            self._curves.append(self._profiles.output_curve_for(*key))
            self._samples.append(PRIOR_SAMPLES + self._profiles.workload_for(*key).samples)
        return number


def _alike(view: QueueView) -> int:
    """Groups at the head of the queue that the active model serves."""
    return next((at for at, group in enumerate(view.groups) if group.model != view.active_model), len(view.groups))
