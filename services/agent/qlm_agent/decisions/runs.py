"""The requests that an agent owns, as its machine sees them: counts and phases, never their tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, StrEnum

from qlm_agent.engines.port import FinishReason
from qlm_core.operations.preemption import Urgency


class RunPhase(Enum):
    """Where a run is on its way out of the agent."""

    RUNNING = "running"  # on the GPU
    OFFLOADING = "offloading"  # on the GPU, until its KV is in host memory
    OFFLOADED = "offloaded"  # waits in host memory
    RESTORING = "restoring"  # on the GPU again, once its KV is
    ENDED = "ended"  # its end is to be written
    RETURNING = "returning"  # off the engine; it returns to its place in the queue


ON_GPU = frozenset({RunPhase.RUNNING, RunPhase.OFFLOADING, RunPhase.RESTORING})
"""Phases that take a seat and KV; membership tests only."""


class ReturnCause(StrEnum):
    """Why a run returns: as in `qlm_queue.values.RequeueCause`, and two that use `unpull`."""

    UNSTARTED = "unstarted"
    DISPLACED = "displaced"  # unstarted, behind a more urgent head that is new
    EVICTED = "evicted"
    DRAINED = "drained"
    FAILED = "failed"
    SUSPECTED = "suspected"  # the engine broke with others on it
    AWAY = "away"  # the engine serves nobody: not an attempt of the request


class RemovalCause(Enum):
    """Why a run is no longer this agent's."""

    WRITTEN = "written"  # its end is stored
    GIVEN_BACK = "given_back"
    NOT_OWNED = "not owned"  # it ended elsewhere, or is another's now


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended: `finish` where it completed, else a reason of errors.proto with a message."""

    finish: FinishReason | None = None
    reason: str = ""
    message: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """One attempt, mutable. Tokens count from the start of the output: `resumed` of earlier attempts, `produced` by now, of which the
    server has `stored`. `kv_reserved`: tokens of KV that it is expected to need at its end. `started`: the engine has reported it.

    `on_gpu`: it takes a seat and KV; `on_engine`: the engine has it, there or in host memory. `reported_s`: time of its last tokens, None
    before them and after a break. `cached_tokens`: see `EngineOutput`, 0 where it is not known. `displacements`: evictions and offloads,
    earlier attempts included. `offloaded_s`: start of its offload; `refusals`: failed offloads or restores in a row. `failed`: earlier
    attempts that failed."""

    run_id: str
    queue_id: str
    model: str
    prompt_tokens: int
    output_tokens_max: int
    resumed: int
    produced: int
    stored: int
    urgency: Urgency
    kv_reserved: int = 0
    first_token: bool = False
    slo_class: str = ""
    resumable: bool = True
    displacements: int = 0
    failed: int = 0
    phase: RunPhase = RunPhase.RUNNING
    on_gpu: bool = True
    on_engine: bool = True
    started: bool = False
    reported_s: float | None = None
    cached_tokens: int = 0
    offloaded_s: float = 0.0
    refusals: int = 0
    ending: Ending | None = None
    cause: ReturnCause = ReturnCause.DRAINED
    failure: str = ""
    gap: bool = False  # the server's progress is shorter than expected: it must be read first

    @property
    def unstored(self) -> int:
        return self.produced - self.stored

    @property
    def has_output(self) -> bool:
        """This attempt has output, which giving it back may cost."""
        return self.produced > self.resumed

    @property
    def context_tokens(self) -> int:
        """KV that is written: none before it started."""
        return self.prompt_tokens + self.produced if self.started else 0


class RunTable:
    """All runs of an incarnation, with the sums that decisions need. Change counts and phases only through it."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        self._offloaded: dict[str, Run] = {}
        self.running = 0  # on the GPU
        self.offloading = 0  # of them, on their way to host memory
        self.kv_reserved = 0  # of the runs on the GPU
        self.held_tokens = 0  # produced and not stored
        self._failed = 0  # of all, runs with failed attempts
        self.others_runs = 0  # of other clients of the engine's server, as last reported
        self.others_kv_tokens = 0

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._runs

    def room(self, batch_max: int, kv_capacity_tokens: int) -> tuple[int, int]:
        """Seats and KV tokens that the runs and the others leave; negative if lookahead waits, or the others took more."""
        return batch_max - self.running - self.others_runs, kv_capacity_tokens - self.kv_reserved - self.others_kv_tokens

    def get(self, run_id: str) -> Run | None:
        return self._runs.get(run_id)

    def all(self) -> list[Run]:
        """In the order they were pulled."""
        return list(self._runs.values())

    @property
    def takes_suspect(self) -> bool:
        """A run that failed once may be added: every running one failed once too, and has output since."""
        return self.running <= self._failed and all(run.failed == 1 and run.has_output for run in self.on_gpu())

    @property
    def has_suspect(self) -> bool:
        """A running request must be alone: it failed, and may break the engine again."""
        return self._failed > 0 and any(run.failed > 1 or (run.failed == 1 and not run.has_output) for run in self.on_gpu())

    def on_gpu(self) -> list[Run]:
        return [run for run in self._runs.values() if run.on_gpu]

    def on_engine(self) -> list[Run]:
        return [run for run in self._runs.values() if run.on_engine]

    @property
    def prefill_left_tokens(self) -> int:
        """Prompt tokens of runs on the engine that have not started. O(runs)."""
        return sum(run.prompt_tokens for run in self._runs.values() if run.on_engine and not run.started)

    def offloaded(self) -> Collection[Run]:
        return self._offloaded.values()

    def add(self, run: Run) -> None:
        assert run.run_id not in self._runs, run.run_id
        self._runs[run.run_id] = run
        self.held_tokens += run.unstored
        self._failed += run.failed > 0
        self._take_gpu(run)

    def move(self, run: Run, phase: RunPhase) -> None:
        """Moves a run to another phase."""
        self._leave_gpu(run)
        self._offloaded.pop(run.run_id, None)
        run.phase = phase
        run.on_gpu = phase in ON_GPU
        run.on_engine = run.on_gpu or phase is RunPhase.OFFLOADED
        self._take_gpu(run)
        if phase is RunPhase.OFFLOADED:
            self._offloaded[run.run_id] = run

    def add_output(self, run: Run, tokens: int) -> None:
        """Adds tokens of the engine. A run that outgrows its reservation is expected to grow by half again."""
        run.produced += tokens
        self.held_tokens += tokens
        if run.prompt_tokens + run.produced > run.kv_reserved:
            reserved = run.prompt_tokens + min(run.output_tokens_max, run.produced + run.produced // 2)
            if run.on_gpu:
                self.kv_reserved += reserved - run.kv_reserved
            run.kv_reserved = reserved

    def set_stored(self, run: Run, tokens: int) -> None:
        """The server has the first `tokens` tokens of the output."""
        self.held_tokens -= tokens - run.stored
        run.stored = tokens

    def remove(self, run: Run) -> None:
        del self._runs[run.run_id]
        self._offloaded.pop(run.run_id, None)
        self._failed -= run.failed > 0
        self.held_tokens -= run.unstored
        self._leave_gpu(run)

    def _take_gpu(self, run: Run) -> None:
        if run.on_gpu:
            self.running += 1
            self.offloading += run.phase is RunPhase.OFFLOADING
            self.kv_reserved += run.kv_reserved

    def _leave_gpu(self, run: Run) -> None:
        if run.on_gpu:
            self.running -= 1
            self.offloading -= run.phase is RunPhase.OFFLOADING
            self.kv_reserved -= run.kv_reserved


@dataclass(slots=True, kw_only=True)
class Operations:
    """Counts of requests evicted by abort, offloaded and restored, and of models warmed early. Other operations are counted elsewhere."""

    evictions: int = 0
    kv_offloads: int = 0
    kv_restores: int = 0
    warmings: int = 0
