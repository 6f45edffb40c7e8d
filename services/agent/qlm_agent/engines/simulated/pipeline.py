"""Pipeline parallelism: as many batches in flight as stages (FastServe, section 4.3). Pure; seconds are passed in.

A stage has its share of the layers on its share of the GPUs, so it takes as long as the profile says of a whole step in tensor parallel,
and a token takes all stages. A batch passes the stages one after the other; when it leaves the first one, the next batch is scheduled. Each
stage keeps the KV of its own layers. Later stages repeat the first one's copies of KV, so a step that waits for one does so in every stage.

As vLLM's virtual engines, the batches share seats and KV evenly, each has a policy, and a run stays in the batch that it was added to, the
one with the fewest runs. A run that needs more than a batch's share of the KV fails.
"""

from __future__ import annotations

from collections.abc import Callable

from qlm_agent.engines.simulated.batching.batch import SimulatedBatch
from qlm_agent.engines.simulated.batching.sequences import Progress, RunState
from qlm_agent.engines.simulated.batching.stages import Stages


class PipelinedBatches:
    """The runs of one active model in `stages.count` batches, with the calls of SimulatedBatch. `batch`: makes the batch of a number, on
    these stages."""

    def __init__(self, stages: Stages, batch: Callable[[int], SimulatedBatch]) -> None:
        self._stages = stages
        self._batches = tuple(map(batch, range(stages.count)))

    @property
    def preemptions(self) -> int:
        return sum(batch.preemptions for batch in self._batches)

    @property
    def running(self) -> int:
        return sum(batch.running for batch in self._batches)

    @property
    def waiting(self) -> int:
        return sum(batch.waiting for batch in self._batches)

    @property
    def kv_used_tokens(self) -> int:
        return sum(batch.kv_used_tokens for batch in self._batches)

    @property
    def host_kv_tokens(self) -> int:
        return sum(batch.host_kv_tokens for batch in self._batches)

    @property
    def kv_stalled_s(self) -> float:
        return sum(batch.kv_stalled_s for batch in self._batches)

    @property
    def next_due_s(self) -> float | None:
        return min((due_s for batch in self._batches if (due_s := batch.next_due_s) is not None), default=None)

    def add(self, now_s: float, run: RunState) -> None:
        min(self._batches, key=lambda batch: batch.running + batch.waiting).add(now_s, run)

    def abort(self, run_id: str) -> None:
        for batch in self._batches:
            batch.abort(run_id)

    def decoding_tokens(self, run_id: str) -> int | None:
        return next((tokens for batch in self._batches if (tokens := batch.decoding_tokens(run_id)) is not None), None)

    def detach(self, run_id: str) -> RunState:
        return next(batch for batch in self._batches if batch.decoding_tokens(run_id) is not None).detach(run_id)

    def release(self, run: RunState) -> None:
        self._of(run).release(run)

    def attach(self, now_s: float, run: RunState) -> bool:
        return any(batch.attach(now_s, run) for batch in self._batches)

    def rejoin(self, run: RunState) -> None:
        self._of(run).rejoin(run)

    def skip_time(self, from_s: float, to_s: float) -> None:
        self._stages.skip_time(to_s - from_s)
        for batch in self._batches:
            batch.skip_time(from_s, to_s)

    def advance(self, until_s: float) -> None:
        """Makes every step that ends by then. Of batches that wait for the first stage, the one that ended its step first goes first."""
        while (due_s := self.next_due_s) is not None and due_s <= until_s:
            ready = (batch for batch in self._batches if batch.next_due_s == due_s)
            min(ready, key=lambda batch: batch.step_ended_s).advance(due_s)
        for batch in self._batches:
            batch.advance(until_s)

    def news(self) -> list[Progress]:
        return [each for batch in self._batches for each in batch.news()]

    def progress(self) -> list[Progress]:
        return [each for batch in self._batches for each in batch.progress()]

    def _of(self, run: RunState) -> SimulatedBatch:
        return next(batch for batch in self._batches if batch.holds(run))


Batch = SimulatedBatch | PipelinedBatches
"""The runs of one active model."""
