"""Predictions of single requests: the waits that the planner published, calibrated, and the request's own part. Pure; a publication
replaces all of it.

A newcomer's own part is the requests accepted here since the publication, its prefill and its output. Each prediction costs O(1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from qlm_core.prediction.planned_waits import ClassWaits, PlannedWaits, QueueWaits, WaitKey, WaitPlace
from qlm_core.prediction.prediction_views import GroupView, QueueView, RequestPrediction
from qlm_core.prediction.running_request import output_left, predict_running
from qlm_core.profiles.calibration import UNCALIBRATED, CalibratedTime
from qlm_core.profiles.hardware_profile import HardwareProfile
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.statistics.distribution import Normal
from qlm_core.vocabulary.group import slo_class, token_class
from qlm_core.vocabulary.instance import PREFILL_CHUNK_TOKENS, InstanceFacts
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.pauses import Pause, is_paused
from qlm_core.vocabulary.request import Slo, SloKind

FAILURES_MAX = 100
"""Failures of one publication that are remembered."""
SINCE_MAX = 10_000
"""Requests that are counted on top of a publication; of more the oldest are forgotten."""
OUTPUTS_KEPT_MAX = 10_000
"""Output lengths that requests of a publication share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """A request as predictions see it. `predicted_output_tokens`: by the length model, 0 where that is not in use."""

    model: str
    slo: Slo
    prompt_tokens: int
    output_tokens_max: int
    predicted_output_tokens: int = 0
    tenant: str = ""

    @property
    def key(self) -> WaitKey:
        return (self.model, self.slo.kind, slo_class(self.slo), token_class(self.prompt_tokens, self.predicted_output_tokens))


