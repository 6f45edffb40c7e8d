"""Places of new groups: deadlines, bands, runs of one model, heads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from qlm_core.instance import InstanceFacts
from qlm_core.request import RequestFacts, RequestKey, Slo, SloKind
from qlm_planner.estimates import Estimates
from qlm_planner.group_meta import band_of, traits_of
from qlm_planner.insertion import Line, best_place
from qlm_planner.items import Group, Slot
from qlm_planner.policy import Policy

from .world import CATALOGUE, MODELS, START_S, profiles

POLICY = Policy()


def estimates(policy: Policy = POLICY, swap_s: float = 10.0) -> Estimates:
    made = Estimates(policy)
    made.load(CATALOGUE, profiles(swap_s=swap_s))
    return made


def group(number: int, model: str, deadline_s: float, count: int = 50, *, slo_s: float = 0.0, priority: int | None = None) -> Group:
    """`deadline_s` from now."""
    seconds = slo_s or max(1.0, deadline_s)
    slo = Slo(kind=SloKind.COMPLETION, seconds=seconds) if priority is None else Slo(kind=SloKind.PRIORITY, priority=priority)
    facts = RequestFacts(
        queue_id=f"{number}-0",
        key=RequestKey("t", str(number)),
        acceptance_number=number,
        accepted_s=START_S + deadline_s - seconds if priority is None else START_S,
        model=model,
        slo=slo,
        prompt_tokens=200,
        output_tokens_max=256,
    )
    traits = traits_of(facts)
    return Group(
        group_id=f"{model}-{number}",
        order=(1, number),
        traits=traits,
        band=band_of(traits, 0),
        instance="a",
        first_deadline_s=facts.deadline_s,
        next_deadline_s=facts.deadline_s,
        last_deadline_s=facts.deadline_s,
        waiting=count,
        live=count,
        waiting_prompt_tokens=200 * count,
    )


def line(
    groups: Sequence[Group], made: Estimates, *, name: str = "a", gpu: str = "big", active: str = "", models: Sequence[str] = MODELS
) -> Line:
    facts = InstanceFacts(name=name, incarnation=f"{name}/1", gpu=gpu, n_gpu=1, engine="simulated", models=tuple(models))
    slot = Slot(facts=facts, active_model=active, running=20 if active else 0)
    return Line.of(slot, groups, made, keep=False)


def placed(groups: Sequence[Group], new: Group, *, active: str = "alpha", policy: Policy = POLICY, swap_s: float = 10.0) -> list[str]:
    """Ids on one queue after an insertion."""
    made = estimates(policy, swap_s)
    found = best_place([line(groups, made, active=active)], made, new, START_S)
    assert found is not None
    ids = [each.group_id for each in groups]
    ids.insert(found.position, new.group_id)
    return ids


def test_by_deadline_among_one_model() -> None:
    queue = [group(1, "alpha", 30), group(2, "alpha", 60), group(3, "alpha", 90)]
    assert placed(queue, group(4, "alpha", 75)) == ["alpha-1", "alpha-2", "alpha-4", "alpha-3"]
    assert placed(queue, group(4, "alpha", 60)) == ["alpha-1", "alpha-2", "alpha-4", "alpha-3"], "the older one first"
    assert placed(queue, group(4, "alpha", 900)) == ["alpha-1", "alpha-2", "alpha-3", "alpha-4"]
    assert placed(queue, group(4, "alpha", 10)) == ["alpha-4", "alpha-1", "alpha-2", "alpha-3"], "no other model: it may come first"


def test_a_group_joins_the_run_of_its_model_where_the_slack_behind_absorbs_it() -> None:
    """Section 2.4, insight 3: plain EDF swaps for each group; here beta waits a little longer and nobody is late."""
    queue = [group(1, "alpha", 60), group(2, "beta", 300), group(3, "beta", 320)]
    assert placed(queue, group(4, "alpha", 310)) == ["alpha-1", "alpha-4", "beta-2", "beta-3"]


def test_a_group_does_not_join_where_somebody_behind_would_be_late() -> None:
    queue = [group(1, "alpha", 60), group(2, "beta", 40, 400)]
    big = group(4, "alpha", 500, 1500)
    assert placed(queue, big) == ["alpha-1", "beta-2", "alpha-4"]


def test_an_urgent_group_overtakes_all_but_the_head() -> None:
    queue = [group(1, "alpha", 200), group(2, "beta", 300, 2000), group(3, "alpha", 400, 2000)]
    assert placed(queue, group(4, "gamma", 40)) == ["alpha-1", "gamma-4", "beta-2", "alpha-3"]


def test_a_head_that_runs_is_displaced_only_for_a_stated_gain() -> None:
    """The urgent group would be late behind a long head; for one request that is not worth two swaps, for many it is."""
    queue = [group(1, "alpha", 500, 1000)]
    one, many = group(2, "beta", 20, 1), group(2, "beta", 20, 50)
    assert placed(queue, one) == ["alpha-1", "beta-2"]
    assert placed(queue, many) == ["beta-2", "alpha-1"]
    assert placed(queue, many, policy=Policy(head_gain=1e12)) == ["alpha-1", "beta-2"]


def test_the_active_model_may_come_first() -> None:
    """The engine still has alpha while beta is the next: alpha's request needs no swap."""
    queue = [group(1, "beta", 300)]
    assert placed(queue, group(2, "alpha", 310, 5), active="alpha") == ["alpha-2", "beta-1"]


