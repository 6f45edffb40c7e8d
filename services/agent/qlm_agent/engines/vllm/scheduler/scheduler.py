"""The scheduler that QLM puts into vLLM: `scheduler_cls="qlm_agent.engines.vllm.scheduler.scheduler.QlmScheduler"`.

QLM's policy orders requests (`scheduler.order`) and offloads them to host memory (`scheduler.swap`); both depend on internals of vLLM's
scheduler, which are checked here at import.
"""

from __future__ import annotations

import inspect
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler

from qlm_agent.engines.vllm.scheduler.swap import KvSwapScheduling

TESTED_VERSION = "0.32"

_METHODS = {
    "schedule": "throttle_prefills",
    "_preempt_request": "drop_stale_output",
    "_free_request": "delay_free_blocks",
    "_request_remaining_blocks": "request",
    "_request_blocks_can_be_freed": "request",
    "_is_blocked_waiting_status": "status",
    "get_request_counts": "self",
    "has_finished_requests": "self",
    "update_from_output": "scheduler_output",
}
_ATTRIBUTES = (
    "kv_holding_waiting",
    "prev_step_scheduled_req_ids",
    "max_num_active_reqs",
    "num_waiting_for_streaming_input",
    "_pause_state",
)


def check_vllm() -> None:
    """Raises ImportError if this vLLM's scheduler lacks what the mixins need."""
    missing = [
        name for name, parameter in _METHODS.items() if parameter not in inspect.signature(getattr(Scheduler, name, check_vllm)).parameters
    ]
    source = inspect.getsource(Scheduler.__init__) + inspect.getsource(Scheduler.schedule)
    missing += [name for name in _ATTRIBUTES if f"self.{name}" not in source]
    if "next_decode_eligible_step" not in source:
        missing.append("next_decode_eligible_step")
    if not issubclass(FCFSRequestQueue, list) and not hasattr(FCFSRequestQueue, "extend"):
        missing.append("FCFSRequestQueue.extend")
    if missing:
        raise ImportError(
            f"vLLM {vllm.__version__} has another scheduler than QLM's plug-in supports (tested: {TESTED_VERSION}.x); "
            f"it lacks {', '.join(missing)}"
        )


check_vllm()


class QlmScheduler(KvSwapScheduling, Scheduler):
    """For engines that make one step at a time (`async_scheduling=False`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.scheduler_config.async_scheduling:
            raise ValueError("QlmScheduler needs async_scheduling=False; with it take QlmAsyncScheduler")


class QlmAsyncScheduler(KvSwapScheduling, AsyncScheduler):
    """For engines that schedule a step while the one before is under way (`async_scheduling=True`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.scheduler_config.async_scheduling:
            raise ValueError("QlmAsyncScheduler needs async_scheduling=True; without it take QlmScheduler")
