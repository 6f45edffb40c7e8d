"""Records a run from outside, over the public APIs: a frame every FRAME_EVERY_S."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from qlm_core.vocabulary.group import slo_class
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_load.campaign.chaos import Kill
from qlm_load.demo.cluster import serving_pids
from qlm_load.picture.recording import FRAMES_MAX, ClusterFrame, EndMark, InstanceFrame, KillMark, QueuedPart, Recording
from qlm_load.replay.ledger import Ledger
from qlm_load.workload.workload import Workload
from qlm_process.cluster.observer import ClusterObserver
from qlm_process.cluster.state import ClusterState
from qlm_process.cluster.view import ClusterView, GroupView, InstanceView

FRAME_EVERY_S = 0.25
CALL_TIMEOUT_S = 0.5
"""A process without an answer in this time is away in that frame."""


class Recorder:
    """One run. `state`: the present processes; `start_s`: monotonic, when the replay begins."""

    def __init__(
        self, gateways: Sequence[str], state: Callable[[], ClusterState | None], workload: Workload, time_scale: float, start_s: float
    ) -> None:
        self._gateways = gateways
        self._state = state
        self._workload = workload
        self._time_scale = time_scale
        self._start_s = start_s
        self._class_names = class_names(workload, time_scale)
        self._frames: list[ClusterFrame] = []
        self._processes: dict[str, None] = {}
        self._last_queues: dict[str, tuple[QueuedPart, ...]] = {}

    async def run(self) -> None:
        """Runs until cancelled."""
        async with ClusterObserver(self._gateways, call_timeout_s=CALL_TIMEOUT_S) as observer:
            while len(self._frames) < FRAMES_MAX:
                began_s = time.monotonic()
                view = await observer.poll()
                self._frames.append(self._frame(time.monotonic() - self._start_s, view))
                await asyncio.sleep(max(0.0, FRAME_EVERY_S - (time.monotonic() - began_s)))

    def recording(self, title: str, ledger: Ledger, kills: Sequence[Kill]) -> Recording:
        """The recording so far, with the client's ledger and the log of kills."""
        seconds = {request.slo_class: request.slo_s for request in self._workload.requests}
        return Recording(
            title=title,
            time_scale=self._time_scale,
            models=tuple(self._workload.vocabulary_sizes),
            classes=dict(sorted(seconds.items(), key=lambda named: named[1])),
            processes=tuple(self._processes),
            frames=tuple(self._frames),
            kills=tuple(
                KillMark(process=kill.process, at_s=kill.at_s, held=kill.held, up_after_s=kill.restarted_s)
                for kill in sorted(kills, key=lambda kill: kill.at_s)
            ),
            ends=tuple(
                EndMark(at_s=entry.ended_s - self._start_s, slo_class=entry.request.slo_class, attained=ledger.attained(entry))
                for entry in ledger.entries
                if entry.ended_s is not None
            ),
        )

    def _frame(self, at_s: float, view: ClusterView) -> ClusterFrame:
        state = self._state()
        if state is not None:
            self._processes |= dict.fromkeys(process.name for process in state.processes)
        return ClusterFrame(
            at_s=at_s,
            unplaced=view.unplaced,
            plan_version=view.plan_version,
            instances={instance.name: self._instance(instance, known=_queues_known(view)) for instance in view.instances},
            serving=tuple(serving_pids(state)),
        )

    def _instance(self, instance: InstanceView, *, known: bool) -> InstanceFrame:
        """If neither a gateway nor the planner reported the queues, the last ones stay."""
        if known:
            self._last_queues[instance.name] = merged(instance.groups, self._class_names)
        agent = instance.agent
        return InstanceFrame(
            up=agent is not None,
            model=agent.active_model if agent is not None else "",
            swapping_to=agent.swapping_to if agent is not None else "",
            running=agent.running if agent is not None else 0,
            kv_share=agent.kv_used_tokens / agent.kv_capacity_tokens if agent is not None and agent.kv_capacity_tokens else 0.0,
            queue=self._last_queues.get(instance.name, ()),
            operations=agent.operations if agent is not None else None,
        )


def class_names(workload: Workload, time_scale: float) -> dict[str, str]:
    """The queue's name of a class ("8s") -> the workload's ("interactive"); the shorter one if two share a name there."""
    seconds = {request.slo_class: request.slo_s for request in workload.requests}
    return {
        slo_class(Slo(kind=SloKind.COMPLETION, seconds=slo_s / time_scale)): name
        for name, slo_s in sorted(seconds.items(), key=lambda named: -named[1])
    }


def merged(groups: Sequence[GroupView], names: Mapping[str, str]) -> tuple[QueuedPart, ...]:
    """A virtual queue with neighbouring groups of one model and class merged; empty ones are left out."""
    waiting = [(group.model, names.get(group.slo_class, group.slo_class), group.waiting) for group in groups if group.waiting]
    return tuple(
        QueuedPart(model=model, slo_class=name, waiting=sum(count for _, _, count in alike))
        for (model, name), alike in groupby(waiting, key=lambda part: part[:2])
    )


def _queues_known(view: ClusterView) -> bool:
    return view.gateway_answered or view.plan_version is not None
