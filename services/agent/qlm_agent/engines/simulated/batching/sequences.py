"""The runs inside a simulated engine, and their progress since the last report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from qlm_agent.engines.policies.port import SequenceView
from qlm_agent.engines.port import EngineFailure


class Phase(Enum):
    """Where a run is. PAUSED, MOVING and OFFLOADED runs are in no step; MOVING ones hold KV of the GPU."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"  # without a seat by the policy, with its KV (`residence`)
    MOVING = "moving"  # its KV is being copied to host memory or back
    OFFLOADED = "offloaded"
    REMOVED = "removed"


@dataclass(slots=True, eq=False, kw_only=True)
class RunState(SequenceView):
    """One run, mutable. While it decodes, `produced_tokens` is as of the decode step `settled_step`: every decoding run gets one token a
    step, so it need not be updated in between; `settle` does, for a policy to read."""

    target_tokens: int  # produced tokens at its end
    resumed: int  # tokens of earlier attempts
    reported: int  # produced tokens that were reported
    phase: Phase = Phase.WAITING
    prefill_tokens: int = 0  # of this prefill, 0 before it
    prefill_done: int = 0
    cached_tokens: int | None = None  # of its first prefill here
    settled_step: int = 0
    seated_at_s: float = 0.0  # `served_s` of the batch, as of `served_s`
    moving_blocks: int = 0  # KV of the GPU while it is MOVING or PAUSED
    started_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    paused_s: float = 0.0  # without a seat by the policy, since its first token
    failure: EngineFailure | None = None

    @property
    def prefill_left_tokens(self) -> int:
        """See SequenceView."""
        if self.phase is Phase.PREFILL:
            return self.prefill_tokens - self.prefill_done
        return 0 if self.residence else self.prompt_tokens + self.produced_tokens

    def settle(self, decode_steps: int, served_s: float) -> None:
        """Brings a running run up to date, after so many decode steps and seconds of steps of the batch."""
        self.produced_tokens = self.produced_at(decode_steps)
        self.settled_step = decode_steps
        self.served_s += served_s - self.seated_at_s
        self.seated_at_s = served_s

    @property
    def kv_tokens(self) -> int:
        """KV written while it does not decode (of its last token none is), or at its addition."""
        return self.prompt_tokens + self.produced_tokens - 1

    def produced_at(self, decode_steps: int) -> int:
        """Tokens produced after so many decode steps of the engine."""
        return self.produced_tokens + (decode_steps - self.settled_step if self.phase is Phase.DECODE else 0)

    def held_at(self, decode_steps: int) -> int:
        """Tokens of KV written: the next step writes that of the last token."""
        return self.prompt_tokens + self.produced_at(decode_steps) - 1

    def end_step(self) -> int:
        """The decode step that makes its last token."""
        return self.settled_step + self.target_tokens - self.produced_tokens


@dataclass(slots=True)
class Progress:
    """Tokens `start` to `end` of a run, made from `first_s` to `last_s`; `done`: these are its last, or it failed. `paused_s`,
    `cached_tokens`: see EngineOutput."""

    run_id: str
    start: int
    end: int
    started_s: float
    first_s: float
    last_s: float
    done: bool
    failure: EngineFailure | None
    paused_s: float = 0.0
    cached_tokens: int | None = None
