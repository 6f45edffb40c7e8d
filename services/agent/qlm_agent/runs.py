"""The requests that an agent owns, as its machine sees them: counts and phases, never their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from qlm_agent.engine import FinishReason


class RunPhase(Enum):
    """Where a run is on its way out of the agent."""

    RUNNING = "running"  # on the engine
    ENDED = "ended"  # its end is to be written
    RETURNING = "returning"  # taken off the engine; it goes back to its place in the queue


class ReturnCause(StrEnum):
    """Why a run goes back (`qlm_queue.values.RequeueCause`, and UNSTARTED for what goes back by `unpull`)."""

    UNSTARTED = "unstarted"
    DRAINED = "drained"
    FAILED = "failed"


class Fate(Enum):
    """Why a run is no longer this agent's."""

    WRITTEN = "written"  # its end is stored
    GIVEN_BACK = "given_back"
    GONE = "gone"  # it ended elsewhere, or is another's now


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended: `finish` where it completed, else a reason of errors.proto with a message."""

    finish: FinishReason | None = None
    reason: str = ""
    message: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """One attempt, mutable. Tokens count from the start of the output: `resumed` of earlier attempts, `produced` by now, of which `stored`
    are known to be with the server. `kv_reserved`: tokens of KV that it is expected to need at its end."""

    run_id: str
    queue_id: str
    model: str
    prompt_tokens: int
    output_tokens_max: int
    resumed: int
    produced: int
    stored: int
    kv_reserved: int = 0
    phase: RunPhase = RunPhase.RUNNING
    ending: Ending | None = None
    cause: ReturnCause = ReturnCause.DRAINED
    failure: str = ""
    gap: bool = False  # the server's progress is shorter than was thought: it must be read again first

    @property
    def unstored(self) -> int:
        return self.produced - self.stored


class RunTable:
    """All runs of an incarnation, with the sums that decisions need. Change counts only through it."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        self.running = 0
        self.kv_reserved = 0  # of those on the engine
        self.held_tokens = 0  # produced and not stored

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._runs

    def get(self, run_id: str) -> Run | None:
        return self._runs.get(run_id)

    def all(self) -> list[Run]:
        """In the order they were pulled."""
        return list(self._runs.values())

    def on_engine(self) -> list[Run]:
        return [run for run in self._runs.values() if run.phase is RunPhase.RUNNING]

    def add(self, run: Run) -> None:
        assert run.run_id not in self._runs, run.run_id
        self._runs[run.run_id] = run
        self.held_tokens += run.unstored
        if run.phase is RunPhase.RUNNING:
            self.running += 1
            self.kv_reserved += run.kv_reserved

    def leave_engine(self, run: Run, phase: RunPhase) -> None:
        """From RUNNING to another phase."""
        assert run.phase is RunPhase.RUNNING, run
        run.phase = phase
        self.running -= 1
        self.kv_reserved -= run.kv_reserved

    def produced(self, run: Run, tokens: int) -> None:
        """The engine made so many tokens more. A run that outgrows what was reserved is expected to go on for half as much again."""
        run.produced += tokens
        self.held_tokens += tokens
        if run.phase is RunPhase.RUNNING and run.prompt_tokens + run.produced > run.kv_reserved:
            reserved = run.prompt_tokens + min(run.output_tokens_max, run.produced + run.produced // 2)
            self.kv_reserved += reserved - run.kv_reserved
            run.kv_reserved = reserved

    def stored(self, run: Run, tokens: int) -> None:
        """The server has the first `tokens` tokens of the output."""
        self.held_tokens -= tokens - run.stored
        run.stored = tokens

    def remove(self, run: Run) -> None:
        del self._runs[run.run_id]
        self.held_tokens -= run.unstored
        if run.phase is RunPhase.RUNNING:
            self.running -= 1
            self.kv_reserved -= run.kv_reserved
