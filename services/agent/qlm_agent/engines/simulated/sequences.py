"""The runs inside a simulated engine, and their progress since the last report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from qlm_agent.engines.policy import SequenceView
from qlm_agent.engines.port import EngineFailure


class Phase(Enum):
    """Where a run is. MOVING and OFFLOADED runs are in no step; MOVING ones hold KV of the GPU."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    MOVING = "moving"  # its KV is being copied to host memory or back
    OFFLOADED = "offloaded"
    REMOVED = "removed"


@dataclass(slots=True, eq=False)
class RunState:
    """One run, mutable. While it decodes, `produced` is as of the decode step `joined_step`: every decoding run gets one token a step, so
    it need not be updated in between."""

    run_id: str
    arrival: int
    deadline_s: float
    priority: int
    prompt_tokens: int
    target_tokens: int  # produced tokens at its end
    produced: int
    resumed: int  # tokens of earlier attempts
    reported: int  # produced tokens that were reported
    phase: Phase = Phase.WAITING
    prefill_tokens: int = 0  # of this prefill, 0 before it
    prefill_done: int = 0
    joined_step: int = 0
    moving_blocks: int = 0  # KV of the GPU while it is MOVING
    preemptions: int = 0
    started_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    failure: EngineFailure | None = None

    def view(self, decode_steps: int) -> SequenceView:
        return SequenceView(
            run_id=self.run_id,
            arrival=self.arrival,
            deadline_s=self.deadline_s,
            priority=self.priority,
            prompt_tokens=self.prompt_tokens,
            produced_tokens=self.produced_at(decode_steps),
            preemptions=self.preemptions,
        )

    @property
    def kv_tokens(self) -> int:
        """KV written while it does not decode (of its last token none is), or at its addition."""
        return self.prompt_tokens + self.produced - 1

    def produced_at(self, decode_steps: int) -> int:
        """Tokens produced after so many decode steps of the engine."""
        return self.produced + (decode_steps - self.joined_step if self.phase is Phase.DECODE else 0)

    def held_at(self, decode_steps: int) -> int:
        """Tokens of KV written: the next step writes that of the last token."""
        return self.prompt_tokens + self.produced_at(decode_steps) - 1

    def end_step(self) -> int:
        """The decode step that makes its last token."""
        return self.joined_step + self.target_tokens - self.produced


@dataclass(slots=True)
class Progress:
    """Tokens `start` to `end` of a run, made from `first_s` to `last_s`; `done`: these are its last, or it failed."""

    run_id: str
    start: int
    end: int
    started_s: float
    first_s: float
    last_s: float
    done: bool
    failure: EngineFailure | None
