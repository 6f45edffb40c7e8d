"""Continuous batching, step by step: chunked prefill, paged KV, preemption by recomputation or with KV kept. Pure; seconds are passed in.

A step gives every decoding run one token and spends at most `prefill_chunk_tokens` on prefills, by a rule (`prefills`). A run takes KV
for its whole prefill when it is admitted and one block whenever a decode step crosses into a new one. When the blocks of the next step are
not free, the policy's victims return to the waiting runs and recompute prompt + produced later. A decoding run can be taken out (`detach`)
and put back, here or in a later batch of its model (`attach`, `rejoin`), with its KV.

Costs O(1) a step while runs only decode (see `DecodingRuns`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qlm_agent.engines.policies.port import EnginePolicy, KvRule, Residence, takes_seats
from qlm_agent.engines.simulated.batching.batch_state import BatchState
from qlm_agent.engines.simulated.batching.kv_blocks import BLOCK_TOKENS, blocks_for
from qlm_agent.engines.simulated.batching.paused_kv import PausedKv
from qlm_agent.engines.simulated.batching.prefills import PrefillRule
from qlm_agent.engines.simulated.batching.scheduling import Scheduling
from qlm_agent.engines.simulated.batching.sequences import Phase, Progress, RunState
from qlm_agent.engines.simulated.batching.stages import Stages

StepDuration = Callable[[int, int, Sequence[tuple[int, int]]], float]
"""Seconds of a step: decoding runs, their context tokens, prefill chunks as (tokens before, tokens)."""


class SimulatedBatch:
    """The runs of one active model, and its view for the policy, which is reset. Times of calls never decrease. `expected_step_s`: of a
    step before its noise, default `step_s`. `kv_swap_s`: of copying so many tokens of paused KV to host memory or back, of which
    `host_kv_tokens` fit there. `stages`: of a pipeline; a step waits for the first one. `shared_prefix_tokens`: see `BatchState`."""

    def __init__(
        self,
        *,
        step_s: StepDuration,
        kv_capacity_tokens: int,
        batch_max: int,
        prefill_chunk_tokens: int,
        policy: EnginePolicy,
        model: str = "",
        expected_step_s: StepDuration | None = None,
        kv_swap_s: Callable[[int], float] = lambda tokens: 0.0,
        host_kv_tokens: int = 0,
        prefill: PrefillRule = PrefillRule.BESIDE,
        stages: Stages | None = None,
        shared_prefix_tokens: int = 0,
    ) -> None:
        self.model = model
        self.seats = batch_max
        self.step_tokens_max = max(prefill_chunk_tokens, batch_max) if prefill is PrefillRule.SHARED else prefill_chunk_tokens
        self.expected_step_s = expected_step_s or step_s
        self._step_s = step_s
        self._prefill = prefill
        self._stages = stages
        self._state = BatchState(
            kv_capacity_tokens=kv_capacity_tokens,
            batch_max=batch_max,
            policy_preempts=takes_seats(policy),
            shared_prefix_tokens=shared_prefix_tokens,
        )
        self.kv = self._state.kv
        self._paused_kv = PausedKv(self._state, policy.kv, kv_swap_s, host_kv_tokens // BLOCK_TOKENS)
        self._scheduling = Scheduling(self._state, policy, self._paused_kv)
        self._oracle = policy.oracle
        self._pauses = policy.kv is KvRule.PROACTIVE
        self._rejoining: list[RunState] = []
        self._last_step_s = 0.0
        self._step_end_s: float | None = None
        self._stirred = False  # decode from the next step on
        self._chunks: list[tuple[RunState, int]] = []  # prefills of the step under way
        policy.reset(self)

    @property
    def preemptions(self) -> int:
        return self._state.preemptions

    @property
    def running(self) -> int:
        return self._state.running

    @property
    def waiting(self) -> int:
        return len(self._state.waiting) + len(self._state.held)

    @property
    def kv_used_tokens(self) -> int:
        return self._state.kv.used * BLOCK_TOKENS

    @property
    def kv_capacity_tokens(self) -> int:
        return self._state.kv.capacity * BLOCK_TOKENS

    @property
    def kv_free_tokens(self) -> int:
        return self._state.kv.free * BLOCK_TOKENS

    @property
    def host_kv_tokens(self) -> int:
        """KV of paused runs in host memory."""
        return self._paused_kv.host_blocks * BLOCK_TOKENS

    @property
    def kv_stalled_s(self) -> float:
        """Seconds that steps waited for copies of paused KV."""
        return self._paused_kv.stalled_s

    @property
    def step_ended_s(self) -> float:
        """The end of the last step; 0 before the first."""
        return self._last_step_s

    @property
    def next_due_s(self) -> float | None:
        """The end of the step under way, or when the next can begin; None while only a call brings something to do."""
        if self._step_end_s is not None:
            return self._step_end_s
        if self._stirred and self._state.runs:
            return self._state.time_s if self._stages is None else max(self._state.time_s, self._stages.free_at_s)
        return self._turn_s

    def holds(self, run: RunState) -> bool:
        """Whether a run is here."""
        return self._state.runs.get(run.run_id) is run

    @property
    def _turn_s(self) -> float | None:
        """When the policy changes the order by itself, or paused KV has arrived."""
        if not (self._state.waiting or self._state.held):
            return None
        due_s, copied_s = self._scheduling.due_s, self._paused_kv.next_due_s
        if copied_s is None or due_s is None:
            return due_s if copied_s is None else copied_s
        return min(due_s, copied_s) if due_s > self._state.time_s else copied_s

    def add(self, now_s: float, run: RunState) -> None:
        """Takes a waiting run; it is considered at the next step. One that can never fit fails."""
        state = self._state
        assert run.run_id not in state.runs, f"run {run.run_id} twice"
        self._take(now_s, run)
        run.arrived_s = run.waiting_since_s = now_s
        run.true_tokens = run.target_tokens if self._oracle else 0
        if blocks_for(run.prompt_tokens + run.produced_tokens) > state.kv.capacity:
            state.fail(run)
            return
        state.waiting.append(run)
        state.changed = True
        if self._pauses:
            self._paused_kv.bursts.add(now_s, blocks_for(run.prompt_tokens + run.produced_tokens))

    def abort(self, run_id: str) -> None:
        """Drops a run and its unreported output; unknown ones are ignored."""
        state = self._state
        run = state.runs.pop(run_id, None)
        state.news.pop(run_id, None)
        if run is None or run.phase is Phase.REMOVED:
            return
        if run.phase is Phase.WAITING or run.phase is Phase.PAUSED:
            state.remove_waiting(run)
            if run.phase is Phase.PAUSED:
                self._paused_kv.forget(run)
        elif run.phase is Phase.MOVING:
            self._unmove(run)
        else:
            state.leave(run)
        run.phase = Phase.REMOVED
        self._stirred = True

    def decoding_tokens(self, run_id: str) -> int | None:
        """KV written of a decoding run; None for any other."""
        run = self._state.decoding.runs.get(run_id)
        return None if run is None else run.held_at(self._state.decoding.steps)

    def detach(self, run_id: str) -> RunState:
        """Takes a decoding run out of the steps; of the step under way it gets no token. Its KV stays taken until `release`."""
        state = self._state
        run = state.decoding.runs[run_id]
        held = state.decoding.stop(run)
        run.moving_blocks = blocks_for(held)
        if state.stepping:  # the block that the step writes to is taken already
            state.kv.give_back(blocks_for(held + 1) - run.moving_blocks)
        run.phase = Phase.MOVING
        if run.produced_tokens > run.reported:
            state.news[run.run_id] = run
        self._stirred = True
        return run

    def release(self, run: RunState) -> None:
        """Frees the KV of a detached run, which leaves this batch."""
        assert run.phase is Phase.MOVING, run
        del self._state.runs[run.run_id]
        self._unmove(run)
        run.phase = Phase.OFFLOADED
        self._stirred = True

    def attach(self, now_s: float, run: RunState) -> bool:
        """Takes the KV of an offloaded run; it decodes after `rejoin`. False where there is no seat or not enough KV."""
        assert run.phase is Phase.OFFLOADED, run
        state = self._state
        if state.running >= self.seats or blocks_for(run.kv_tokens) + state.spare_blocks() > state.kv.free:
            return False
        self._take(now_s, run)
        run.phase = Phase.MOVING
        run.note = -1
        run.moving_blocks = blocks_for(run.kv_tokens)
        state.kv.take(run.moving_blocks)
        state.restoring[run.run_id] = run
        return True

    def rejoin(self, run: RunState) -> None:
        """An attached run decodes from the next step on."""
        assert run.phase is Phase.MOVING, run
        self._rejoining.append(run)
        self._stirred = True

    def skip_time(self, from_s: float, to_s: float) -> None:
        """No step advanced from one time to the other."""
        state = self._state
        if self._step_end_s is None:
            state.time_s = max(state.time_s, to_s)
        else:
            state.time_s += to_s - from_s
            self._step_end_s += to_s - from_s

    def advance(self, until_s: float) -> None:
        """Makes every step that ends by then."""
        state = self._state
        while True:
            if self._step_end_s is None and self._stages is not None and self._stages.free_at_s > state.time_s:
                self._stirred = True
                state.time_s = max(state.time_s, min(self._stages.free_at_s, until_s))
                if self._stages.free_at_s > until_s:
                    return
            if self._step_end_s is None and not self._begin_step():
                turn_s = self._turn_s
                if turn_s is not None and state.time_s < turn_s <= until_s:
                    state.time_s = turn_s
                    continue
                state.time_s = max(state.time_s, until_s)
                return
            assert self._step_end_s is not None
            if self._step_end_s > until_s:
                return
            self._finish_step(self._step_end_s)

    def news(self) -> list[Progress]:
        """First tokens and ends since the last call; each reported once."""
        state = self._state
        progress = [self._report(run, run.produced_at(state.decoding.steps)) for run in state.news.values()]
        state.news.clear()
        return progress

    def progress(self) -> list[Progress]:
        """All unreported output; each token once."""
        decoding = self._state.decoding
        progress, steps = self.news(), decoding.steps
        progress += [self._report(run, made) for run in decoding.runs.values() if (made := run.produced_at(steps)) > run.reported]
        return progress

    def _take(self, now_s: float, run: RunState) -> None:
        state = self._state
        if self._step_end_s is None and not state.runs:
            state.time_s = max(state.time_s, now_s)
        state.runs[run.run_id] = run
        self._stirred = True

    # A step -----------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> bool:
        """Plans the next step and its duration; False if there is nothing to do."""
        state = self._state
        self._stirred = False
        if self._rejoining:
            self._rejoin_runs()
        if state.waiting or state.held:
            self._paused_kv.settle(state.time_s)
            self._scheduling.apply()
        preempted = state.decoding.blocks_needed > state.kv.free and self._scheduling.free_for_decode()
        state.kv.take(state.decoding.blocks_needed)
        decoding = len(state.decoding)
        budget = self._prefill.budget(self.step_tokens_max, decoding)
        for run in state.prefilling.values():
            budget -= self._schedule_chunk(run, budget)
        # A run that was just preempted is not admitted in the same step: it would take the blocks back.
        while budget > 0 and not preempted and state.waiting and state.admits(state.waiting[0]):
            run = state.waiting[0]
            left_tokens = run.prompt_tokens + run.produced_tokens - state.cached_tokens(run)
            if not self._prefill.chunk(left_tokens, budget, first=not self._chunks):
                break
            state.admit(state.waiting.pop(0))
            budget -= self._schedule_chunk(run, budget)
        if not decoding and not self._chunks:
            return False
        chunks = [(run.prefill_done, tokens) for run, tokens in self._chunks]
        step_s = self._step_s(decoding, state.decoding.context_tokens + decoding, chunks)
        stall_s = self._paused_kv.take_stall_s() if self._paused_kv.stall_s else 0.0
        if self._stages is None:
            self._step_end_s = state.time_s + step_s + stall_s
        else:
            self._step_end_s = self._stages.carry(state.time_s, step_s + stall_s)
        state.stepping = True
        return True

    def _finish_step(self, end_s: float) -> None:
        state = self._state
        self._paused_kv.step_s = end_s - state.time_s
        state.served_s += self._paused_kv.step_s
        state.time_s = self._last_step_s = end_s
        self._step_end_s = None
        state.stepping = False
        for run in state.decoding.step():
            state.end(run)
        for run, tokens in self._chunks:
            if run.phase is Phase.PREFILL:
                run.prefill_done += tokens
                if run.prefill_done == run.prefill_tokens:
                    state.join(run)
        self._chunks.clear()

    def _schedule_chunk(self, run: RunState, budget: int) -> int:
        tokens = self._prefill.chunk(run.prefill_tokens - run.prefill_done, budget, first=not self._chunks)
        if tokens:
            self._chunks.append((run, tokens))
        return tokens

    def _rejoin_runs(self) -> None:
        state = self._state
        for run in self._rejoining:
            if run.phase is Phase.MOVING:  # not aborted since
                del state.restoring[run.run_id]
                run.moving_blocks = 0
                run.residence = Residence.GPU
                run.seated_at_s = state.served_s
                state.decoding.start(run)
        self._rejoining.clear()

    def _unmove(self, run: RunState) -> None:
        """Gives back the KV of a run that was being moved."""
        self._state.restoring.pop(run.run_id, None)
        self._state.kv.give_back(run.moving_blocks)
        run.moving_blocks = 0

    # Output -----------------------------------------------------------------------------------------------------------

    def _report(self, run: RunState, produced: int) -> Progress:
        start, run.reported = run.reported, max(run.reported, produced)
        done = run.phase is Phase.REMOVED
        if done:
            self._state.runs.pop(run.run_id, None)
        last_s = self._last_step_s if run.ended_s is None else run.ended_s
        first_s = run.first_token_s if start == run.resumed and run.first_token_s is not None else last_s
        started_s = last_s if run.started_s is None else run.started_s
        return Progress(run.run_id, start, run.reported, started_s, first_s, last_s, done, run.failure, run.paused_s, run.cached_tokens)
