"""What keeps a deployment from serving, by its queue: the second half of `qlm doctor`. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from qlm.api.v1.instance_pb2 import Instance
from qlm_queue.overview import Overview


def deployment_problems(overview: Overview, *, planner: str, estimator: str) -> Iterator[str]:
    """A line for each, with what to do. `planner`, `estimator`: addresses of the leaders, "" for none."""
    if not planner:
        yield "no planner leads, and accepted requests wait for a place: start one (qlm planner)"
    if not estimator:
        yield "no estimator leads, and predictions stay as they are: start one (qlm estimator)"
    served: set[str] = set()
    for instance in overview.instances:
        if instance.alive:
            served.update(Instance.FromString(instance.body).models)
        else:
            yield f"instance {instance.name} is away: start its agent (qlm agent --name {instance.name}), or look at its log"
    if not served:
        yield "no instance serves: start an agent (qlm agent)"
    waiting: Counter[str] = Counter()
    for group in overview.groups.values():
        waiting[group.meta.get("model", "")] += group.waiting
    for model, count in sorted(waiting.items()):
        if count and model not in served:
            yield f"{count} requests wait for {model}, which no instance serves: add it to the models of an agent (agents)"
    for pause in overview.pauses:
        of = "" if pause.kind == "model" else "--tenant "
        yield f"requests of {pause.kind} {pause.name} are paused: end it (qlm resume {of}{pause.name})"
