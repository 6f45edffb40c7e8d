"""Places of new groups: deadlines, bands, runs of one model, heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.request import RequestFacts, RequestKey, Slo, SloKind
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group, band_of, traits_of
from qlm_planner.board.slot import Slot
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.order_cost import OWN
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import Line, columns_on, lines_of, plan_costs
from qlm_planner.groups.cheapest_place import best_place, idle_place
from qlm_planner.policy import Policy

from .world import CATALOGUE, MODELS, START_S, profiles

POLICY = Policy()


def estimates(policy: Policy = POLICY, swap_s: float = 10.0) -> Estimates:
    made = Estimates(policy)
    made.load(CATALOGUE, profiles(swap_s=swap_s))
    return made


def class_table(policy: Policy = POLICY, swap_s: float = 10.0) -> ClassTable:
    return ClassTable(estimates=estimates(policy, swap_s))


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


def slot(
    name: str, *, gpu: str = "big", active: str = "alpha", warm: Sequence[str] = (), running: int = 0, models: Sequence[str] = MODELS
) -> Slot:
    facts = InstanceFacts(name=name, incarnation=f"{name}/1", gpu=gpu, n_gpu=1, engine="simulated", models=tuple(models))
    return Slot(facts=facts, active_model=active, warm_models=tuple(warm), running=running)


def board_of(slots: Sequence[Slot], queues: Mapping[str, Sequence[Group]]) -> Board:
    board = Board(slo_band=0)
    for each in slots:
        board.slots[each.facts.name] = each
        board.queues[each.facts.name] = []
    for name, groups in queues.items():
        for one in groups:
            one.instance = name
            board.groups[one.group_id] = one
            board.queues[name].append(one.group_id)
    return board


Queue = tuple[Slot, Sequence[Group]]


def lines(table: ClassTable, *queues: Queue) -> list[Line]:
    board = board_of([on for on, _ in queues], {on.facts.name: groups for on, groups in queues})
    return lines_of(board, table, START_S)


def placed(groups: Sequence[Group], new: Group, *, active: str = "alpha", policy: Policy = POLICY, swap_s: float = 10.0) -> list[str]:
    """Ids on one queue after an insertion."""
    made = class_table(policy, swap_s)
    found = best_place(lines(made, (slot("a", active=active, running=20), groups)), made, new, START_S)
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


def test_a_head_that_runs_is_displaced_only_for_a_gain() -> None:
    """The urgent group would be late behind a long head; for one request that is not worth two swaps, for many it is."""
    queue = [group(1, "alpha", 500, 1000)]
    one, many = group(2, "beta", 20, 1), group(2, "beta", 20, 50)
    assert placed(queue, one) == ["alpha-1", "beta-2"]
    assert placed(queue, many) == ["beta-2", "alpha-1"]


def test_the_active_model_may_come_first() -> None:
    """The engine still has alpha while beta is the next: alpha's request needs no swap."""
    queue = [group(1, "beta", 300)]
    assert placed(queue, group(2, "alpha", 310, 5), active="alpha") == ["alpha-2", "beta-1"]


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


def chosen(table: ClassTable, new: Group, *queues: Queue) -> str:
    """The instance that a group goes to; "" for none."""
    found = best_place(lines(table, *queues), table, new, START_S)
    return "" if found is None else found.line.slot.facts.name


def test_the_instance_where_it_costs_least() -> None:
    made = class_table()
    busy = [group(number, "alpha", 60, 1000) for number in range(3)]
    urgent = chosen(made, group(9, "alpha", 30), (slot("a", running=20), busy), (slot("b", gpu="small", active=""), []))
    assert urgent == "b", "an idle slow engine is in time, the fast one is not"
    relaxed = chosen(made, group(9, "alpha", 600), (slot("a", running=20), [group(1, "alpha", 600, 20)]), (slot("b", active=""), []))
    assert relaxed == "a", "where its model is active, no swap is needed"


@pytest.mark.parametrize(("running", "instance"), [(1, "a"), (250, "b")])
def test_an_idle_instance_is_worth_a_load_where_the_running_batch_is_too_slow(running: int, instance: str) -> None:
    """A request takes 1.1 s by itself and 3.0 s beside 250 others."""
    made = class_table(swap_s=1.0)
    assert chosen(made, group(9, "alpha", 2.7, 1), (slot("a", running=running), []), (slot("b", active=""), [])) == instance


def test_a_shared_batch_is_known_where_it_runs_now_or_nothing_does() -> None:
    """Beside 60 that run 70 decode together, on an idle instance 10; of a batch that is yet to come the mean is all that is known: 50."""
    made, own_s = class_table(), {}
    for active, running in (("alpha", 60), ("beta", 60), ("", 0)):
        elsewhere = slot("b", running=90 - running)
        on, _ = lines(made, (slot("a", active=active, running=running), [group(1, "alpha", 600.0, 10)]), (elsewhere, []))
        own_s[active] = on.rows[OWN, 0]
    assert own_s[""] < own_s["beta"] < own_s["alpha"]


