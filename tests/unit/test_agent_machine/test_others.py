"""Other clients of the engine's server take room: pulls and evictions follow the capacity that they leave."""

from __future__ import annotations

import pytest

from qlm_agent.decisions.events import ControlMessage, EngineProgress, Message, OtherLoad, Outcome
from qlm_agent.decisions.expectations import SERVICE_MARGIN

from .transcript import CAPACITY, HARDWARE, Transcript, ended, group, pulled

DONE = Outcome.DONE


def others(runs: int, kv_tokens: int = 0) -> OtherLoad:
    return OtherLoad(runs=runs, kv_tokens=kv_tokens)


def beside(load: OtherLoad, **settings: object) -> tuple[Transcript, list[str]]:
    """Model m became active beside them, and the effects of that."""
    t = Transcript(**{"batch_max": 4, **settings})
    assert t.register() == ["pull nothing"]
    assert t.answer_pull(head="m") == ["load m active"]
    assert t.step(load) == []
    return t, t.loaded("m")


def full(load: OtherLoad, **settings: object) -> Transcript:
    """Two runs, each with a token; more of their group wait. A token takes 10 ms, an answer 2 s."""
    t, lines = beside(load, hardware=HARDWARE, **settings)
    assert lines[0].startswith("pull m")
    runs = [pulled(name, due=3_600.0) for name in ("1", "2")]
    assert t.answer_pull(*runs, head=group("m", name="batch", waiting=50, due=3_600.0))[:2] == ["start 1", "start 2"]
    t.at(0.1).produce(("1", 1), ("2", 1))
    t.answer_items("emit", DONE, DONE)
    return t


def urgent(t: Transcript, due: float = 3.0) -> list[str]:
    """The head is now a group of the same model with this deadline."""
    assert t.step(ControlMessage(message=Message.HEAD_CHANGED)) == ["pull nothing"]
    return t.answer_pull(head=group("m", name="urgent", due=due))


def test_what_they_leave_is_pulled() -> None:
    t, lines = beside(others(3, 6_000))
    assert lines == ["pull m x1"]
    assert t.pull is not None
    assert t.pull.kv_tokens == CAPACITY - 6_000


def test_where_they_leave_no_seat_it_waits_until_they_do() -> None:
    t, lines = beside(others(4, 100), poll_s=1.0)
    assert lines == []
    assert t.wake() == ["pull nothing"]  # it looks at its queue
    assert t.answer_pull(head="m") == []
    assert t.step(others(9, 100)) == []
    assert t.step(others(2, 100)) == ["pull m x2"]


def test_where_they_leave_no_kv_an_empty_batch_takes_no_first_request_either() -> None:
    t, lines = beside(others(1, CAPACITY))
    assert lines == []
    assert t.step(others(1, CAPACITY - 1)) == ["pull m x3"]  # the first request is given whatever it needs
    assert t.answer_pull(pulled("1"), head="m") == ["start 1"]
    assert t.step(others(0)) == ["pull m x3"]


def test_a_run_gives_its_place_to_the_head_and_to_nobody_else() -> None:
    t = full(others(2, 100))
    assert urgent(t) == ["abort 1", "pull m x1", "give back 1 evicted"]


def test_no_run_is_evicted_for_room_that_others_took_since() -> None:
    t = full(others(2, 100))
    assert t.step(others(5, 100)) == []  # as many as wait there too
    assert urgent(t) == []
    assert t.machine.operations.evictions == 0
    assert t.end(ended("2", 5)) == ["complete 2[1:6]=STOP"]
    assert t.step(others(2, 100)) == ["pull m x1"]  # without anybody's place


def test_nor_for_the_kv_that_they_took_since() -> None:
    t = full(others(2, 100))
    assert t.step(others(2, CAPACITY - 100)) == []
    assert urgent(t) == []
    assert t.machine.operations.evictions == 0


def test_a_little_that_they_took_is_made_up_for() -> None:
    t = full(others(2, 100))
    assert t.step(others(3, 100)) == []
    assert urgent(t) == ["abort 1 2", "pull m x1", "give back 1 2 evicted"]


