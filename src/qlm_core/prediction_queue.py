"""Waiting and completion of the groups of one virtual queue (QLM section 6; equation 10 for the swaps), in one pass over the groups.

Groups of one model in a row are a *run*: their requests share the batch, so a request waits for the work of those ahead less what a
full batch holds (that much is in flight beside it), and for the prefills ahead, which are served one after the other. Where the model
changes, all that runs must end first, and then the new weights come in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from qlm_core.distribution import Normal
from qlm_core.errors import Unavailable
from qlm_core.model import ModelSpec
from qlm_core.prediction_service import Service, service
from qlm_core.prediction_views import GroupTime, GroupView, QueueView
from qlm_core.profile import HardwareProfile, ProfileSnapshot


def group_times(view: QueueView, catalogue: Mapping[str, ModelSpec], profiles: ProfileSnapshot) -> tuple[GroupTime, ...]:
    """Times of each group of a virtual queue, in its order. Costs O(groups). Raises Unavailable (NO_PREDICTION) where a group's
    model is not in the catalogue or has no hardware profile on the instance."""
    engine = _Engine(view, catalogue, profiles)
    runs = _runs(view.groups)
    start, active = Normal.point(0.0), view.active_model
    run_time_s = 0.0
    times: list[GroupTime] = []
    if view.running > 0 and active and (not runs or runs[0][0].model != active):
        start = engine.drain_running()
        run_time_s = start.mean
    for run in runs:
        model = run[0].model
        running = view.running if model == active and run is runs[0] else 0
        if model != active:
            start = start.shifted(engine.swap_s(model, overlap_s=run_time_s))
        run_times = _run_times(engine, run, start, running)
        times.extend(run_times)
        ended = max((time.completion for time in run_times), key=lambda completion: completion.mean)
        run_time_s = max(0.0, ended.mean - start.mean)
        start, active = ended, model
    return tuple(times)


class _Engine:
    """The services of one instance's models."""

    def __init__(self, view: QueueView, catalogue: Mapping[str, ModelSpec], profiles: ProfileSnapshot) -> None:
        self._view = view
        self._catalogue = catalogue
        self._profiles = profiles
        self._hardware: dict[str, HardwareProfile] = {}

    def hardware(self, model: str) -> HardwareProfile:
        found = self._hardware.get(model)
        if found is None:
            spec = self._catalogue.get(model)
            found = None if spec is None else self._profiles.hardware_for(self._view.instance, spec)
            if found is None:
                instance = self._view.instance
                raise Unavailable(
                    f"no hardware profile of {model} on {instance.gpu} x{instance.n_gpu}",
                    reason="NO_PREDICTION",
                    details={"model": model, "instance": instance.name},
                )
            self._hardware[model] = found
        return found

    def group(self, group: GroupView) -> Service:
        output = self._profiles.workload_for(group.model, group.slo_class, group.token_class).output_tokens
        if group.output_tokens_max < math.inf:
            output = output.capped(group.output_tokens_max)
            output = output if output.mean >= 1.0 else Normal(1.0, output.variance)
        prompt_tokens = group.waiting_prompt_tokens / group.waiting if group.waiting else 0.0
        return service(prompt_tokens, output, self.hardware(group.model), self._view.instance.batch_max)

    def running(self) -> Service:
        """The requests that run now: of any class of the active model."""
        workload = self._profiles.workload_for(self._view.active_model, "", "")
        made = service(
            workload.prompt_tokens_mean, workload.output_tokens, self.hardware(self._view.active_model), self._view.instance.batch_max
        )
        left = self._view.running_output_left
        return made if left is None else replace(made, left_tokens=left.mean)

    def running_left(self) -> Normal:
        """Decode work of the requests that run now."""
        running = self.running()
        left = self._view.running_output_left or Normal(running.left_tokens, running.output.variance)
        return left.scaled(running.token_s).repeated(self._view.running)

    def drain_running(self) -> Normal:
        """Until all that runs has ended."""
        return self.running().drain(self._view.running, full=True, behind=0.0)

    def swap_s(self, model: str, overlap_s: float) -> float:
        """Seconds of a swap to a model; what is on disk is brought to host memory while the run before it is served."""
        hardware = self.hardware(model)
        if model in self._view.warm_models:
            return hardware.swap_s(warm=True)
        return max(hardware.swap_s(warm=True), hardware.swap_s(warm=False) - overlap_s)


def _runs(groups: Sequence[GroupView]) -> list[list[GroupView]]:
    runs: list[list[GroupView]] = []
    for group in groups:
        if runs and runs[-1][0].model == group.model:
            runs[-1].append(group)
        else:
            runs.append([group])
    return runs


def _run_times(engine: _Engine, run: Sequence[GroupView], start: Normal, running: int) -> list[GroupTime]:
    """Prefix sums over a run: prefills ahead (known), decode work ahead, and requests ahead and behind."""
    decode_ahead = engine.running_left() if running else Normal.point(0.0)
    prefill_ahead_s = 0.0
    ahead = float(running)
    behind = float(sum(group.waiting for group in run))
    in_flight_s = engine.running().batch_left_s if running else 0.0
    slot_wait = Normal.point(0.0)
    times: list[GroupTime] = []
    for group in run:
        served = engine.group(group)
        count = float(group.waiting)
        behind -= count
        others = max(0.0, count - 1.0)
        total = ahead + count + behind
        if not ahead:
            in_flight_s = served.batch_left_s
        slot_wait = _later(slot_wait, decode_ahead.shifted(-in_flight_s).floored(0.0))
        wait = start.shifted(prefill_ahead_s) + slot_wait
        decode_others = served.output.scaled(served.token_s).repeated(others)
        beside_last_s = _mixed(in_flight_s, served, others)
        slot_wait = _later(slot_wait, (decode_ahead + decode_others).shifted(-beside_last_s).floored(0.0))
        last_wait = start.shifted(prefill_ahead_s + others * served.prefill_work_s) + slot_wait
        drain = served.drain(ahead + count, full=ahead + count > served.batch, behind=behind)
        times.append(
            GroupTime(
                group_id=group.group_id,
                wait=wait,
                last_wait=last_wait,
                prefill_s=served.prefill_s,
                decode=served.decode(total, others + behind),
                last_decode=served.decode(total, behind),
                completion=last_wait.shifted(served.prefill_s) + drain,
            )
        )
        decode_ahead = decode_ahead + served.output.scaled(served.token_s).repeated(count)
        prefill_ahead_s += count * served.prefill_work_s
        in_flight_s = _mixed(in_flight_s, served, count)
        ahead += count
    return times


def _mixed(in_flight_s: float, served: Service, started: float) -> float:
    """Work in flight in a full batch of which `started` requests are of this service, and the rest as before."""
    share = min(1.0, started / served.batch)
    return in_flight_s + share * (served.batch_left_s - in_flight_s)


def _later(one: Normal, other: Normal) -> Normal:
    """Who comes later in a queue never starts earlier."""
    return other if other.mean >= one.mean else one
