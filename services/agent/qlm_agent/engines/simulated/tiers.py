"""Where the weights of models are, and loads as timed operations: from disk to host memory, then over the bus to the GPU. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from qlm_agent.engines.port import EngineBusy, ModelLoadFailed, Tier
from qlm_agent.engines.simulated.batching.transfers import Link, OperationEnded
from qlm_agent.engines.simulated.host_memory import HostWeights
from qlm_agent.engines.simulated.timing import StepTiming


class _Stage(Enum):
    """Stage of a load."""

    QUEUED = "queued"  # nothing: it waits for another load
    DISK = "disk"
    BUS = "bus"


@dataclass(slots=True, eq=False)
class _Load:
    number: int
    model: str
    tier: Tier
    called_s: float
    stage: _Stage = _Stage.QUEUED
    due_s: float = 0.0  # end of the transfer under way

    def precedes(self, later: _Load) -> bool:
        """Whether a later load waits for this: both concern one model, or the one place on the GPU."""
        return self.model == later.model or self.tier is later.tier is Tier.ACTIVE


class ModelTiers:
    """`active`: the model on the GPU, "" for none. Loads of different models run side by side, as far as disk and bus allow."""

    def __init__(self, *, timings: Mapping[str, StepTiming], host: HostWeights, bus: Link, runs_on_gpu: Callable[[], int]) -> None:
        self.active = ""
        self.host = host
        self._timings = timings
        self._disk = Link()
        self._bus = bus
        self._runs_on_gpu = runs_on_gpu
        self._loads: list[_Load] = []

    @property
    def next_due_s(self) -> float | None:
        """When the next transfer is over, None if there is none."""
        return min((load.due_s for load in self._loads if load.stage is not _Stage.QUEUED), default=None)

    def tier(self, model: str) -> Tier:
        if model == self.active:
            return Tier.ACTIVE
        return Tier.WARM if self.host.holds(model) else Tier.COLD

    def load(self, now_s: float, number: int, model: str, tier: Tier) -> list[OperationEnded]:
        """Queues a load; returns the operations that ended at once."""
        self._loads.append(_Load(number, model, tier, now_s))
        return self._begin_loads(now_s)

    def advance(self) -> list[OperationEnded]:
        """Ends the transfer that is over next, at `next_due_s`."""
        load = min((load for load in self._loads if load.stage is not _Stage.QUEUED), key=lambda load: load.due_s)
        now_s = load.due_s
        if load.stage is _Stage.DISK and load.tier is Tier.ACTIVE:
            self._over_bus(now_s, load)
            return []
        if load.stage is _Stage.BUS:
            self.active = load.model
        if self.host.fits(load.model):
            self.host.hold(load.model)
        return [self._end(now_s, load), *self._begin_loads(now_s)]

    def _begin_loads(self, now_s: float) -> list[OperationEnded]:
        """Begins unblocked loads; a load that needs no transfer, or fails, ends at once."""
        ended: list[OperationEnded] = []
        begun: list[_Load] = []
        for load in list(self._loads):
            if load.stage is _Stage.QUEUED and not any(other.precedes(load) for other in begun):
                error = self._problem(load)
                if error is not None or not self._begin(now_s, load):
                    ended.append(self._end(now_s, load, error))
                    continue
            begun.append(load)
        return ended

    def _problem(self, load: _Load) -> EngineBusy | ModelLoadFailed | None:
        if load.model not in self._timings:
            return ModelLoadFailed(f"model {load.model} is not one of {', '.join(self._timings)}")
        leaves_gpu = load.model != self.active if load.tier is Tier.ACTIVE else load.model == self.active
        runs = self._runs_on_gpu()
        if leaves_gpu and runs:
            return EngineBusy(f"model {self.active} has {runs} runs")
        if load.tier is Tier.WARM and not self.host.fits(load.model):
            return ModelLoadFailed(f"model {load.model}: its weights do not fit in the {self.host.budget_gb} GB of host memory for weights")
        return None

    def _begin(self, now_s: float, load: _Load) -> bool:
        """Begins the first transfer; False where none is needed."""
        if load.tier is Tier.ACTIVE and load.model == self.active:
            return False
        if load.tier is Tier.ACTIVE or load.model == self.active:
            self.active = ""
        if load.tier is Tier.COLD:
            self.host.drop(load.model)
            return False
        if not self.host.holds(load.model):
            load.stage = _Stage.DISK
            load.due_s = self._disk.carry(now_s, self._timings[load.model].disk_to_host_s())
        elif load.tier is Tier.ACTIVE:
            self._over_bus(now_s, load)
        else:
            self.host.hold(load.model)
            return False
        return True

    def _over_bus(self, now_s: float, load: _Load) -> None:
        load.stage = _Stage.BUS
        load.due_s = self._bus.carry(now_s, self._timings[load.model].host_to_gpu_s())

    def _end(self, now_s: float, load: _Load, error: EngineBusy | ModelLoadFailed | None = None) -> OperationEnded:
        self._loads.remove(load)
        return OperationEnded(number=load.number, ended_s=now_s, took_s=now_s - load.called_s, error=error)
