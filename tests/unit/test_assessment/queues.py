"""Queues to assess, and their assessment."""

from __future__ import annotations

from collections.abc import Sequence

from predicted_times import NewcomerTimes, newcomer_times
from qlm_core.prediction.assessment import Assessment
from qlm_core.prediction.prediction_views import GroupView, QueueView
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec

SHIPPED = shipped_snapshot()
CATALOGUE = {
    "chat": ModelSpec(name="chat", profile="Mistral-7B"),
    "big": ModelSpec(name="big", profile="Vicuna-13B"),
    "alien": ModelSpec(name="alien", profile="Unheard-of"),
}
NOW_S = 1_000.0


def instance_of(name: str) -> InstanceFacts:
    return InstanceFacts(name=name, incarnation=f"{name}/1", gpu="A100-80GB", n_gpu=1, engine="simulated", models=("chat", "big"))


def group_of(group_id: str, waiting: int, model: str = "chat", *, slack_s: float = 300.0, band: int = 0, prompt: int = 500) -> GroupView:
    return GroupView(
        group_id=group_id,
        model=model,
        slo_class="64s",
        token_class="1024",
        waiting=waiting,
        waiting_prompt_tokens=waiting * prompt,
        first_deadline_s=NOW_S + slack_s,
        band=band,
    )


def view_of(name: str, *groups: GroupView, running: int = 200, active: str = "chat") -> QueueView:
    return QueueView(instance=instance_of(name), active_model=active, running=running, groups=groups)


def assessed(*views: QueueView, profiles: ProfileSnapshot = SHIPPED) -> Assessment:
    return Assessment(CATALOGUE, profiles, views)


def predicted(views: Sequence[QueueView], request: GroupView, now_s: float | None = None) -> NewcomerTimes:
    found = newcomer_times(views, CATALOGUE, SHIPPED, request, now_s)
    assert found is not None
    return found


TWO = (
    view_of("a", group_of("a1", 700, slack_s=50.0), group_of("a2", 300, "big"), group_of("a3", 40, slack_s=900.0)),
    view_of("b", group_of("b1", 60, "big", slack_s=20.0), running=0),
)
