"""The policy in charge of a batch: which runs wait, pause, resume, and lose their KV before a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from qlm_agent.engines.policies.port import EnginePolicy, KvRule, Residence, Sequences
from qlm_agent.engines.simulated.batching.batch_state import BatchState
from qlm_agent.engines.simulated.batching.kv_blocks import blocks_for
from qlm_agent.engines.simulated.batching.paused_kv import PausedKv
from qlm_agent.engines.simulated.batching.sequences import Phase, RunState


class Scheduling:
    """Applies a policy to the state before each step. `due_s`: when the order changes by itself."""

    def __init__(self, state: BatchState, policy: EnginePolicy, paused_kv: PausedKv) -> None:
        self.due_s: float | None = None
        self._state = state
        self._policy = policy
        self._paused_kv = paused_kv
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
            promised = self._seat()
            if self._policy.kv is KvRule.PROACTIVE and self._paused_kv.wants_moves(promised):
                self._paused_kv.move_ahead(state.time_s, self._paused_victims()[::-1], promised)
        if self._preempts and self._make_room():
            self._order(state.running_view())
        state.changed = False
        self.due_s = self._policy.next_wakeup_s(state.time_s)

    def free_for_decode(self) -> bool:
        """Preempts until the decode step fits, which it does not; returns whether any run still waits for that."""
        state = self._state
        if state.paused:
            self._paused_kv.evict(state.decoding.blocks_needed, self._paused_victims())
        for run_id in self._policy.victims(state.time_s, state.running_view()):
            if state.decoding.blocks_needed <= state.kv.free:
                break
            run = state.runs[run_id]
            fits = blocks_for(run.prompt_tokens + run.produced_tokens) <= state.kv.capacity
            if self._pauses and fits and run.phase is Phase.DECODE:
                state.pause(run)
                self._paused_kv.evict(state.kv.capacity, (run,))
            else:
                state.preempt(run)
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

    def _seat(self) -> int:
        """Gives seats to the ordered runs: paused ones resume, and paused ones behind them make room for KV. A run without room keeps what
        is free for itself, so that later ones do not take it for ever. Returns the free blocks that are promised."""
        state, paused_kv = self._state, self._paused_kv
        ordered, state.waiting = state.waiting, []
        ahead = set[RunState]()
        seats, promised = state.batch_max - state.running, state.decoding.blocks_needed + state.spare_blocks()
        for run in ordered:
            ahead.add(run)
            if run.phase is Phase.REMOVED:
                continue
            if seats < 1 or run.residence is Residence.MOVING:
                state.held.append(run)
                continue
            needed = _blocks_to_seat(run)
            if needed + promised > state.kv.free and run.residence is not Residence.GPU and paused_kv.rule is not KvRule.DEFER:
                paused_kv.evict(needed + promised, (each for each in self._paused_victims() if each not in ahead))
            if needed + promised > state.kv.free and run.residence is not Residence.GPU:
                promised += needed
                state.held.append(run)
                continue
            seats -= 1
            if run.residence is Residence.HOST:
                paused_kv.fetch(run)
                needed -= run.moving_blocks
            promised += needed
            if run.residence is Residence.GPU:
                state.resume(run)
            else:
                state.waiting.append(run)
        return promised

    def _paused_victims(self) -> list[RunState]:
        """Paused runs, the first to lose its KV first."""
        state = self._state
        return [state.runs[run_id] for run_id in self._policy.victims(state.time_s, Sequences(list(state.paused.values())))]

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


def _blocks_to_seat(run: RunState) -> int:
    """Free blocks that it takes until the end of its first step."""
    match run.residence:
        case Residence.GPU:
            return blocks_for(run.kv_tokens + 1) - run.moving_blocks
        case Residence.HOST:
            return blocks_for(run.kv_tokens + 1)
        case _:
            return blocks_for(run.prompt_tokens + run.produced_tokens)
