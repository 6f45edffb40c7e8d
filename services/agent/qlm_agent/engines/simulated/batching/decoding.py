"""The decoding runs of a batch, at O(1) a step: a run's tokens follow from the count of decode steps since it was added, the blocks that a
step needs from a count of runs per residue of their length, and the next end from a heap."""

from __future__ import annotations

import heapq

from qlm_agent.engines.simulated.batching.kv_blocks import BLOCK_TOKENS
from qlm_agent.engines.simulated.batching.sequences import Phase, RunState


class DecodingRuns:
    """`runs`: by id, in the order of addition. `steps`: decode steps made. `context_tokens`: KV written of all of them."""

    def __init__(self) -> None:
        self.runs: dict[str, RunState] = {}
        self.steps = 0
        self.context_tokens = 0
        self._residues = [0] * BLOCK_TOKENS  # runs that need a block at steps of this residue
        self._ends: list[tuple[int, int, RunState]] = []
        self._starts = 0

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def blocks_needed(self) -> int:
        """New blocks that the next step writes to."""
        return self._residues[self.steps % BLOCK_TOKENS]

    def start(self, run: RunState) -> None:
        """The run decodes from the next step on."""
        run.phase = Phase.DECODE
        run.settled_step = self.steps
        self.runs[run.run_id] = run
        self.context_tokens += run.kv_tokens
        self._residues[self._residue(run)] += 1
        self._starts += 1
        heapq.heappush(self._ends, (run.end_step(), self._starts, run))

    def stop(self, run: RunState) -> int:
        """Takes a run out and settles its output, without the step under way; returns its written KV tokens."""
        del self.runs[run.run_id]
        held = run.held_at(self.steps)
        self.context_tokens -= held
        self._residues[self._residue(run)] -= 1
        run.produced_tokens = run.produced_at(self.steps)
        run.settled_step = self.steps
        return held

    def step(self) -> list[RunState]:
        """Every run makes a token; returns the runs that made their last, which stay among the others."""
        self.context_tokens += len(self.runs)
        self.steps += 1
        ended: list[RunState] = []
        while self._ends and self._ends[0][0] <= self.steps:
            step, _, run = heapq.heappop(self._ends)
            # The entry of a run taken out since is old; if no step was made meanwhile, both are alike.
            if run.phase is Phase.DECODE and run.end_step() == step and run not in ended:
                ended.append(run)
        return ended

    def _residue(self, run: RunState) -> int:
        """A step writes one token, so a run needs a block when its tokens fill its blocks: at steps of this residue."""
        return (run.settled_step - run.kv_tokens) % BLOCK_TOKENS
