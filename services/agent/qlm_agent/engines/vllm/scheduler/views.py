"""vLLM's requests as the policy port sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from vllm.v1.request import Request, RequestStatus

from qlm_agent.engines.policies.port import EnginePolicy, Residence, SequenceView
from qlm_agent.engines.policies.registry import engine_policy

EXTRA_KEY = "qlm"
"""Key in `SamplingParams.extra_args` (see `RequestUrgency`) and `additional_config` (see `policy_of`)."""

DEFAULT_POLICY = "edf"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUrgency:
    """QLM's facts of a request in `extra_args["qlm"]`, all optional. `run_id`: its name for the policy and for offload and restore, default
    vLLM's id."""

    run_id: str
    arrival: int
    deadline_s: float
    priority: int


def urgency_of(request: Request, count: int) -> RequestUrgency:
    """`count`: of requests so far, for one that does not bring its arrival."""
    params = request.sampling_params
    extra: Mapping[str, Any] = ((params.extra_args or {}) if params is not None else {}).get(EXTRA_KEY) or {}
    return RequestUrgency(
        run_id=str(extra.get("run_id", request.request_id)),
        arrival=int(extra.get("arrival", count)),
        deadline_s=float(extra.get("deadline_s", inf)),
        priority=int(extra.get("priority", request.priority)),
    )


@dataclass(slots=True, kw_only=True)
class RequestService:
    """A request in this engine. Times as in SequenceView. `view`: the last one, whose note the next one keeps."""

    arrived_s: float
    waiting_since_s: float
    served_s: float = 0.0
    preemptions: int = 0
    view: SequenceView | None = None


def view_of(request: Request, urgency: RequestUrgency, service: RequestService) -> SequenceView:
    return SequenceView(
        run_id=urgency.run_id,
        arrival=urgency.arrival,
        deadline_s=urgency.deadline_s,
        priority=urgency.priority,
        prompt_tokens=request.num_prompt_tokens,
        produced_tokens=request.num_output_tokens,
        preemptions=service.preemptions,
        arrived_s=service.arrived_s,
        waiting_since_s=service.waiting_since_s,
        served_s=service.served_s,
        max_tokens=request.max_tokens,
        residence=Residence.GPU if request.status is RequestStatus.RUNNING else Residence.NONE,
    )


def policy_of(additional_config: Mapping[str, Any]) -> EnginePolicy:
    """Builds the policy of `additional_config["qlm"]`: `policy`, its name, made with `policy_options`. Raises ValueError without one."""
    options = dict(additional_config.get(EXTRA_KEY) or {})
    return engine_policy(str(options.get("policy") or DEFAULT_POLICY), options.get("policy_options") or {})