class AcceptedSince:
    """Requests that this gateway accepted, by class, until a publication counts them."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, float], list[int]] = {}
        self._total = 0

    def add(self, instance: str, slo_s: float, number: int) -> None:
        """`number`: of its acceptance. `instance`: where it is expected to be served."""
        if self._total >= SINCE_MAX:
            self.counted(number - SINCE_MAX // 2)
        self._numbers.setdefault((instance, slo_s), []).append(number)
        self._total += 1

    def counted(self, to: int) -> None:
        """A publication counts all up to an acceptance number."""
        kept = {key: [number for number in numbers if number > to] for key, numbers in self._numbers.items()}
        self._numbers = {key: numbers for key, numbers in kept.items() if numbers}
        self._total = sum(map(len, self._numbers.values()))

    def ahead(self, instance: str, slo_s: float) -> int:
        """How many of them are ahead of a newcomer with such an SLO. Costs O(SLOs among them)."""
        return sum(len(numbers) for (where, other_s), numbers in self._numbers.items() if where == instance and other_s <= slo_s)


class Outlook:
    """One publication of waits. `read_s`: when it was read, monotonic; `now_s` of calls: by the queue's clock. `failures`: of predictions
    that could not be worked out, which are None: nonsense in a profile or an instance costs predictions, not the queue."""

    def __init__(
        self,
        waits: PlannedWaits,
        catalogue: Mapping[str, ModelSpec],
        profiles: ProfileSnapshot,
        since: AcceptedSince,
        pauses: Iterable[Pause] = (),
        *,
        read_s: float,
    ) -> None:
        self.waits = waits
        self.read_s = read_s
        self.failures: list[str] = []
        self._catalogue = catalogue
        self._profiles = profiles
        self._since = since
        self._pauses = tuple(pauses)
        self._queues = {queue.instance.name: queue for queue in waits.queues}
        self._classes = {each.key: each for each in waits.classes}
        self._requests = sum(queue.running + queue.waiting for queue in waits.queues)
        # Shared by the requests of a publication: many arrive between two.
        self._hardware: dict[tuple[str, str], HardwareProfile | None] = {}
        self._outputs: dict[tuple[WaitKey, int, int], Normal] = {}

    def instance(self, name: str) -> InstanceFacts | None:
        """A live instance by its name."""
        queue = self._queues.get(name)
        return None if queue is None else queue.instance

    def share_of(self, instance: str) -> float:
        """The share that one live instance has of the requests that wait for them or run there: of those that end, about as
        many are its own, where the instances' queues last about equally long. 1 where there is none, or for an instance that is not
        there."""
        queue = self._queues.get(instance)
        own = 0 if queue is None else queue.running + queue.waiting
        return own / self._requests if own else 1.0

    def is_paused(self, request: RequestShape) -> bool:
        """Whether a request that waits does so until an operator says otherwise: nothing is predicted for it."""
        return is_paused(self._pauses, request.model, request.tenant)

    def predict_new(self, request: RequestShape, now_s: float) -> RequestPrediction | None:
        """A new request: as the newcomers of its class, or of the class of its model with the nearest SLO, and behind those that
        were accepted here since. None where it is paused, and where no instance of its model can be predicted."""
        found = None if self.is_paused(request) else self._class_of(request)
        if found is None:
            return None
        newer = self._since.ahead(found.instance, found.slo_s)
        queue, place, ahead = self._queues[found.instance], found.curve.at(newer), found.requests_ahead + newer
        return self._tried(lambda: self._predict(request, queue, place, ahead, now_s))

    def accepted(self, request: RequestShape, number: int) -> None:
        """A request was accepted, with this acceptance number: later ones count it as ahead."""
        found = self._class_of(request)
        if found is not None:
            self._since.add(found.instance, found.slo_s, number)

    def predict_waiting(
        self, request: RequestShape, instance: str, requests_ahead: int, now_s: float, produced_tokens: int = 0
    ) -> RequestPrediction | None:
        """A request on a virtual queue, with so many before it. `produced_tokens`: made in runs that were broken off."""
        queue, newcomer = self._queues.get(instance), self._class_of(request)
        if queue is None or self.is_paused(request):
            return None
        if queue.curve is not None:
            place = queue.curve.at(requests_ahead)
        elif newcomer is not None:  # the queue was empty at the publication
            place = newcomer.curve.at(requests_ahead)
        else:
            return None
        return self._tried(lambda: self._predict(request, queue, place, requests_ahead, now_s, produced_tokens))

    def predict_running(self, request: RequestShape, instance: str, produced_tokens: int) -> RequestPrediction | None:
        """A request that an instance runs, with so many output tokens made."""
        queue = self._queues.get(instance)
        if queue is None:
            return None
        model = queue.instance.active_model
        behind = GroupView(
            group_id="",
            model=model,
            slo_class="",
            token_class="",
            waiting=queue.alike,
            waiting_prompt_tokens=0,
            first_deadline_s=math.inf,
        )
        view = QueueView(instance=queue.instance, active_model=model, running=queue.running, groups=(behind,))
        return self._tried(lambda: predict_running(view, self._catalogue, self._profiles, _group_of_one(request), produced_tokens))

    def _tried(self, predict: Callable[[], RequestPrediction | None]) -> RequestPrediction | None:
        try:
            return predict()
        except (ArithmeticError, ValueError) as error:
            if len(self.failures) < FAILURES_MAX:
                self.failures.append(f"{type(error).__name__}: {error}")
            return None

    def _class_of(self, request: RequestShape) -> ClassWaits | None:
        found = self._classes.get(request.key)
        if found is None:
            alike = [each for each in self.waits.classes if each.key[0] == request.model]
            found = min(alike, key=lambda each: _unlike(each, request), default=None)
            if found is not None:
                self._classes[request.key] = found
        return found if found is not None and found.instance in self._queues else None

    def _predict(
        self, request: RequestShape, queue: QueueWaits, place: WaitPlace, requests_ahead: int, now_s: float, produced_tokens: int = 0
    ) -> RequestPrediction | None:
        hardware = self._hardware_for(queue.instance, request.model)
        if hardware is None:
            return None
        tokens = float(request.prompt_tokens + produced_tokens)
        model, _, slo_name, token_name = request.key
        share = self._profiles.workload_for(model, slo_name, token_name).uncached_share
        chunks = max(1.0, share * tokens / PREFILL_CHUNK_TOKENS)
        prefill_s = hardware.prefill_work_s(tokens, tokens * tokens, share) + chunks * place.chunk_s
        output = self._output_of(request, produced_tokens).scaled(place.token_s)
        own_wait = Normal(max(0.0, place.wait.mean - max(0.0, now_s - self.waits.made_s)), place.wait.variance)
        own_completion = own_wait.shifted(prefill_s) + output
        table = self._profiles.calibration
        of_wait = table.row(CalibratedTime.WAIT, request.model, queue.instance)
        of_completion = table.row(CalibratedTime.COMPLETION, request.model, queue.instance)
        return RequestPrediction(
            instance=queue.instance.name,
            wait=of_wait.applied(own_wait),
            completion=of_completion.applied(own_completion),
            requests_ahead=requests_ahead,
            profile_version=self._profiles.version,
            prefill_s=prefill_s,
            own_wait=None if of_wait is UNCALIBRATED else own_wait,
            own_completion=None if of_completion is UNCALIBRATED else own_completion,
            wait_p99_s=None if of_wait is UNCALIBRATED else of_wait.p99_s(own_wait),
            completion_p99_s=None if of_completion is UNCALIBRATED else of_completion.p99_s(own_completion),
        )

    def _hardware_for(self, instance: InstanceFacts, model: str) -> HardwareProfile | None:
        key = (instance.name, model)
        if key not in self._hardware:
            spec = self._catalogue.get(model)
            self._hardware[key] = None if spec is None else self._profiles.hardware_for(instance, spec)
        return self._hardware[key]

    def _output_of(self, request: RequestShape, produced_tokens: int) -> Normal:
        key = (request.key, request.output_tokens_max, produced_tokens)
        if key not in self._outputs:
            if len(self._outputs) >= OUTPUTS_KEPT_MAX:
                self._outputs.clear()
            self._outputs[key] = output_left(self._profiles, _group_of_one(request), produced_tokens)
        return self._outputs[key]


def _unlike(each: ClassWaits, request: RequestShape) -> tuple[bool, float, str]:
    """How far a class of the same model is from a request's: the kind of its SLO, then its seconds, on a logarithmic scale."""
    slo_s, other_s = request.slo.seconds, each.slo_s
    apart = 0.0 if slo_s == other_s else abs(math.log(min(slo_s, 1e9)) - math.log(min(other_s, 1e9)))
    return (SloKind.PRIORITY in (each.key[1], request.slo.kind) and each.key[1] is not request.slo.kind, apart, each.key[3])


def _group_of_one(request: RequestShape) -> GroupView:
    _, slo_kind, slo_name, tokens = request.key
    return GroupView(
        group_id="",
        model=request.model,
        slo_kind=slo_kind,
        slo_class=slo_name,
        token_class=tokens,
        waiting=1,
        waiting_prompt_tokens=request.prompt_tokens,
        first_deadline_s=math.inf,
        output_tokens_max=float(request.output_tokens_max),
    )
