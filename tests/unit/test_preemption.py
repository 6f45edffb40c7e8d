"""Victims of a more urgent head, and how they are evicted (QLM section 5, request eviction and GPU-CPU state swapping)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_agent.decisions.evict import choice_text
from qlm_core.operations.preemption import (
    Contender,
    EvictionMethod,
    Occupant,
    Room,
    Rule,
    Urgency,
    Victim,
    cheapest_eviction,
    clear,
    eviction_cost_s,
    make_room,
    offload_pays,
)
from qlm_core.profiles.hardware_profile import OperationSlowdown
from qlm_core.profiles.profile import HardwareProfile

RULE = Rule(displacements_max=3, victims_max=10)
NO_SEAT = Room(seats=0, kv_tokens=10_000)
NOW_S = 1_000.0


def hardware(*, kv_swap_us: float = 10.0, recompute_us: float = 100.0) -> HardwareProfile:
    return HardwareProfile(
        gpu="g",
        n_gpu=1,
        model="m",
        weights_gb=1.0,
        kv_bytes_per_token=1,
        kv_capacity_tokens=10_000,
        decode_a_ms=10.0,
        decode_b_ms_per_seq=0.0,
        decode_c_ms_per_context_token=0.0,
        prefill_base_ms=0.0,
        prefill_ms_per_token=0.1,
        load_disk_to_cpu_s=4.0,
        load_cpu_to_gpu_s=1.0,
        kv_swap_us_per_token=kv_swap_us,
        recompute_us_per_token=recompute_us,
    )


GPU = hardware()


def runs(name: str, *, due_s: float = 3_600.0, band: int = 0, left_s: float = 60.0, tokens: int = 1_000, **more: bool | int) -> Occupant:
    """Running, due in `due_s`, with `tokens` of KV."""
    return Occupant(
        run_id=name,
        urgency=Urgency(band, NOW_S + due_s),
        left_s=left_s,
        kv_tokens=tokens,
        context_tokens=tokens,
        **{"offloadable": False, **more},  # type: ignore[arg-type]
    )


def waits(requests: int = 1, *, due_s: float = 5.0, band: int = 0, service_s: float = 2.0, tokens: int = 500) -> Contender:
    return Contender(urgency=Urgency(band, NOW_S + due_s), requests=requests, kv_tokens=tokens, service_s=service_s)


def names(victims: Sequence[Victim]) -> list[str]:
    return [victim.run_id for victim in victims]


def evicts(head: Contender, *batch: Occupant, room: Room = NO_SEAT, rule: Rule = RULE) -> list[str]:
    return names(make_room(NOW_S, head, batch, room, GPU, rule))


def empties(head: Contender, *batch: Occupant, room: Room = NO_SEAT) -> list[str]:
    return names(clear(NOW_S, head, batch, room, GPU, RULE))


def test_an_urgent_head_takes_the_place_of_one_that_has_time() -> None:
    assert evicts(waits(), runs("a"), runs("b", due_s=100.0)) == ["a"]


def test_a_head_that_makes_it_anyway_pushes_nobody_out() -> None:
    assert evicts(waits(due_s=5.0, service_s=2.0), runs("a", left_s=2.9), runs("b")) == []
    assert evicts(waits(due_s=5.0, service_s=2.0), runs("a", left_s=3.1), runs("b")) == ["a"]


def test_only_as_many_as_would_be_late_by_waiting() -> None:
    batch = [runs("soon", left_s=1.0), *(runs(f"r{number}") for number in range(8))]
    assert len(evicts(waits(3), *batch)) == 2  # one seat is free in time


def test_a_strict_priority_goes_before_later_bands_at_once() -> None:
    head = Contender(urgency=Urgency(-1, math.inf), requests=1, kv_tokens=500, service_s=2.0)
    assert evicts(head, runs("tight", due_s=0.5), runs("a", band=2)) == ["a"]
    assert evicts(head, runs("tight", due_s=0.5)) == ["tight"]  # by the band alone
    same = Occupant(run_id="same", urgency=Urgency(-1, math.inf), left_s=60.0, kv_tokens=1_000, context_tokens=1_000)
    assert evicts(head, same) == []


def test_one_late_request_is_not_traded_for_another() -> None:
    # It has 70 s for its last 60: with the head's 2 s and its own prefill it makes it, with 20 s for the head it does not.
    assert evicts(waits(due_s=5.0, service_s=2.0), runs("a", due_s=70.0)) == ["a"]
    assert evicts(waits(due_s=25.0, service_s=20.0), runs("a", due_s=70.0)) == []
    # A request late in any case has nothing to lose, nor has an answered one.
    assert evicts(waits(due_s=5.0), runs("a", due_s=50.0)) == ["a"]
    assert evicts(waits(due_s=25.0, service_s=20.0), runs("a", due_s=70.0, answered=True)) == ["a"]


def test_a_head_that_is_late_in_any_case_takes_no_place_in_its_own_band() -> None:
    for due_s, yields in ((2.0, ["own"]), (1.9, []), (-30.0, [])):
        head = waits(due_s=due_s, service_s=2.0)
        assert evicts(head, runs("own")) == yields
        assert evicts(head, runs("own"), runs("later", band=1)) == ["later"]


def test_the_one_with_least_work_of_those_alike() -> None:
    # 3,000 and 3,600 s are alike, 100 s is not.
    assert evicts(waits(), runs("big", due_s=3_600.0, tokens=4_000), runs("small", due_s=3_000.0), runs("near", due_s=100.0)) == ["small"]


def test_a_request_evicted_too_often_is_protected() -> None:
    assert evicts(waits(), runs("a", displacements=3)) == []
    assert evicts(waits(), runs("a", displacements=2)) == ["a"]


def test_a_request_that_ends_before_its_eviction_is_left() -> None:
    assert evicts(waits(due_s=2.0, service_s=2.0), runs("a", left_s=0.09, tokens=1_000)) == []  # 0.1 s to compute it again


def test_as_much_kv_as_the_head_needs() -> None:
    batch = [runs(f"r{number}", tokens=1_000) for number in range(9)]
    room = Room(seats=5, kv_tokens=300)
    assert len(evicts(waits(tokens=2_000), *batch, room=room)) == 2
    assert len(evicts(waits(2, tokens=2_000), *batch, room=room)) == 4  # 300 + 4 * 1,000 for 4,000
    assert evicts(waits(tokens=20_000), *batch, room=room) == []  # all of them would not be enough


def test_evict_or_swap_by_the_figures_of_the_gpu() -> None:
    run = runs("a", tokens=1_000, offloadable=True)
    assert eviction_cost_s(EvictionMethod.ABORT, 1_000, GPU) == 0.1
    assert eviction_cost_s(EvictionMethod.OFFLOAD, 1_000, GPU) == 0.02  # there and back
    assert cheapest_eviction(run, 5_000, GPU) == Victim("a", EvictionMethod.OFFLOAD, 0.02)
    assert cheapest_eviction(run, 500, GPU) == Victim("a", EvictionMethod.ABORT, 0.1)  # host memory is full
    assert cheapest_eviction(run, 5_000, hardware(kv_swap_us=60.0)) == Victim("a", EvictionMethod.ABORT, 0.1)  # a slow bus
    assert cheapest_eviction(run, 5_000, None) == Victim("a", EvictionMethod.ABORT, 0.0)
    assert cheapest_eviction(runs("a", abortable=False), 5_000, GPU) is None
    assert cheapest_eviction(runs("a", abortable=False, offloadable=True), 5_000, GPU) == Victim("a", EvictionMethod.OFFLOAD, 0.02)


def test_host_memory_is_shared_by_the_victims() -> None:
    batch = [runs(f"r{number}", offloadable=True) for number in range(3)]
    room = Room(seats=0, kv_tokens=9_000, host_kv_tokens=2_500)
    ways = [victim.method for victim in make_room(NOW_S, waits(3), batch, room, GPU, RULE)]
    assert ways == [EvictionMethod.OFFLOAD, EvictionMethod.OFFLOAD, EvictionMethod.ABORT]


def test_for_another_model_all_are_evicted_or_none() -> None:
    assert empties(waits(), runs("a"), runs("b")) == ["a", "b"]
    assert empties(waits(), runs("a"), runs("b", due_s=4.0)) == []  # the more urgent one finishes first
    assert empties(waits(), runs("a"), runs("b", abortable=False)) == []
    assert empties(waits(due_s=100.0), runs("a"), runs("b")) == []  # in 60 s both are done
    assert empties(waits(), runs("a"), runs("ends", left_s=0.05)) == ["a"]


def test_for_another_model_not_at_the_cost_of_more_requests() -> None:
    tight = [runs(f"r{number}", due_s=61.0) for number in range(3)]
    assert empties(waits(3), *tight) == []
    assert len(empties(waits(4), *tight)) == 3
    # It starts again after 2 s of the head and one for its own model, which has to come back, and 0.1 s to compute it again.
    assert empties(waits(), runs("a", due_s=63.0)) == []
    assert empties(waits(), runs("a", due_s=63.2)) == ["a"]


def test_for_another_model_that_is_past_due_only_where_all_wait_less_in_sum() -> None:
    batch = [runs(f"r{number}", left_s=3.0, tokens=4_000) for number in range(10)]  # 0.4 s to compute one of them again
    assert len(empties(waits(due_s=1.0, service_s=2.0), *batch)) == 10, "it takes 2 s in the mean, and may yet be in time"
    # Each waits 3 s for the batch; each of the batch 2 s for them, and a second for its model, which has to come back.
    assert empties(waits(11, due_s=-1.0, service_s=2.0), *batch) == []
    assert len(empties(waits(12, due_s=-1.0, service_s=2.0), *batch)) == 10


def test_for_another_model_who_can_be_continued_goes_back_to_the_queue() -> None:
    """KV in host memory would tie it to this engine and to its model; it is for who cannot be continued otherwise."""
    room = Room(seats=0, kv_tokens=10_000, host_kv_tokens=10_000)
    batch = [runs("a", offloadable=True), runs("seeded", offloadable=True, abortable=False)]
    assert {victim.run_id: victim.method for victim in clear(NOW_S, waits(), batch, room, GPU, RULE)} == {
        "a": EvictionMethod.ABORT, "seeded": EvictionMethod.OFFLOAD
    }  # fmt: skip
    assert [victim.method for victim in make_room(NOW_S, waits(2), batch, room, GPU, RULE)] == [
        EvictionMethod.OFFLOAD,
        EvictionMethod.OFFLOAD,
    ]


# For any batch ------------------------------------------------------------------------------------------------------------

bands = st.integers(-2, 2)
dues = st.one_of(st.just(math.inf), st.floats(-100.0, 10_000.0))
occupants = st.builds(
    Occupant,
    run_id=st.uuids().map(str),
    urgency=st.builds(lambda band, due_s: Urgency(band, NOW_S + due_s), bands, dues),
    left_s=st.floats(0.0, 600.0),
    kv_tokens=st.integers(1, 4_000),
    context_tokens=st.integers(0, 4_000),
    answered=st.booleans(),
    abortable=st.booleans(),
    offloadable=st.booleans(),
    displacements=st.integers(0, 4),
)
batches = st.lists(occupants, max_size=30)
heads = st.builds(
    Contender,
    urgency=st.builds(lambda band, due_s: Urgency(band, NOW_S + due_s), bands, dues),
    requests=st.integers(1, 20),
    kv_tokens=st.integers(1, 4_000),
    service_s=st.floats(0.0, 60.0),
)
rooms = st.builds(Room, seats=st.integers(-2, 3), kv_tokens=st.integers(-500, 4_000), host_kv_tokens=st.integers(0, 8_000))


@given(heads, batches, rooms, st.sampled_from([make_room, clear]))
def test_victims_may_and_can_be_evicted(head: Contender, batch: list[Occupant], room: Room, rule) -> None:  # type: ignore[no-untyped-def]
    victims = rule(NOW_S, head, batch, room, GPU, RULE)
    by_id = {occupant.run_id: occupant for occupant in batch}
    assert len({victim.run_id for victim in victims}) == len(victims)
    host_kv_tokens = room.host_kv_tokens
    for victim in victims:
        occupant = by_id[victim.run_id]
        assert occupant.urgency > head.urgency
        assert occupant.displacements < RULE.displacements_max
        assert occupant.left_s > victim.cost_s
        assert occupant.abortable if victim.method is EvictionMethod.ABORT else occupant.offloadable
        host_kv_tokens -= occupant.context_tokens if victim.method is EvictionMethod.OFFLOAD else 0
    assert host_kv_tokens >= 0


@given(heads, batches, rooms)
def test_no_victims_for_a_head_that_is_in_time_anyway(head: Contender, batch: list[Occupant], room: Room) -> None:
    slack_s = head.slack_s(NOW_S)
    in_time = [occupant for occupant in batch if occupant.left_s <= slack_s]
    seats, kv_tokens = room.seats + len(in_time), room.kv_tokens + sum(occupant.kv_tokens for occupant in in_time)
    if seats >= head.requests and kv_tokens >= head.requests * head.kv_tokens:
        assert make_room(NOW_S, head, batch, room, GPU, RULE) == ()
    if len(in_time) == len(batch):
        assert clear(NOW_S, head, batch, room, GPU, RULE) == ()


@given(heads, batches, rooms)
def test_no_more_victims_than_make_room_for_the_head(head: Contender, batch: list[Occupant], room: Room) -> None:
    victims = make_room(NOW_S, head, batch, room, GPU, RULE)
    assert len(victims) <= RULE.victims_max
    if victims:
        by_id = {occupant.run_id: occupant for occupant in batch}
        in_time = [occupant for occupant in batch if occupant.left_s <= head.slack_s(NOW_S)]
        seats, kv_tokens = room.seats + len(in_time), room.kv_tokens + sum(occupant.kv_tokens for occupant in in_time)
        before = min(seats, kv_tokens // head.kv_tokens)
        without_last = kv_tokens + sum(by_id[victim.run_id].kv_tokens for victim in victims[:-1])
        after = min(seats + len(victims), (without_last + by_id[victims[-1].run_id].kv_tokens) // head.kv_tokens)
        assert before < after  # it was of use
        assert min(seats + len(victims) - 1, without_last // head.kv_tokens) < head.requests  # and the last one was needed


@given(heads, batches, rooms)
def test_a_victim_never_evicts_the_request_in_its_place(head: Contender, batch: list[Occupant], room: Room) -> None:
    """No turn-taking: seen from the victim, the head's request is the more urgent."""
    by_id = {occupant.run_id: occupant for occupant in batch}
    served = Occupant(run_id="head", urgency=head.urgency, left_s=600.0, kv_tokens=head.kv_tokens, context_tokens=0)
    for victim in make_room(NOW_S, head, batch, room, GPU, RULE):
        returned = by_id[victim.run_id]
        contender = Contender(urgency=returned.urgency, requests=1, kv_tokens=returned.kv_tokens, service_s=1.0)
        assert make_room(NOW_S, contender, [served], Room(seats=0, kv_tokens=0), GPU, RULE) == ()


