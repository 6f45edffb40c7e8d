"""KV swap: runs whose KV is in host memory, and the copies there and back as timed operations over the bus. Pure; seconds are passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from qlm_agent.engines.simulated.batching.sequences import Phase, RunState
from qlm_agent.engines.simulated.batching.transfers import Link, OperationEnded
from qlm_agent.engines.simulated.host_memory import HostKv
from qlm_agent.engines.simulated.pipeline import Batch
from qlm_agent.engines.simulated.timing import StepTiming


@dataclass(frozen=True, slots=True)
class ModelKv:
    """The KV of one model."""

    model: str
    bytes_per_token: int
    timing: StepTiming


@dataclass(slots=True, eq=False)
class _OffloadedRun:
    """An offloaded run: on its way to host memory, there, or (`returning`) on its way back."""

    run: RunState
    kv: ModelKv
    host_bytes: int
    returning: bool = False
    aborted: bool = False


@dataclass(slots=True, eq=False)
class _Operation:
    """An offload or restore with `left` runs still in motion."""

    number: int
    called_s: float
    out: bool
    left: int = 0
    done: list[_OffloadedRun] = field(default_factory=list)


class KvSwap:
    """The offloaded runs of all models. A batch that is passed in is the one that holds the runs being moved: a model is busy meanwhile."""

    def __init__(self, host: HostKv, bus: Link) -> None:
        self.host = host
        self._bus = bus
        self._parked: dict[str, _OffloadedRun] = {}
        self._moves: deque[tuple[float, _OffloadedRun, _Operation]] = deque()  # by their ends: the bus carries one at a time

    @property
    def offloaded(self) -> int:
        """Runs in host memory or on their way there."""
        return sum(not parked.returning for parked in self._parked.values())

    @property
    def off_gpu(self) -> int:
        """Runs that hold no KV of the GPU."""
        return sum(parked.run.phase is Phase.OFFLOADED for parked in self._parked.values())

    @property
    def next_due_s(self) -> float | None:
        """When the next copy is over, None if there is none."""
        return self._moves[0][0] if self._moves else None

    def offload(self, now_s: float, number: int, batch: Batch, kv: ModelKv, run_ids: Sequence[str]) -> list[OperationEnded]:
        """Takes decoding runs out of the batch, as far as host memory holds their KV. Returns the operations that ended at once."""
        operation = _Operation(number, now_s, out=True)
        for run_id in dict.fromkeys(run_ids):
            tokens = batch.decoding_tokens(run_id)
            if tokens is not None and self.host.take(tokens * kv.bytes_per_token):
                parked = _OffloadedRun(batch.detach(run_id), kv, tokens * kv.bytes_per_token)
                self._parked[run_id] = parked
                self._move(now_s, parked, operation)
        return self._end_if_done(now_s, operation)

    def restore(self, now_s: float, number: int, batch: Batch | None, model: str, run_ids: Sequence[str]) -> list[OperationEnded]:
        """Puts offloaded runs of the batch's model back while it has room. Returns the operations that ended at once."""
        operation = _Operation(number, now_s, out=False)
        for run_id in dict.fromkeys(run_ids):
            parked = self._parked.get(run_id)
            if batch is None or parked is None or parked.run.phase is not Phase.OFFLOADED or parked.kv.model != model:
                continue
            if batch.attach(now_s, parked.run):
                parked.returning = True
                self._move(now_s, parked, operation)
        return self._end_if_done(now_s, operation)

    def abort(self, run_id: str) -> None:
        """Forgets a run; the time of its copy is spent all the same."""
        parked = self._parked.pop(run_id, None)
        if parked is not None:
            self.host.give_back(parked.host_bytes)
            parked.aborted = True
            parked.run.phase = Phase.REMOVED

    def advance(self, batch: Batch | None) -> list[OperationEnded]:
        """Ends the copy that is over next, at `next_due_s`."""
        now_s, parked, operation = self._moves.popleft()
        operation.left -= 1
        if not parked.aborted:
            assert batch is not None
            operation.done.append(parked)
            if operation.out:
                batch.release(parked.run)
            else:
                batch.rejoin(parked.run)
                self.host.give_back(parked.host_bytes)
                del self._parked[parked.run.run_id]
        return self._end_if_done(now_s, operation)

    def _move(self, now_s: float, parked: _OffloadedRun, operation: _Operation) -> None:
        operation.left += 1
        self._moves.append((self._bus.carry(now_s, parked.kv.timing.kv_swap_s(parked.run.kv_tokens)), parked, operation))

    def _end_if_done(self, now_s: float, operation: _Operation) -> list[OperationEnded]:
        if operation.left:
            return []
        run_ids = tuple(parked.run.run_id for parked in operation.done if not parked.aborted)
        return [OperationEnded(number=operation.number, ended_s=now_s, took_s=now_s - operation.called_s, run_ids=run_ids)]
