"""An assessment after changes of its queues, against one that is made anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from qlm_core.assessment import Assessment
from qlm_core.prediction_views import GroupView
from qlm_core.profile import ProfileSnapshot

from .queues import CALIBRATED, NOW_S, SHIPPED, TWO, assessed, group_of, instance_of, predicted, view_of


def _same(one: Assessment, other: Assessment) -> None:
    order = [one.instances.index(name) for name in other.instances]
    for name in other.instances:
        assert name in one.instances
    for view in (other.table.columns, one.table.columns):
        assert np.isfinite(view).all()
    firsts = [slice(int(one.first[at]), int(one.first[at + 1])) for at in order]
    moved = np.concatenate([one.table.columns[part] for part in firsts]) if firsts else one.table.columns
    assert moved == pytest.approx(other.table.columns, rel=1e-9, abs=1e-9)
    for now_s in (NOW_S, NOW_S + 100.0, NOW_S):
        late = [value for values in one.late(now_s) for part in firsts for value in values[part]]
        assert late == pytest.approx([value for values in other.late(now_s) for value in values], abs=1e-9)
    for group_id in ("a1", "a2", "a3", "b1", "b2", "c1"):
        request = group_of("", 1, "big" if group_id in ("a2", "b1") else "chat")
        for found, expected in (
            (one.joining(group_id, request), other.joining(group_id, request)),
            (one.waiting(group_id, 800), other.waiting(group_id, 800)),
        ):
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert (found.instance, found.requests_ahead) == (expected.instance, expected.requests_ahead)
                assert found.wait.mean == pytest.approx(expected.wait.mean, abs=1e-9)
                assert found.completion.mean == pytest.approx(expected.completion.mean)
    fresh, expected = predicted(one, group_of("", 1)), predicted(other, group_of("", 1))
    assert (fresh.instance, fresh.requests_ahead) == (expected.instance, expected.requests_ahead)
    # Where a queue is empty, what stood there is taken to share a batch.
    assert fresh.completion.mean == pytest.approx(expected.completion.mean, rel=0.01)


@pytest.mark.parametrize("profiles", [SHIPPED, CALIBRATED], ids=["formulas", "calibrated"])
@pytest.mark.parametrize("asked_before", [True, False])
def test_a_changed_queue_is_as_if_all_were_assessed_again(asked_before: bool, profiles: ProfileSnapshot) -> None:
    made = assessed(*TWO, profiles=profiles)
    if asked_before:
        _same(made, assessed(*TWO, profiles=profiles))
    changed = view_of("a", *TWO[0].groups[1:], running=10)
    new, emptied = view_of("c", group_of("c1", 5)), replace(TWO[1], groups=())
    moved = replace(TWO[1], groups=(group_of("b2", 20), TWO[0].groups[0]), running=80)
    for view in (changed, moved, new):
        made.update(view)
    _same(made, assessed(changed, moved, new, profiles=profiles))
    made.update(emptied)
    _same(made, assessed(changed, emptied, new, profiles=profiles))
    made.remove("a")
    made.remove("a")
    _same(made, assessed(emptied, new, profiles=profiles))
    assert made.number_of("a2") is None
    assert made.number_of("c1") == ("c", 0)


def test_a_group_that_moves_is_on_one_queue_meanwhile() -> None:
    """Told first of the queue that it comes to: it is there, also when that which it left is told."""
    made = assessed(*TWO)
    assert made.number_of("a1") == ("a", 0)
    made.update(replace(TWO[1], groups=(*TWO[1].groups, TWO[0].groups[0])))
    assert made.number_of("a1") == ("b", 4)
    made.update(replace(TWO[0], groups=TWO[0].groups[1:]))
    assert [made.number_of(group_id) for group_id in ("a2", "a3", "b1", "a1")] == [("a", 0), ("a", 1), ("b", 2), ("b", 3)]


class _Groups(tuple[GroupView, ...]):
    """The groups of a queue, which count how often somebody goes through them."""

    passes = 0

    def __iter__(self) -> Iterator[GroupView]:
        self.passes += 1
        return super().__iter__()


def test_a_changed_queue_costs_its_groups_and_a_new_request_none() -> None:
    """As the module states it: only the queue that changed is read again, and one that joins a group takes no pass over any."""
    others = _Groups(TWO[1].groups)
    made = assessed(TWO[0], replace(TWO[1], groups=others), profiles=CALIBRATED)
    request = group_of("", 1)
    made.late(NOW_S)
    assert made.joining("a1", request) is not None
    assert made.joining("b1", group_of("", 1, "big")) is not None
    others.passes = 0
    groups = _Groups((*TWO[0].groups, group_of("a4", 7)))
    made.update(replace(TWO[0], groups=groups))
    assert groups.passes > 0
    made.late(NOW_S)
    assert made.joining("a4", request) is not None
    table, groups.passes = made.table, 0
    for _ in range(5):
        assert made.joining("a4", request) is not None
        assert made.waiting("a4", 3) is not None
    assert made.table is table, "nothing is worked out again"
    assert (groups.passes, others.passes) == (0, 0)


def test_an_instance_that_came_back_otherwise_is_predicted_as_it_is() -> None:
    """With another batch of the engine or of the agent, other GPUs or another clock behind the same name."""
    made = assessed(*TWO)
    facts = replace(instance_of("a"), incarnation="a/2", models=("chat",))
    groups = tuple(group for group in TWO[0].groups if group.model == "chat")
    small = replace(facts, active_model=TWO[0].active_model, batch=16)
    for changed in (replace(facts, batch_max=16), small, replace(facts, gpu="A10"), replace(facts, time_scale=20.0)):
        view = replace(TWO[0], instance=changed, groups=groups)
        made.update(view)
        _same(made, assessed(view, TWO[1]))


def test_a_queue_that_cannot_be_predicted_is_named_until_it_can() -> None:
    strange = view_of("b", group_of("x", 1, "alien"))
    made = assessed(TWO[0], strange)
    assert made.unpredictable == {"b"}
    assert made.instances == ("a",)
    made.update(TWO[1])
    assert made.unpredictable == set()
    made.update(strange)
    assert made.unpredictable == {"b"}
    _same(made, assessed(TWO[0]))


def test_nothing_to_assess() -> None:
    made = assessed()
    assert made.instances == ()
    assert [values.tolist() for values in made.late(NOW_S)] == [[], []]
    assert made.new(group_of("", 1)) is None
    made.update(view_of("a", running=0))
    assert predicted(made, group_of("", 1)).wait.mean == 0.0
