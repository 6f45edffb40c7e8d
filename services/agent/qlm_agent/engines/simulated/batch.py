"""Continuous batching, step by step: chunked prefill, paged KV, preemption by recomputation. Pure; seconds are passed in.

A step gives every decoding run one token and spends at most `prefill_chunk_tokens` on prefills. A run takes KV for its whole prefill when
it is admitted and one block whenever a decode step crosses into a new one. When the blocks of the next step are not free, the policy's
victims return to the waiting runs and recompute prompt + produced later. A decoding run can be taken out (`detach`) and put back, here or
in a later batch of its model (`attach`, `rejoin`), with its KV.

Costs O(1) a step while runs only decode (see `DecodingRuns`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from qlm_agent.engines.policy import EnginePolicy, SequenceView
from qlm_agent.engines.port import EngineFailure, FailureKind
from qlm_agent.engines.simulated.decoding import DecodingRuns
from qlm_agent.engines.simulated.kv_blocks import BLOCK_TOKENS, KvBlocks, blocks_for
from qlm_agent.engines.simulated.sequences import Phase, Progress, RunState

StepDuration = Callable[[int, int, Sequence[tuple[int, int]]], float]
"""Seconds of a step: decoding runs, their context tokens, prefill chunks as (tokens before, tokens)."""

WATERMARK = 0.01
"""Share of the blocks that admission leaves free while others run, so that a new run is not preempted at once."""


class SimulatedBatch:
    """The runs of one active model. Times of calls never decrease."""

    def __init__(
        self, *, step_s: StepDuration, kv_capacity_tokens: int, batch_max: int, prefill_chunk_tokens: int, policy: EnginePolicy
    ) -> None:
        self.preemptions = 0
        self.kv = KvBlocks(kv_capacity_tokens)
        self._step_s = step_s
        self._batch_max = batch_max
        self._chunk_tokens = prefill_chunk_tokens
        self._policy = policy
        self._runs: dict[str, RunState] = {}
        self._waiting: list[RunState] = []
        self._reorder_at_s: float | None = None
        self._changed = False  # the waiting runs differ from those that the policy ordered
        self._prefilling: dict[str, RunState] = {}
        self._decoding = DecodingRuns()
        self._restoring: dict[str, RunState] = {}  # hold KV that is being filled
        self._rejoining: list[RunState] = []  # decode from the next step on
        self._news: dict[str, RunState] = {}
        self._time_s = 0.0  # simulated up to here
        self._last_step_s = 0.0
        self._step_end_s: float | None = None
        self._stirred = False  # decode from the next step on
        self._chunks: list[tuple[RunState, int]] = []  # prefills of the step under way

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding) + len(self._restoring)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_used_tokens(self) -> int:
        return self.kv.used * BLOCK_TOKENS

    @property
    def next_due_s(self) -> float | None:
        """The end of the step under way, or when the next can begin; None while only a call brings something to do."""
        if self._step_end_s is not None:
            return self._step_end_s
        if self._stirred and self._runs:
            return self._time_s
        return self._reorder_at_s if self._waiting else None

    def add(self, now_s: float, run: RunState) -> None:
        """Takes a waiting run; it is considered at the next step. One that can never fit fails."""
        assert run.run_id not in self._runs, f"run {run.run_id} twice"
        self._take(now_s, run)
        if blocks_for(run.prompt_tokens + run.produced) > self.kv.capacity:
            self._fail(run)
            return
        self._waiting.append(run)
        self._changed = True

    def abort(self, run_id: str) -> None:
        """Drops a run and its unreported output; unknown ones are ignored."""
        run = self._runs.pop(run_id, None)
        self._news.pop(run_id, None)
        if run is None or run.phase is Phase.REMOVED:
            return
        if run.phase is Phase.WAITING:
            self._waiting.remove(run)
            self._changed = True
        elif run.phase is Phase.MOVING:
            self._unmove(run)
        else:
            self._leave(run)
        run.phase = Phase.REMOVED
        self._stirred = True

    def decoding_tokens(self, run_id: str) -> int | None:
        """KV written of a decoding run; None for any other."""
        run = self._decoding.runs.get(run_id)
        return None if run is None else run.held_at(self._decoding.steps)

    def detach(self, run_id: str) -> RunState:
        """Takes a decoding run out of the steps; of the step under way it gets no token. Its KV stays taken until `release`."""
        run = self._decoding.runs[run_id]
        held = self._decoding.stop(run)
        run.moving_blocks = blocks_for(held)
        if self._step_end_s is not None:  # the block that the step writes to is taken already
            self.kv.give_back(blocks_for(held + 1) - run.moving_blocks)
        run.phase = Phase.MOVING
        if run.produced > run.reported:
            self._news[run.run_id] = run
        self._stirred = True
        return run

    def release(self, run: RunState) -> None:
        """Frees the KV of a detached run, which leaves this batch."""
        assert run.phase is Phase.MOVING, run
        del self._runs[run.run_id]
        self._unmove(run)
        run.phase = Phase.OFFLOADED
        self._stirred = True

    def attach(self, now_s: float, run: RunState) -> bool:
        """Takes the KV of an offloaded run; it decodes after `rejoin`. False where there is no seat or not enough KV."""
        assert run.phase is Phase.OFFLOADED, run
        spare = self._spare_blocks()
        if self.running >= self._batch_max or blocks_for(run.kv_tokens) + spare > self.kv.free:
            return False
        self._take(now_s, run)
        run.phase = Phase.MOVING
        run.moving_blocks = blocks_for(run.kv_tokens)
        self.kv.take(run.moving_blocks)
        self._restoring[run.run_id] = run
        return True

    def rejoin(self, run: RunState) -> None:
        """An attached run decodes from the next step on."""
        assert run.phase is Phase.MOVING, run
        self._rejoining.append(run)
        self._stirred = True

    def skip_time(self, from_s: float, to_s: float) -> None:
        """No step advanced from one time to the other."""
        if self._step_end_s is None:
            self._time_s = max(self._time_s, to_s)
        else:
            self._time_s += to_s - from_s
            self._step_end_s += to_s - from_s

    def advance(self, until_s: float) -> None:
        """Makes every step that ends by then."""
        while True:
            if self._step_end_s is None and not self._begin_step():
                turn_s = self._reorder_at_s if self._waiting else None
                if turn_s is not None and self._time_s < turn_s <= until_s:
                    self._time_s = turn_s
                    continue
                self._time_s = max(self._time_s, until_s)
                return
            assert self._step_end_s is not None
            if self._step_end_s > until_s:
                return
            self._finish_step(self._step_end_s)

    def news(self) -> list[Progress]:
        """First tokens and ends since the last call; each reported once."""
        steps = self._decoding.steps
        progress = [self._report(run, run.produced_at(steps)) for run in self._news.values()]
        self._news.clear()
        return progress

    def progress(self) -> list[Progress]:
        """All unreported output; each token once."""
        progress, steps = self.news(), self._decoding.steps
        progress += [self._report(run, made) for run in self._decoding.runs.values() if (made := run.produced_at(steps)) > run.reported]
        return progress

    def _take(self, now_s: float, run: RunState) -> None:
        if self._step_end_s is None and not self._runs:
            self._time_s = max(self._time_s, now_s)
        self._runs[run.run_id] = run
        self._stirred = True

    # A step -----------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> bool:
        """Plans the next step and its duration; False if there is nothing to do."""
        self._stirred = False
        self._rejoin_runs()
        self._apply_policy()
        preempted = self._free_for_decode()
        self.kv.take(self._decoding.blocks_needed)
        budget = self._chunk_tokens
        for run in self._prefilling.values():
            budget -= self._schedule_chunk(run, budget)
        # A run that was just preempted is not admitted in the same step: it would take the blocks back.
        while budget > 0 and not preempted and self._waiting and self._admits(self._waiting[0]):
            run = self._waiting.pop(0)
            self._admit(run)
            budget -= self._schedule_chunk(run, budget)
        decoding = len(self._decoding)
        if not decoding and not self._chunks:
            return False
        chunks = [(run.prefill_done, tokens) for run, tokens in self._chunks]
        self._step_end_s = self._time_s + self._step_s(decoding, self._decoding.context_tokens + decoding, chunks)
        return True

    def _finish_step(self, end_s: float) -> None:
        self._time_s = self._last_step_s = end_s
        self._step_end_s = None
        for run in self._decoding.step():
            self._end(run)
        for run, tokens in self._chunks:
            if run.phase is Phase.PREFILL:
                run.prefill_done += tokens
                if run.prefill_done == run.prefill_tokens:
                    self._join(run)
        self._chunks.clear()

    def _schedule_chunk(self, run: RunState, budget: int) -> int:
        tokens = min(budget, run.prefill_tokens - run.prefill_done)
        if tokens > 0:
            self._chunks.append((run, tokens))
        return tokens

    def _admits(self, run: RunState) -> bool:
        if self.running >= self._batch_max:
            return False
        return blocks_for(run.prompt_tokens + run.produced) + self._spare_blocks() <= self.kv.free

    def _spare_blocks(self) -> int:
        return round(self.kv.capacity * WATERMARK) if self.running else 0

    def _admit(self, run: RunState) -> None:
        run.phase = Phase.PREFILL
        run.prefill_tokens = run.prompt_tokens + run.produced
        run.prefill_done = 0
        run.started_s = self._time_s if run.started_s is None else run.started_s
        self.kv.take(blocks_for(run.prefill_tokens))
        self._prefilling[run.run_id] = run

    def _join(self, run: RunState) -> None:
        """The end of a prefill gives the first token, and the run decodes from the next step on."""
        del self._prefilling[run.run_id]
        run.produced += 1
        run.first_token_s = self._time_s if run.first_token_s is None else run.first_token_s
        if run.reported == run.produced - 1:
            self._news[run.run_id] = run
        self._decoding.start(run)
        if run.produced >= run.target_tokens:
            self._end(run)

    def _rejoin_runs(self) -> None:
        for run in self._rejoining:
            if run.phase is Phase.MOVING:  # not aborted since
                del self._restoring[run.run_id]
                run.moving_blocks = 0
                self._decoding.start(run)
        self._rejoining.clear()

    def _end(self, run: RunState) -> None:
        self._leave(run)
        run.phase = Phase.REMOVED
        run.ended_s = self._time_s
        self._news[run.run_id] = run

    def _fail(self, run: RunState) -> None:
        tokens = run.prompt_tokens + run.produced
        message = f"{tokens} tokens need more KV than the {self.kv.capacity * BLOCK_TOKENS} tokens of this engine"
        run.failure = EngineFailure(kind=FailureKind.KV_CAPACITY, message=message)
        run.phase = Phase.REMOVED
        self._news[run.run_id] = run

    # KV ---------------------------------------------------------------------------------------------------------------

    def _leave(self, run: RunState) -> None:
        """Frees the KV of a running run and settles its output."""
        if run.phase is Phase.PREFILL:
            del self._prefilling[run.run_id]
            self.kv.give_back(blocks_for(run.prefill_tokens))
        else:
            # In the middle of a step (abort) the block that the step writes to is taken already.
            self.kv.give_back(blocks_for(self._decoding.stop(run) + (self._step_end_s is not None)))

    def _unmove(self, run: RunState) -> None:
        """Gives back the KV of a run that was being moved."""
        self._restoring.pop(run.run_id, None)
        self.kv.give_back(run.moving_blocks)
        run.moving_blocks = 0

    def _free_for_decode(self) -> bool:
        """Preempts until the decode step fits; returns whether any run still waits for that."""
        if self._decoding.blocks_needed <= self.kv.free:
            return False
        for run_id in self._policy.victims(self._time_s, self._views(self._running_runs())):
            if self._decoding.blocks_needed <= self.kv.free:
                break
            self._preempt(self._runs[run_id])
        return self.running > 0

    def _preempt(self, run: RunState) -> None:
        self._leave(run)
        run.phase = Phase.WAITING
        if blocks_for(run.prompt_tokens + run.produced) > self.kv.capacity:
            self._fail(run)
            return
        self.preemptions += 1
        run.preemptions += 1
        self._waiting.insert(0, run)
        self._changed = True

    # Policy -----------------------------------------------------------------------------------------------------------

    def _apply_policy(self) -> None:
        due = self._reorder_at_s is not None and self._time_s >= self._reorder_at_s
        if not self._waiting or not (self._changed or due):
            return
        self._order_waiting()
        if self._make_room():
            self._order_waiting()
        self._changed = False
        self._reorder_at_s = self._policy.next_wakeup_s(self._time_s)

    def _order_waiting(self) -> None:
        order = self._policy.order(self._time_s, self._views(self._waiting))
        self._waiting = [self._runs[run_id] for run_id in order]

    def _make_room(self) -> bool:
        """Preempts for waiting runs by the policy; returns whether it did."""
        waiting = self._waiting[:]
        seats, blocks = self._batch_max - self.running, self.kv.free - self._decoding.blocks_needed - self._spare_blocks()
        preempted = False
        for position, run in enumerate(waiting):
            needed = blocks_for(run.prompt_tokens + run.produced)
            if seats < 1 or blocks < needed:
                victims = self._victims_for(waiting[position:], 1 - seats, needed - blocks)
                if not victims:
                    break
                for victim in victims:
                    seats, blocks = seats + 1, blocks + self._given_back(victim)
                    self._preempt(victim)
                preempted = True
            seats, blocks = seats - 1, blocks - needed
        return preempted

    def _victims_for(self, waiting: Sequence[RunState], seats: int, blocks: int) -> list[RunState]:
        """As many of the policy's victims as give so many seats and blocks; none where all of them do not."""
        chosen: list[RunState] = []
        for run_id in self._policy.preempt(self._time_s, self._views(waiting), self._views(self._running_runs())):
            chosen.append(self._runs[run_id])
            blocks -= self._given_back(chosen[-1])
            if len(chosen) >= seats and blocks <= 0:
                return chosen
        return []

    def _given_back(self, run: RunState) -> int:
        """Blocks that become free without a running run: its own, and the one of its next step."""
        if run.phase is Phase.PREFILL:
            return blocks_for(run.prefill_tokens)
        return blocks_for(run.held_at(self._decoding.steps) + 1)

    def _running_runs(self) -> list[RunState]:
        return [*self._prefilling.values(), *self._decoding.runs.values()]

    def _views(self, runs: Iterable[RunState]) -> list[SequenceView]:
        return [run.view(self._decoding.steps) for run in runs]

    # Output -----------------------------------------------------------------------------------------------------------

    def _report(self, run: RunState, produced: int) -> Progress:
        start, run.reported = run.reported, max(run.reported, produced)
        done = run.phase is Phase.REMOVED
        if done:
            self._runs.pop(run.run_id, None)
        last_s = self._last_step_s if run.ended_s is None else run.ended_s
        first_s = run.first_token_s if start == run.resumed and run.first_token_s is not None else last_s
        started_s = last_s if run.started_s is None else run.started_s
        return Progress(run.run_id, start, run.reported, started_s, first_s, last_s, done, run.failure)