# The cheaper method (figure 4) ----------------------------------------------------------------------------------------


def way_of(tokens: int, row: HardwareProfile, host_kv_tokens: int = 1_000_000) -> EvictionMethod:
    occupant = Occupant(run_id="r", urgency=Urgency(0, math.inf), left_s=60.0, kv_tokens=tokens, context_tokens=tokens)
    victim = cheapest_eviction(occupant, host_kv_tokens, row)
    assert victim is not None
    return victim.method


def with_fixed(*, kv_swap_base_ms: float, prefill_base_ms: float, kv_swap_us: float = 10.0, recompute_us: float = 120.0) -> HardwareProfile:
    """A decode step of one sequence takes 10 ms."""
    row = replace(hardware(kv_swap_us=kv_swap_us, recompute_us=recompute_us), prefill_base_ms=prefill_base_ms)
    return replace(row, kv_swap_base_ms=kv_swap_base_ms)


def test_the_choice_changes_where_the_lines_cross() -> None:
    row = with_fixed(kv_swap_base_ms=8.0, prefill_base_ms=12.0)  # 16 ms + 20 us a token against 2 ms + 120 us a token
    assert offload_pays(row) == pytest.approx((140.0, math.inf))
    assert (way_of(139, row), way_of(141, row)) == (EvictionMethod.ABORT, EvictionMethod.OFFLOAD)
    assert eviction_cost_s(EvictionMethod.OFFLOAD, 1_000, row) == pytest.approx(0.036)
    assert eviction_cost_s(EvictionMethod.ABORT, 1_000, row) == pytest.approx(0.122)
    assert way_of(1_000, row, host_kv_tokens=999) is EvictionMethod.ABORT


