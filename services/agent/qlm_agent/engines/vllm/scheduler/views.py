"""vLLM's requests as the policy port sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from math import inf
from typing import Any

from vllm.v1.request import Request

from qlm_agent.engines.policy import EnginePolicy, SequenceView

EXTRA_KEY = "qlm"
"""Key in `SamplingParams.extra_args` (see `RequestUrgency`) and `additional_config` (see `policy_of`)."""

DEFAULT_POLICY = "qlm_agent.engines.policy.UrgencyFirst"


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


def view_of(request: Request, urgency: RequestUrgency, preemptions: int) -> SequenceView:
    return SequenceView(
        run_id=urgency.run_id,
        arrival=urgency.arrival,
        deadline_s=urgency.deadline_s,
        priority=urgency.priority,
        prompt_tokens=request.num_prompt_tokens,
        produced_tokens=request.num_output_tokens,
        preemptions=preemptions,
    )


def policy_of(additional_config: Mapping[str, Any]) -> EnginePolicy:
    """Builds the policy of `additional_config["qlm"]`: `policy`, a dotted name, made with `policy_options`. Raises ValueError without
    one."""
    options = dict(additional_config.get(EXTRA_KEY) or {})
    name = str(options.get("policy") or DEFAULT_POLICY)
    module, _, attribute = name.rpartition(".")
    try:
        policy: EnginePolicy = getattr(import_module(module), attribute)(**(options.get("policy_options") or {}))
    except (ImportError, AttributeError, TypeError, ValueError) as problem:
        raise ValueError(f"engine policy {name}: {problem}") from problem
    return policy
