"""The policy port in charge of vLLM's waiting order and preemption, in the same step.

vLLM's scheduler takes waiting requests from the front of a queue and, when KV is short, victims from the back of its running list. So the
policy orders both before each step, and preempts its victims; the rest of the step is vLLM's own. Requests that the policy holds back
leave the queue during the step. A preempted or paused request keeps its tokens and sampling state and computes its KV again, or finds it
in the prefix cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from qlm_agent.engines.policies.port import EnginePolicy, Sequences, SequenceView
from qlm_agent.engines.vllm.scheduler.engine_view import SchedulerView
from qlm_agent.engines.vllm.scheduler.views import RequestService, RequestUrgency, policy_of, urgency_of, view_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
else:
    Scheduler = object


class PolicyScheduling(Scheduler):
    """A mixin before one of vLLM's schedulers. `preemptions`: of all requests, by policy or for want of KV."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.policy is not SchedulingPolicy.FCFS:
            raise ValueError('QLM\'s policy orders the requests: leave scheduling_policy at "fcfs"')
        if self.num_spec_tokens:
            raise ValueError("QLM's scheduler does not support speculative decoding: leave speculative_config out")
        self.preemptions = 0
        self._view = SchedulerView(self)
        self.follow(policy_of(self.vllm_config.additional_config))
        self._urgencies: dict[str, RequestUrgency] = {}  # by vLLM's request id, as the next
        self._services: dict[str, RequestService] = {}
        self._held: list[Request] = []  # out of the queue while vLLM schedules
        self._by_run_id: dict[str, str] = {}
        self._arrivals = 0
        self._unordered = False  # requests wait that the policy has not ordered
        self._reorder_at_s: float | None = None

    def follow(self, policy: EnginePolicy) -> None:
        """Replaces the policy, while no request is here."""
        self.engine_policy = policy
        policy.reset(self._view)

    # Calls of vLLM ----------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:
            urgency = urgency_of(request, self._arrivals + 1)
            if urgency.run_id in self._by_run_id:  # several samples of one prompt bring the same name
                urgency = replace(urgency, run_id=request.request_id)
            self._arrivals += 1
            self._urgencies[request.request_id] = urgency
            self._by_run_id[urgency.run_id] = request.request_id
            now_s = time.monotonic()
            self._services[request.request_id] = RequestService(arrived_s=now_s, waiting_since_s=now_s)
        super().add_request(request)
        self._unordered = True

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        now_s = time.monotonic()
        step_s = self._view.step_began(now_s, idle=not self.running)
        for request in self.running:
            self._services[request.request_id].served_s += step_s
        self._apply_policy(now_s)
        self._order_victims(now_s)
        for request in self._held:
            self.waiting.remove_request(request)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.waiting.extend(self._held)
        self._view.step_scheduled(output.total_num_scheduled_tokens, len(output.num_scheduled_tokens))
        return output

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)
        service = self._services[request.request_id]
        service.preemptions += 1
        service.waiting_since_s = time.monotonic()
        self.preemptions += 1
        self._unordered = True

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        urgency = self._urgencies.pop(request.request_id, None)
        if urgency is not None:
            del self._by_run_id[urgency.run_id]
        self._services.pop(request.request_id, None)
        self._held = [held for held in self._held if held is not request]
        self._unordered = True  # with the room that it leaves, the victims may suffice
        return super()._free_request(request, delay_free_blocks)

    # Order ------------------------------------------------------------------------------------------------------------

    def _apply_policy(self, now_s: float) -> None:
        due = self._reorder_at_s is not None and now_s >= self._reorder_at_s
        if not self.waiting:
            self._held = []
        if not self.waiting or not (self._unordered or due):
            return
        # No room is made for a request without its grammar or in a paused engine, and neither change is signalled.
        compiling = any(
            request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR and not _has_grammar(request) for request in self.waiting
        )
        self._order_waiting(now_s)
        for request in self._to_pause(now_s):
            self._take_seat(request, now_s)
            self._held.append(request)
        if self._make_room(now_s):
            self._order_waiting(now_s)
        self._unordered = compiling or self._pause_state is not PauseState.UNPAUSED
        self._reorder_at_s = self.engine_policy.next_wakeup_s(now_s)

    def _order_waiting(self, now_s: float) -> None:
        ranks = self._ranks(self.engine_policy.order(now_s, self._views(list(self.waiting)), self._views(self.running)))
        ordered = sorted(self.waiting, key=lambda request: ranks.get(request.request_id, len(ranks)))
        # A policy that holds all back while nothing runs would stop the engine.
        self._held = [request for request in ordered[not self.running :] if request.request_id not in ranks]
        self.waiting.clear()
        self.waiting.extend(ordered)

    def _order_victims(self, now_s: float) -> None:
        """vLLM takes the last of the running first."""
        free = self._blocks_free()
        plenty = 2 * len(self.running) + self.max_num_scheduled_tokens // self.block_size
        if len(self.running) < 2 or plenty <= free or self._blocks_of_next_step() <= free:
            return
        ranks = self._ranks(self.engine_policy.victims(now_s, self._views(self.running)))
        self.running.sort(key=lambda request: -ranks.get(request.request_id, len(ranks)))

    def _ranks(self, run_ids: Sequence[str]) -> dict[str, int]:
        return {self._by_run_id[run_id]: rank for rank, run_id in enumerate(run_ids) if run_id in self._by_run_id}

    def _views(self, requests: Sequence[Request]) -> Sequences:
        return Sequences(lambda: [self._view_of(request) for request in requests])

    def _view_of(self, request: Request) -> SequenceView:
        service = self._services[request.request_id]
        view = view_of(request, self._urgencies[request.request_id], service)
        view.note = -1 if service.view is None else service.view.note
        service.view = view
        return view

    def _to_pause(self, now_s: float) -> list[Request]:
        running = {request.request_id: request for request in self.running if self._may_be_preempted(request)}
        named = self.engine_policy.pause(now_s, self._views(list(self.waiting)), self._views(list(running.values())))
        return [running[request_id] for request_id in self._ranks(named) if request_id in running]

    def _take_seat(self, request: Request, now_s: float) -> None:
        """Preempts a request for the policy."""
        self.running.remove(request)
        self.prev_step_scheduled_req_ids.discard(request.request_id)
        self._preempt_request(request, now_s)

    # Room -------------------------------------------------------------------------------------------------------------

    def _make_room(self, now_s: float) -> bool:
        """Preempts for waiting requests by the policy; returns whether it did."""
        if self._pause_state is not PauseState.UNPAUSED:
            return False
        seats = self._seats_free()
        blocks = self._blocks_free() - self._blocks_promised()
        held = {request.request_id for request in self._held}
        ready = [request for request in self.waiting if request.request_id not in held and not self._is_held_back(request)]
        preempted = False
        for position, request in enumerate(ready):
            needed = self._blocks_needed(request)
            if seats < 1 or blocks < needed:
                victims = self._victims_for(now_s, ready[position:], seats, blocks, needed)
                if not victims:
                    break
                preempted = True
                for victim in victims:
                    seats += 1
                    blocks += self._blocks_given_back(victim)
                    self._take_seat(victim, now_s)
            seats -= 1
            blocks -= needed
        return preempted

    def _victims_for(self, now_s: float, waiting: Sequence[Request], seats: int, blocks: int, needed: int) -> list[Request]:
        """As many of the policy's victims as make room for the first of `waiting`; none where all of them do not."""
        running = {request.request_id: request for request in self.running if self._may_be_preempted(request)}
        chosen = []
        for run_id in self.engine_policy.preempt(now_s, self._views(waiting), self._views(list(running.values()))):
            victim = running.pop(self._by_run_id.get(run_id, ""), None)
            if victim is not None:
                chosen.append(victim)
                seats += 1
                blocks += self._blocks_given_back(victim)
                if seats >= 1 and blocks >= needed:
                    return chosen
        return []

    def _may_be_preempted(self, request: Request) -> bool:
        return request.status is RequestStatus.RUNNING and self._request_blocks_can_be_freed(request)

    def _is_held_back(self, request: Request) -> bool:
        """Whether vLLM would not admit it in this step, even with room."""
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:  # vLLM checks it only if there is room
            return not _has_grammar(request)
        return self._is_blocked_waiting_status(request.status) or (request.num_stale_output_tokens > 0 and not request.drop_stale_output)

    def _seats_free(self) -> int:
        taken = len(self.running) + len(self.kv_holding_waiting) + self.num_waiting_for_streaming_input
        return min(self.max_num_active_reqs, self.max_num_running_reqs) - taken

    def _blocks_free(self) -> int:
        return self.kv_cache_manager.block_pool.get_num_free_blocks()

    def _blocks_promised(self) -> int:
        """Blocks that running requests need to finish their prefills or to decode, and the reserve of admission."""
        decoding = sum(request.num_computed_tokens % self.block_size == 0 for request in self.running)
        return self._inflight_prefill_reserved_blocks() + decoding + int(self.kv_cache_manager.watermark_blocks)

    def _blocks_needed(self, request: Request) -> int:
        """Free blocks that its admission takes: without shared blocks of its prefix."""
        hit, _, _ = self.kv_cache_manager.get_computed_blocks(request)
        shared = sum(block.ref_cnt > 0 for blocks in hit.blocks for block in blocks)
        return self._request_remaining_blocks(request) - shared

    def _blocks_given_back(self, request: Request) -> int:
        blocks = self.kv_cache_manager.get_blocks(request.request_id).blocks
        return sum(block.ref_cnt == 1 for group in blocks for block in group) + self._request_remaining_blocks(request)

    def _blocks_of_next_step(self) -> int:
        """New blocks that the running requests would take in the next step, at most."""
        tokens = self.max_num_scheduled_tokens
        blocks = 0
        for request in self.running:
            new = min(tokens, request.num_tokens + request.num_output_placeholders - request.num_computed_tokens)
            tokens -= new
            end = request.num_computed_tokens + new
            for group, held in enumerate(self.kv_cache_manager.get_blocks(request.request_id).blocks):
                block_tokens = self.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
                blocks += max(0, -(-end // block_tokens) - len(held))
        return blocks


def _has_grammar(request: Request) -> bool:
    """Whether the grammar of its structured output is compiled."""
    structured = request.structured_output_request
    return structured is not None and structured.grammar is not None and not isinstance(structured.grammar, Exception)