def test_nobody_is_overtaken_beyond_the_starvation_bound() -> None:
    """Joining is cheap each time; a group whose end would then be more than one SLO late is not overtaken any more."""
    late = group(2, "beta", -25, 1, slo_s=30.0)
    queue = [group(1, "alpha", 10, 300), late]
    assert placed(queue, group(3, "alpha", 100, 500)) == ["alpha-1", "beta-2", "alpha-3"]
    tolerant = Policy(starvation_slos=100.0)
    assert placed(queue, group(3, "alpha", 100, 500), policy=tolerant) == ["alpha-1", "alpha-3", "beta-2"]


def test_priorities_form_bands_before_deadlines() -> None:
    """Lower first, as in vLLM; requests with an SLO are in band 0."""
    queue = [group(1, "alpha", 0, priority=-5), group(2, "alpha", 50), group(3, "beta", 0, priority=3)]
    assert placed(queue, group(4, "gamma", 1))[1] == "gamma-4" or placed(queue, group(4, "gamma", 1))[2] == "gamma-4"
    assert placed(queue, group(4, "gamma", 0, priority=-5))[1] == "gamma-4"
    assert placed(queue, group(4, "gamma", 0, priority=-6))[0] == "gamma-4", "a higher band displaces the head"
    assert placed(queue, group(4, "gamma", 0, priority=2)) == ["alpha-1", "alpha-2", "gamma-4", "beta-3"]
    assert placed(queue, group(4, "alpha", 0, priority=3)) == ["alpha-1", "alpha-2", "beta-3", "alpha-4"], "first come inside a band"
    configured = Policy(slo_band=4)
    assert configured.slo_band == 4
    assert band_of(group(1, "alpha", 5).traits, configured.slo_band) == 4


def test_the_instance_where_it_costs_least() -> None:
    made = estimates()
    busy = [group(number, "alpha", 60, 1000) for number in range(3)]
    lines = [line(busy, made, name="a", active="alpha"), line([], made, name="b", gpu="small")]
    urgent = best_place(lines, made, group(9, "alpha", 30), START_S)
    assert urgent is not None
    assert urgent.instance == "b", "an idle slow engine is in time, the fast one is not"
    calm = [line([group(1, "alpha", 600, 20)], made, name="a", active="alpha"), line([], made, name="b")]
    relaxed = best_place(calm, made, group(9, "alpha", 600), START_S)
    assert relaxed is not None
    assert relaxed.instance == "a", "where its model is active, no swap is needed"


def test_an_instance_without_the_model_never_gets_it() -> None:
    made = estimates()
    lines = [line([], made, name="a", models=["beta"]), line([group(1, "alpha", 10, 5000)], made, name="b", active="alpha")]
    found = best_place(lines, made, group(2, "alpha", 10), START_S)
    assert found is not None
    assert found.instance == "b"
    assert best_place(lines, made, group(2, "unknown", 10), START_S) is None


def test_of_many_instances_only_the_shortest_are_tried() -> None:
    made = estimates(Policy(lines_max=2))
    lines = [line([group(number, "beta", 600, 100 * number)], made, name=f"i{number:02}", active="beta") for number in range(1, 30)]
    lines.append(line([group(50, "alpha", 600, 4000)], made, name="z", active="alpha"))
    found = best_place(lines, made, group(99, "alpha", 600), START_S)
    assert found is not None
    assert found.instance in ("i01", "i02", "z")


@pytest.mark.parametrize("slo_s", [1e-3, 1.0, 2_592_000.0])
def test_any_slo_has_a_place(slo_s: float) -> None:
    queue = [group(1, "alpha", 10), group(2, "beta", 10)]
    assert len(placed(queue, group(3, "gamma", slo_s, slo_s=slo_s))) == 3
    assert math.isfinite(slo_s)


def test_of_batches_that_go_on_a_group_joins_the_one_with_the_fastest_step() -> None:
    made = estimates()
    full, calm = line([], made, name="a", active="alpha"), line([], made, name="b", active="alpha")
    full.slot.running, calm.slot.running = 100, 40
    found = best_place([full, calm], made, group(1, "alpha", 600, 1), START_S)
    assert found is not None
    assert found.instance == "b", "it waits for a seat on neither"
    other = line([], made, name="c", active="beta")
    spread = best_place([full, calm, other], made, group(2, "alpha", 600, 1), START_S)
    assert spread is not None
    assert spread.instance == "b", "no model is swapped in to spread"
