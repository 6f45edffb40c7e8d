"""The cluster as the page's JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from qlm.api.v1.gateway_pb2 import ListedRequest, Model
from qlm_gateway.front.http.answers import state_name
from qlm_process.cluster.view import ClusterView, GroupView, InstanceView

GROUPS_SHOWN_MAX = 40
"""Groups of a virtual queue; of the rest only their number and requests are said."""
INSTANCES_SHOWN_MAX = 200


def cluster_document(view: ClusterView, models: Iterable[Model], requests: Iterable[ListedRequest]) -> dict[str, Any]:
    """Times are seconds of the queue's clock; null: not known, or none. `requests`: those that are shown one by one."""
    outcomes = view.outcomes
    return {
        "at_s": view.at_s,
        "queue": view.queue,
        "live": view.live,
        "unplaced": view.unplaced,
        "running": view.running,
        "plan_version": view.plan_version,
        "advice": view.advice,
        "parts": [asdict(part) for part in view.parts],
        "instances": [_instance(instance) for instance in view.instances[:INSTANCES_SHOWN_MAX]],
        "instances_more": max(0, len(view.instances) - INSTANCES_SHOWN_MAX),
        "unassigned": _groups(view.unassigned),
        "models": [_model(model, view.instances) for model in models],
        "outcomes": None if outcomes is None else _finite(asdict(outcomes)),
        "requests": [_request(request) for request in requests],
    }


def _instance(instance: InstanceView) -> dict[str, Any]:
    return {
        "name": instance.name,
        "problem": instance.part.problem,
        "alive": instance.alive,
        "owned": instance.owned,
        "active_model": instance.active_model,
        "agent": None if instance.agent is None else asdict(instance.agent),
        "groups": _groups(instance.groups),
    }


def _groups(groups: Sequence[GroupView]) -> dict[str, Any]:
    """The first ones, and what is behind them."""
    rest = groups[GROUPS_SHOWN_MAX:]
    return {
        "shown": [_finite(asdict(group)) for group in groups[:GROUPS_SHOWN_MAX]],
        "more": len(rest),
        "more_waiting": sum(group.waiting for group in rest),
    }


def _model(model: Model, instances: Sequence[InstanceView]) -> dict[str, Any]:
    """Where a model is active, warm or cold. `waiting`: its requests on virtual queues."""
    agents = {instance.name: instance.agent for instance in instances if instance.agent is not None}
    active = [name for name, agent in agents.items() if agent.active_model == model.name]
    warm = [name for name, agent in agents.items() if model.name in agent.warm_models]
    return {
        "name": model.name,
        "context_tokens_max": model.context_tokens_max,
        "active": active,
        "warm": warm,
        "cold": [name for name, agent in agents.items() if model.name in agent.models and name not in active and name not in warm],
        "waiting": sum(group.waiting for instance in instances for group in instance.groups if group.model == model.name),
    }


def _request(request: ListedRequest) -> dict[str, Any]:
    return {
        "tenant": request.tenant,
        "request_id": request.request_id,
        "model": request.model,
        "state": state_name(request.state),
        "slo_class": request.slo_class,
        "accepted_s": request.accepted_s,
        "deadline_s": request.deadline_s if request.HasField("deadline_s") else None,
        "instance": request.instance,
        "attempts": request.attempts,
    }


def _finite(document: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no infinite numbers: such a time is none."""
    return {
        name: [_finite(each) if isinstance(each, dict) else each for each in value]
        if isinstance(value, (list, tuple))
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in document.items()
    }