@pytest.mark.parametrize(
    ("row", "pays", "said"),
    [
        (with_fixed(kv_swap_base_ms=0.5, prefill_base_ms=20.0), (0.0, math.inf), "KV swap at any context (there and back 1 ms + 20 us"),
        (with_fixed(kv_swap_base_ms=8.0, prefill_base_ms=12.0), (140.0, math.inf), "KV swap above 140 tokens, up to there evict (there"),
        (
            replace(with_fixed(kv_swap_base_ms=8.0, prefill_base_ms=12.0), kv_swap=OperationSlowdown(slowdown=3.0)),  # as it was measured
            (766.667, math.inf),
            "KV swap above 767 tokens, up to there evict (there and back 48 ms + 60 us",
        ),
        (
            replace(with_fixed(kv_swap_base_ms=8.0, prefill_base_ms=12.0), slowdown=3.0),
            (29.4118, math.inf),
            "20 us a token, computed again 6 ms + 360 us",
        ),
        (with_fixed(kv_swap_base_ms=8.0, prefill_base_ms=0.0, kv_swap_us=90.0), (math.inf, math.inf), "evict at any context (there"),
        (with_fixed(kv_swap_base_ms=0.0, prefill_base_ms=12.0, kv_swap_us=80.0), (0.0, 50.0), "KV swap up to 50 tokens, above evict ("),
    ],
)
def test_the_text_names_the_chosen_method(row: HardwareProfile, pays: tuple[float, float], said: str) -> None:
    first, last = offload_pays(row)
    assert (first, last) == pytest.approx(pays, rel=1e-4)
    assert said in choice_text(row, 5_000)
    assert "host memory left for 5,000 tokens" in choice_text(row, 5_000)
    for tokens in (1, 49, 51, 139, 141, 766, 767, 10_000):
        assert way_of(tokens, row) is (EvictionMethod.OFFLOAD if first < tokens < last else EvictionMethod.ABORT)


def test_why_nothing_is_moved_is_said() -> None:
    assert choice_text(GPU, -1) == "evict (no host memory for KV)"
    assert choice_text(GPU, 0).startswith("KV swap")
    assert choice_text(None, 100) == "evict (nobody measured this model on this GPU)"