def test_a_group_that_is_inserted_counts_for_the_next_one() -> None:
    made = class_table()
    on, other = lines(made, (slot("a"), []), (slot("b"), []))
    new = group(1, "alpha", 600.0, 100)
    on.insert(0, new, columns_on([on], made, new, START_S)[:, 0])
    beside, alone = columns_on([on, other], made, group(2, "alpha", 600.0, 1), START_S)[OWN]
    assert beside > 1.5 * alone


def test_plans_are_compared_by_the_batches_that_they_make() -> None:
    """The second group on an idle instance, or beside the first: there nobody would wait for another, but each step would take longer."""
    groups = [group(number, "alpha", 600.0, 1) for number in (1, 2)]
    board = board_of([slot("a", running=100), slot("b")], {"a": groups})
    apart, beside = plan_costs(board, class_table(), START_S, [{"a": ["alpha-1"], "b": ["alpha-2"]}, {"a": ["alpha-1", "alpha-2"]}])
    assert apart.completion_s < 0.75 * beside.completion_s


def test_an_instance_without_the_model_never_gets_it() -> None:
    made = class_table()
    queues: list[Queue] = [(slot("a", active="", models=["beta"]), []), (slot("b", running=20), [group(1, "alpha", 10, 5000)])]
    assert chosen(made, group(2, "alpha", 10), *queues) == "b"
    assert chosen(made, group(2, "unknown", 10), *queues) == ""


def test_only_the_shortest_of_many_instances_are_tried() -> None:
    queues: list[Queue] = [
        (slot(f"i{number:02}", active="beta", running=20), [group(number, "beta", 600, 100 * number)]) for number in range(1, 30)
    ]
    queues.append((slot("z", running=20), [group(50, "alpha", 600, 4000)]))
    assert chosen(class_table(Policy(lines_max=2)), group(99, "alpha", 600), *queues) in ("i01", "i02", "z")


def test_a_group_joins_the_running_batch_with_the_fastest_step() -> None:
    made = class_table()
    batches: list[Queue] = [(slot("a", running=100), []), (slot("b", running=40), [])]
    assert chosen(made, group(1, "alpha", 600, 1), *batches) == "b"
    spread = chosen(made, group(2, "alpha", 600, 1), *batches, (slot("c", active="beta", running=20), []))
    assert spread == "b", "no model is swapped in to spread"


SLOTS = st.tuples(
    st.sampled_from(("big", "small")),
    st.sampled_from(("alpha", "alpha", "beta", "")),
    st.integers(0, 300),
    st.sampled_from((MODELS, ("beta",))),
)


@settings(max_examples=60)
@given(
    st.lists(SLOTS, min_size=1, max_size=6), st.sampled_from((2.0, 600.0)), st.sampled_from((1, 30)), st.sampled_from((0, 0, 1)),
    st.sampled_from((1, 12)),
)  # fmt: skip
def test_where_nothing_waits_the_place_is_the_same_without_costs(
    shapes: list[tuple[str, str, int, tuple[str, ...]]], deadline_s: float, count: int, waiting: int, lines_max: int
) -> None:
    made = class_table(Policy(lines_max=lines_max))
    slots = [
        slot(f"s{at}", gpu=gpu, active=active, running=running, models=models) for at, (gpu, active, running, models) in enumerate(shapes)
    ]
    board = board_of(slots, {"s0": [group(number, "beta", 60.0) for number in range(waiting)]})
    new = group(9, "alpha", deadline_s, count)
    idle = idle_place(board, made.estimates, new)
    if idle:
        found = best_place(lines_of(board, made, START_S), made, new, START_S)
        assert found is not None
        assert (idle, 0) == (found.line.slot.facts.name, found.position)


def test_an_idle_place_needs_no_costs() -> None:
    made, new = class_table(), group(9, "alpha", 600.0, 1)
    other = slot("c", models=("beta",))
    assert idle_place(board_of([slot("a", running=9), other], {"c": [group(1, "beta", 60)]}), made.estimates, new) == "a"
    assert idle_place(board_of([slot("a", running=9), slot("b", running=3)], {}), made.estimates, new) == "b"
    assert idle_place(board_of([slot("a"), slot("b")], {}), made.estimates, new) == "", "equal steps"
    assert idle_place(board_of([slot("a"), slot("b", active="beta", running=9)], {}), made.estimates, new) == "", "one would swap"
    assert idle_place(board_of([slot("a"), other], {"a": [group(1, "alpha", 60)]}), made.estimates, new) == "", "a group waits"
    assert idle_place(board_of([other], {}), made.estimates, new) == "", "none serves it"


def test_short_prompts_do_not_overtake_long_ones_that_are_due_first() -> None:
    """Groups of less engine time cost less in front; but nobody is late, and the earlier are served first."""
    long = group(1, "alpha", 300)
    long.waiting_prompt_tokens *= 10
    assert placed([long], group(2, "alpha", 310, 5)) == ["alpha-1", "alpha-2"]
    assert placed([group(1, "alpha", 60, 1500), group(2, "alpha", 61, 50)], group(3, "alpha", 62, 1500)) == [
        "alpha-1",
        "alpha-2",
        "alpha-3",
    ]
    assert placed([group(1, "alpha", 1, 3000)], group(2, "alpha", 5, 50)) == ["alpha-2", "alpha-1"], "the first are late anyway"