def test_kv_in_host_memory_waits_for_the_room_that_they_leave() -> None:
    t = full(others(2, 100), host_kv_tokens=5_000)
    assert urgent(t) == ["offload 1"]
    assert t.offloaded("1") == ["pull m x1"]
    assert t.answer_pull(pulled("u", due=3.0), head=group("m", name="batch", due=3_600.0)) == ["start u"]
    t.step(others(4, 100))
    assert t.end(ended("u", 5), ended("2", 5)) == ["complete u[0:5]=STOP 2[1:6]=STOP"]
    assert t.step(others(3, 100)) == ["restore 1"]


def test_lookahead_that_has_no_seat_beside_them_goes_back_for_a_new_head() -> None:
    t = Transcript(hardware=HARDWARE, batch_max=2, lookahead_requests=1)
    assert t.serve() == ["pull m x3"]
    batch = [pulled(name, due=3_600.0) for name in ("1", "2", "3")]
    t.answer_pull(*batch, head=group("m", name="batch", waiting=50, due=3_600.0))
    t.at(0.1).produce(("1", 1))
    t.answer_items("emit", DONE)
    t.step(others(1))
    assert urgent(t, due=60.0) == ["abort 3 2", "pull m x1", "give back 3 2 displaced"]


def test_a_step_is_measured_as_that_of_a_batch_which_they_are_in() -> None:
    """Two runs beside 30 of others, tokens as far apart as in a batch of 32: the engine is no slower than its profile."""
    t = Transcript(hardware=HARDWARE, batch_max=64)
    t.register()
    t.answer_pull(head="m")
    t.step(others(30))
    t.loaded("m")
    t.answer_pull(pulled("1"), pulled("2"), head=group("m", waiting=50))
    expectations = t.machine.expectations
    token_s = expectations.output_s("m", 32) / expectations.outputs("m", "").output_tokens.mean
    for step in range(1, 6):
        t.at(step * token_s).produce(("1", 1), ("2", 1))
    assert abs(expectations.slowdown("m") - 1.0) < 0.05


def test_prompts_computed_between_two_tokens_do_not_look_like_a_slow_engine() -> None:
    t = Transcript(hardware=HARDWARE, batch_max=64)
    t.serve()
    t.answer_pull(pulled("1"), pulled("2", prompt=3_000))
    hardware, expectations = HARDWARE["m"], t.machine.expectations
    now_s = 0.1
    t.at(now_s).produce(("1", 1))
    for step, prefilled in enumerate((0, 3_000, 0, 0), start=1):
        now_s += hardware.decode_step_s(1.0, 100.0 + step) + hardware.prefill_work_s(prefilled, prefilled * prefilled)
        t.at(now_s).produce(("1", 1), *[("2", 1)][:prefilled])
    assert abs(expectations.slowdown("m") - 1.0) < 0.01


def test_cached_prompts_do_not_look_like_a_fast_engine_and_shorten_the_prefills_that_are_expected() -> None:
    t = Transcript(hardware=HARDWARE, batch_max=64)
    t.serve()
    t.answer_pull(pulled("1"), pulled("2", prompt=3_000))
    hardware, expectations = HARDWARE["m"], t.machine.expectations
    assert expectations.uncached_share("m", "64s") == 1.0
    now_s = 0.1
    t.at(now_s).step(EngineProgress(counts=[("1/1", 1)], cached=[("1/1", 0)]))
    for step, prefilled in enumerate((0, 600, 0, 0), start=1):
        now_s += hardware.decode_step_s(1.0, 100.0 + step) + hardware.prefill_work_s(prefilled)
        progress = EngineProgress(counts=[("1/1", 1), *[("2/1", 1)][:prefilled]], cached=[("2/1", 2_400)][:prefilled])
        t.at(now_s).step(progress)
    assert abs(expectations.slowdown("m") - 1.0) < 0.01
    assert expectations.uncached_share("m", "64s") == pytest.approx(700 / 3_100, rel=0.01)
    head = group("m", waiting=1)
    whole_s = hardware.prefill_s(head.waiting_prompt_tokens)
    expected_s = expectations.service_s(head, 0.0) / SERVICE_MARGIN - expectations.output_tokens("m") * expectations.token_s("m")
    assert expected_s == pytest.approx(700 / 3_100 * whole_s, abs=0.03)
