"""KV swap inside vLLM's scheduler: requests leave the batch with their KV, and return to continue exactly.

An offloaded request is in no queue of vLLM's: it has no KV on the GPU and is not scheduled. `restore` takes blocks for all computed tokens,
has the next step fill them and puts the request among those that wait with KV, which vLLM admits first; its next step is the decode step
after its last. Nothing is computed again.

Under asynchronous scheduling a request may be in a step under way when it is to leave: further steps exclude it, and it leaves after that
output.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request, RequestStatus

from qlm_agent.engines.vllm.scheduler.kv_connector import KvMoves, QlmKvConnector
from qlm_agent.engines.vllm.scheduler.order import PolicyScheduling

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

NEVER_STEP = sys.maxsize


class KvSwapScheduling(PolicyScheduling):
    """A mixin before one of vLLM's schedulers. Requests are named by their `run_id`. Without the connector nothing can be offloaded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._swap = self.connector if isinstance(self.connector, QlmKvConnector) else None
        self._leaving: dict[str, Request] = {}  # in a step under way
        self._away: dict[str, int] = {}  # computed tokens, by vLLM's request id
        self._stored: set[str] = set()  # of those the copy is made

    # Calls of the engine, between steps -------------------------------------------------------------------------------

    def offload(self, run_ids: Iterable[str]) -> list[str]:
        """Takes decoding requests out of the batch and returns those that leave: they make no output from then on except that of a step
        under way. The others continue unchanged: unknown, waiting or prefilling, or host memory is full. Their GPU blocks are free at
        once."""
        leave = []
        for run_id in dict.fromkeys(run_ids):
            request = self.requests.get(self._by_run_id.get(run_id, ""))
            if self._swap is None or request is None or not self._can_leave(request):
                continue
            if self._swap.reserve(request.request_id, request.num_computed_tokens):
                self._leaving[request.request_id] = request
                request.next_decode_eligible_step = NEVER_STEP
                leave.append(run_id)
        self._let_leave()
        return leave

    def offloaded(self) -> set[str]:
        """Requests with their KV in host memory."""
        return {self._urgencies[request_id].run_id for request_id in self._away if request_id in self._stored}

    def leaving(self) -> set[str]:
        """Requests with their KV on the way to host memory; one that loses it on the way continues without leaving."""
        return {self._urgencies[each].run_id for each in (*self._leaving, *(self._away.keys() - self._stored))}

    def restore(self, run_ids: Iterable[str]) -> list[str]:
        """Restores offloaded requests, and returns them; the others stay away: no seat or no KV free."""
        back = []
        for run_id in dict.fromkeys(run_ids):
            request = self.requests.get(self._by_run_id.get(run_id, ""))
            if request is not None and request.request_id in self._away and self._seats_free() > 0 and self._take_back(request):
                back.append(run_id)
        return back

    def host_kv_used_tokens(self) -> int:
        """Room in host memory that offloaded requests hold: whole blocks."""
        return 0 if self._swap is None else self._swap.host.used * self._swap.block_tokens

    def host_kv_capacity_tokens(self) -> int:
        """0 where nothing can be offloaded."""
        return 0 if self._swap is None else self._swap.host.capacity * self._swap.block_tokens

    # Calls of vLLM ----------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._let_leave()
        return super().schedule(throttle_prefills)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        moves = scheduler_output.kv_connector_metadata
        if isinstance(moves, KvMoves):
            self._stored.update(request_id for request_id in moves.stores if request_id in self._away)
        return outputs

    def has_finished_requests(self) -> bool:
        """vLLM takes requests that are in no queue for finished ones; offloaded ones are not."""
        if self.finished_req_ids or self.connector is None:
            return bool(self.finished_req_ids)
        return len(self.requests) - len(self._away) > sum(self.get_request_counts())

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        if self._leaving.pop(request.request_id, None) is not None:  # it lost its KV before it could leave
            self._forget(request)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        self._forget(request)
        return super()._free_request(request, delay_free_blocks)

    def _may_be_preempted(self, request: Request) -> bool:
        return request.request_id not in self._leaving and super()._may_be_preempted(request)

    # Leaving and returning --------------------------------------------------------------------------------------------

    def _can_leave(self, request: Request) -> bool:
        return (
            request.status is RequestStatus.RUNNING
            and request.request_id not in self._leaving
            and not request.is_prefill_chunk
            and request.num_output_tokens > 0
            and request.num_stale_output_tokens == 0
            and not request.skip_reading_prefix_cache
        )

    def _let_leave(self) -> None:
        for request in [each for each in self._leaving.values() if each.num_in_flight_tokens == 0]:
            del self._leaving[request.request_id]
            self._leave(request)

    def _leave(self, request: Request) -> None:
        assert self._swap is not None
        computed = request.num_computed_tokens
        assert computed == request.num_tokens - 1, f"{request.request_id} is not decoding"
        (blocks,) = self.kv_cache_manager.get_block_ids(request.request_id)
        self._swap.store(request.request_id, blocks[: -(-computed // self._swap.block_tokens)])
        self.running.remove(request)
        self.prev_step_scheduled_req_ids.discard(request.request_id)
        known = len(request.events)
        super()._preempt_request(request, time.monotonic())
        self.waiting.remove_request(request)
        del request.events[known:]
        self.preemptions -= 1  # it is none: nothing is lost
        self._services[request.request_id].preemptions -= 1
        self._away[request.request_id] = computed
        request.next_decode_eligible_step = 0

    def _take_back(self, request: Request) -> bool:
        assert self._swap is not None
        computed = self._away[request.request_id]
        hit, hit_tokens, _ = self.kv_cache_manager.get_computed_blocks(request)
        assert hit_tokens % self._swap.block_tokens == 0
        taken = self.kv_cache_manager.allocate_slots(
            request,
            1,
            num_new_computed_tokens=hit_tokens,
            new_computed_blocks=hit,
            num_external_computed_tokens=computed - hit_tokens,
            delay_cache_blocks=True,  # others must not find them before they are filled, which an abort prevents
            has_scheduled_reqs=bool(self.running),
        )
        if taken is None:
            return False
        (blocks,) = self.kv_cache_manager.get_block_ids(request.request_id)
        first = hit_tokens // self._swap.block_tokens
        self._swap.load(request.request_id, blocks[first : -(-computed // self._swap.block_tokens)], first)
        request.num_computed_tokens = computed
        self.kv_holding_waiting.add_request(request)
        del self._away[request.request_id]
        self._stored.discard(request.request_id)
        return True

    def _forget(self, request: Request) -> None:
        """Frees a request's host memory."""
        self._leaving.pop(request.request_id, None)
        self._away.pop(request.request_id, None)
        self._stored.discard(request.request_id)
        request.next_decode_eligible_step = 0
        if self._swap is not None:
            self._swap.release(request.request_id)
