"""The runs of one active model: who waits, who has a seat, who holds KV; and the moves between these. Pure."""

from __future__ import annotations

from qlm_agent.engines.policies.port import Residence, Sequences
from qlm_agent.engines.port import EngineFailure, FailureKind
from qlm_agent.engines.simulated.batching.decoding import DecodingRuns
from qlm_agent.engines.simulated.batching.kv_blocks import BLOCK_TOKENS, KvBlocks, blocks_for
from qlm_agent.engines.simulated.batching.sequences import Phase, RunState

WATERMARK = 0.01
"""Share of the blocks that admission leaves free while others run, so that a new run is not preempted at once."""


class BatchState:
    """`waiting`: runs to admit, in order; `held`: those that the policy holds back, and paused ones. `changed`: these differ from the runs
    that the policy ordered. `stepping`: a step is under way. `served_s`: seconds of all steps. `policy_preempts`: a run without a seat
    is without it by the policy, not only for want of KV. `shared_prefix_tokens`: with which all prompts begin; once a prompt is computed,
    later ones take its whole blocks of them from a cache, `cached_prefix_tokens`, all but their last token."""

    def __init__(self, *, kv_capacity_tokens: int, batch_max: int, policy_preempts: bool = False, shared_prefix_tokens: int = 0) -> None:
        self.policy_preempts = policy_preempts
        self.kv = KvBlocks(kv_capacity_tokens)
        self.batch_max = batch_max
        self.shared_prefix_tokens = shared_prefix_tokens
        self.cached_prefix_tokens = 0
        self.runs: dict[str, RunState] = {}
        self.waiting: list[RunState] = []
        self.held: list[RunState] = []
        self.changed = False
        self.prefilling: dict[str, RunState] = {}
        self.decoding = DecodingRuns()
        self.restoring: dict[str, RunState] = {}  # hold KV that is being filled
        self.paused: dict[str, RunState] = {}
        self.news: dict[str, RunState] = {}
        self.time_s = 0.0  # simulated up to here
        self.served_s = 0.0
        self.stepping = False
        self.preemptions = 0

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding) + len(self.restoring)

    def spare_blocks(self) -> int:
        return round(self.kv.capacity * WATERMARK) if self.running else 0

    def admits(self, run: RunState) -> bool:
        if self.running >= self.batch_max:
            return False
        return blocks_for(run.prompt_tokens + run.produced_tokens) + self.spare_blocks() <= self.kv.free

    def cached_tokens(self, run: RunState) -> int:
        """The tokens of a prompt in the prefix cache."""
        return min(self.cached_prefix_tokens, run.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    def blocks_given_back(self, run: RunState) -> int:
        """Blocks that become free without a running run: its own, and the one of its next step."""
        if run.phase is Phase.PREFILL:
            return blocks_for(run.prefill_tokens)
        return blocks_for(run.held_at(self.decoding.steps) + 1)

    def running_runs(self) -> list[RunState]:
        """Those with a seat, brought up to date."""
        runs = [*self.prefilling.values(), *self.decoding.runs.values()]
        for run in runs:
            run.settle(self.decoding.steps, self.served_s)
        return runs

    def running_view(self) -> Sequences:
        return Sequences(self.running_runs)

    # Moves ------------------------------------------------------------------------------------------------------------

    def admit(self, run: RunState) -> None:
        run.phase = Phase.PREFILL
        run.residence = Residence.GPU
        run.prefill_tokens = run.prompt_tokens + run.produced_tokens
        run.prefill_done = self.cached_tokens(run)
        run.cached_tokens = run.prefill_done if run.cached_tokens is None else run.cached_tokens
        run.seated_at_s = self.served_s
        run.started_s = self.time_s if run.started_s is None else run.started_s
        self._note_pause(run)
        self.kv.take(blocks_for(run.prefill_tokens))
        self.prefilling[run.run_id] = run

    def join(self, run: RunState) -> None:
        """The end of a prefill gives the first token, and the run decodes from the next step on."""
        del self.prefilling[run.run_id]
        self.cached_prefix_tokens = max(self.cached_prefix_tokens, min(run.prompt_tokens, self.shared_prefix_tokens))
        run.produced_tokens += 1
        run.first_token_s = self.time_s if run.first_token_s is None else run.first_token_s
        if run.reported == run.produced_tokens - 1:
            self.news[run.run_id] = run
        self.decoding.start(run)
        if run.produced_tokens >= run.target_tokens:
            self.end(run)

    def end(self, run: RunState) -> None:
        self.leave(run)
        run.phase = Phase.REMOVED
        run.ended_s = self.time_s
        self.news[run.run_id] = run
        if self.held:
            self.changed = True

    def fail(self, run: RunState) -> None:
        tokens = run.prompt_tokens + run.produced_tokens
        message = f"{tokens} tokens need more KV than the {self.kv.capacity * BLOCK_TOKENS} tokens of this engine"
        run.failure = EngineFailure(kind=FailureKind.KV_CAPACITY, message=message)
        run.phase = Phase.REMOVED
        self.news[run.run_id] = run

    def leave(self, run: RunState) -> None:
        """Frees the KV of a running run and settles its output."""
        if run.phase is Phase.PREFILL:
            del self.prefilling[run.run_id]
            self.kv.give_back(blocks_for(run.prefill_tokens))
        else:
            # In the middle of a step (abort) the block that the step writes to is taken already.
            self.kv.give_back(blocks_for(self.decoding.stop(run) + self.stepping))

    def preempt(self, run: RunState) -> None:
        """A running run loses its seat and its KV, and is computed again."""
        run.served_s += self.served_s - run.seated_at_s
        run.waiting_since_s = self.time_s
        self.leave(run)
        self._lose_kv(run)
        if run.phase is Phase.WAITING:
            self.waiting.insert(0, run)

    def drop_paused(self, run: RunState) -> None:
        """A paused run loses its KV on the GPU, and is computed again."""
        del self.paused[run.run_id]
        self.kv.give_back(run.moving_blocks)
        run.moving_blocks = 0
        self._lose_kv(run)
        if run.phase is Phase.REMOVED and run in self.held:
            self.held.remove(run)

    def _lose_kv(self, run: RunState) -> None:
        run.phase = Phase.WAITING
        run.residence = Residence.NONE
        if blocks_for(run.prompt_tokens + run.produced_tokens) > self.kv.capacity:
            self.fail(run)
            return
        self.preemptions += 1
        run.preemptions += 1
        self.changed = True

    def pause(self, run: RunState) -> None:
        """A decoding run leaves its seat between two steps, with its KV."""
        run.settle(self.decoding.steps, self.served_s)
        run.moving_blocks = blocks_for(self.decoding.stop(run))
        run.phase = Phase.PAUSED
        run.waiting_since_s = self.time_s
        self.paused[run.run_id] = run
        self.held.append(run)
        if run.produced_tokens > run.reported:
            self.news[run.run_id] = run

    def resume(self, run: RunState) -> None:
        """A paused run, whose KV is on the GPU, decodes from the next step on."""
        del self.paused[run.run_id]
        run.moving_blocks = 0
        run.seated_at_s = self.served_s
        self._note_pause(run)
        self.decoding.start(run)

    def _note_pause(self, run: RunState) -> None:
        """The run has a seat again."""
        if self.policy_preempts and run.first_token_s is not None:
            run.paused_s += self.time_s - run.waiting_since_s

    def remove_waiting(self, run: RunState) -> None:
        """Drops a run without a seat, waiting or paused; the KV of a paused one is its caller's."""
        self.paused.pop(run.run_id, None)
        (self.held if run in self.held else self.waiting).remove(run)
        self.changed = True
