"""The policy in charge of a batch: which runs wait, pause, resume, and lose their KV before a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from qlm_agent.engines.policies.port import EnginePolicy, Sequences
from qlm_agent.engines.simulated.batch_state import BatchState
from qlm_agent.engines.simulated.kv_blocks import blocks_for
from qlm_agent.engines.simulated.sequences import Phase, RunState


class Scheduling:
    """Applies a policy to the state before each step. `due_s`: when the order changes by itself."""

    def __init__(self, state: BatchState, policy: EnginePolicy) -> None:
        self.due_s: float | None = None
        self._state = state
        self._policy = policy
        self._pauses = type(policy).pause is not EnginePolicy.pause
        self._preempts = type(policy).preempt is not EnginePolicy.preempt

    def apply(self) -> None:
        """Orders the runs without a seat where they changed or the policy wants it, and makes room for them."""
        state = self._state
        due = self.due_s is not None and state.time_s >= self.due_s
        if not (state.changed or due):
            return
        running = state.running_view()
        waiting = self._order(running)
        for run_id in self._policy.pause(state.time_s, waiting, running) if self._pauses else ():
            run = state.runs[run_id]
            if run.phase is Phase.DECODE:
                state.pause(run)
        if state.paused:
            self._seat()
        if self._preempts and self._make_room():
            self._order(state.running_view())
        state.changed = False
        self.due_s = self._policy.next_wakeup_s(state.time_s)

    def free_for_decode(self) -> bool:
        """Preempts until the decode step fits, which it does not; returns whether any run still waits for that."""
        state = self._state
        for runs in (list(state.paused.values()), state.running_runs()):
            for run_id in self._policy.victims(state.time_s, Sequences(runs)) if runs else ():
                if state.decoding.blocks_needed <= state.kv.free:
                    break
                state.preempt(state.runs[run_id])
        return state.running > 0

    def _order(self, running: Sequences) -> Sequences:
        """Splits the runs without a seat into those to admit, in order, and those held back; returns all that were shown."""
        state = self._state
        shown = state.waiting + state.held if state.held else state.waiting
        waiting = Sequences(shown)
        ordered = [state.runs[run_id] for run_id in self._policy.order(state.time_s, waiting, running)]
        if not ordered and not state.running:
            ordered = shown[:1]  # a policy that holds all back while nothing runs would stop the engine
        chosen = set(ordered)
        state.held = [] if len(ordered) == len(shown) else [run for run in shown if run not in chosen]
        state.waiting = ordered
        return waiting

    def _seat(self) -> None:
        """Resumes paused runs in their turn: the waiting runs before them keep a seat and KV."""
        state = self._state
        waiting, state.waiting = state.waiting, []
        seats, blocks = state.batch_max - state.running, state.kv.free - state.decoding.blocks_needed - state.spare_blocks()
        for run in waiting:
            if run.phase is not Phase.PAUSED:
                state.waiting.append(run)
                needed = blocks_for(run.prompt_tokens + run.produced_tokens)
                seats, blocks = (seats - 1, blocks - needed) if needed <= blocks else (seats, blocks)
            elif seats > 0:
                state.resume(run)
                seats -= 1
            else:
                state.held.append(run)

    def _make_room(self) -> bool:
        """Preempts for waiting runs by the policy; returns whether it did."""
        state = self._state
        waiting = state.waiting[:]
        seats, blocks = state.batch_max - state.running, state.kv.free - state.decoding.blocks_needed - state.spare_blocks()
        preempted = False
        for position, run in enumerate(waiting):
            needed = blocks_for(run.prompt_tokens + run.produced_tokens)
            if seats < 1 or blocks < needed:
                victims = self._victims_for(waiting[position:], 1 - seats, needed - blocks)
                if not victims:
                    break
                for victim in victims:
                    seats, blocks = seats + 1, blocks + state.blocks_given_back(victim)
                    state.preempt(victim)
                preempted = True
            seats, blocks = seats - 1, blocks - needed
        return preempted

    def _victims_for(self, waiting: Sequence[RunState], seats: int, blocks: int) -> list[RunState]:
        """As many of the policy's victims as give so many seats and blocks; none where all of them do not."""
        state = self._state
        chosen: list[RunState] = []
        for run_id in self._policy.preempt(state.time_s, Sequences(waiting), state.running_view()):
            chosen.append(state.runs[run_id])
            blocks -= state.blocks_given_back(chosen[-1])
            if len(chosen) >= seats and blocks <= 0:
                return chosen
        return []
