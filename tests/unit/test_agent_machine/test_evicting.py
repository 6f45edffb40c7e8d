"""The head of the virtual queue displaces runs (QLM section 5, request eviction)."""

from __future__ import annotations

from qlm_agent.decisions.events import ControlMessage, Message, Outcome
from qlm_agent.engines.port import Tier

from .transcript import CAPACITY, HARDWARE, Transcript, ended, group, pulled

DONE = Outcome.DONE


def full(*, due: float = 3_600.0, resumable: bool = True, displacements: int = 0, **settings: object) -> Transcript:
    """Two runs of a batch of two, each with a token; more of their group wait. A token takes 10 ms, an answer 2 s."""
    t = Transcript(hardware=HARDWARE, batch_max=2, **settings)
    t.serve()
    runs = [pulled(name, due=due, resumable=resumable, displacements=displacements) for name in ("1", "2")]
    assert t.answer_pull(*runs, head=group("m", name="batch", waiting=50, due=due)) == ["start 1", "start 2"]
    t.at(0.1).produce(("1", 1), ("2", 1))
    t.answer_items("emit", DONE, DONE)
    return t


def urgent(t: Transcript, due: float, **more: int) -> list[str]:
    """The head is now a group of the same model with this deadline."""
    assert t.step(ControlMessage(message=Message.HEAD_CHANGED)) == ["pull nothing"]
    return t.answer_pull(head=group("m", name="urgent", due=due, **more))  # type: ignore[arg-type]


def test_an_urgent_head_takes_a_place_in_the_full_batch() -> None:
    t = full()
    assert urgent(t, due=3.0) == ["abort 1", "pull m x1", "give back 1 evicted"]
    assert t.answer_pull(pulled("u", due=3.0), head=group("m", name="batch")) == ["start u"]
    assert t.answer_items("give back", DONE) == ["forget 1 given_back"]
    assert t.machine.operations.evictions == 1


def test_what_it_produced_is_stored_before_it_goes_back() -> None:
    t = full()
    t.at(0.12).produce(("1", 2), ("2", 2))
    assert urgent(t, due=3.0) == ["abort 1", "pull m x1", "emit 1[1:3]"]
    assert t.answer_items("emit", DONE) == ["give back 1 evicted"]


def test_a_head_that_is_in_time_waits() -> None:
    t = full()
    assert urgent(t, due=10.0) == []  # 2 s until a place is free, 2 s of its own
    assert t.end(ended("1", 5))[0] == "pull m x1"
    assert t.machine.operations.evictions == 0


def test_a_head_that_would_be_late_after_all_takes_its_place_then() -> None:
    t = full()
    assert urgent(t, due=6.0) == []
    t.at(2.0).produce(("1", 150), ("2", 150))  # they go on
    for at_s in (2.5, 3.0, 3.2, 3.4):
        lines = t.at(at_s).produce(("1", 40), ("2", 40))
        if any(line.startswith("abort") for line in lines):
            break
    assert t.machine.operations.evictions == 1
    assert t.now_s < 6.0 - 2.0  # while there is still time


def test_only_as_many_as_the_head_has_requests() -> None:
    t = Transcript(hardware=HARDWARE, batch_max=4)
    t.serve()
    t.answer_pull(*(pulled(name, due=3_600.0) for name in "1234"), head=group("m", name="batch", waiting=9, due=3_600.0))
    t.at(0.1).produce(*((name, 1) for name in "1234"))
    t.answer_items("emit", DONE, DONE, DONE, DONE)
    assert urgent(t, due=3.0, waiting=3) == ["abort 1 2 3", "pull m x3", "give back 1 2 3 evicted"]


def test_kv_for_the_head_and_no_more() -> None:
    t = Transcript(hardware=HARDWARE)
    t.serve()
    assert t.answer_pull(*(pulled(name, prompt=4_500, due=3_600.0) for name in "12"), head=group("m", name="batch")) == [
        "start 1",
        "start 2",
        "pull m x100",
    ]
    t.answer_pull(head=group("m", name="batch", prompt=4_500), blocked=4_713)
    t.at(0.1).produce(("1", 1), ("2", 1))
    t.answer_items("emit", DONE, DONE)
    assert t.step(ControlMessage(message=Message.HEAD_CHANGED)) == ["pull m x100"]
    head = group("m", name="urgent", prompt=3_000, due=4.5)
    assert t.answer_pull(head=head, blocked=3_213) == ["abort 1", "pull m x100", "give back 1 evicted"]
    assert t.pull is not None
    assert t.pull.kv_tokens == CAPACITY - 4_713


def test_the_more_urgent_are_left() -> None:
    t = full(due=2.5)
    assert urgent(t, due=3.0) == []


def test_who_cannot_be_continued_faithfully_is_left() -> None:
    t = full(resumable=False)
    assert urgent(t, due=3.0) == []
    assert t.machine.operations.evictions == 0


def test_a_run_displaced_three_times_is_left() -> None:
    assert urgent(full(displacements=3), due=3.0) == []
    assert urgent(full(displacements=2), due=3.0)[0] == "abort 1"


def test_strict_priorities_go_before_the_band_of_the_slos() -> None:
    t = full(slo_band=5)
    t.step(ControlMessage(message=Message.HEAD_CHANGED))
    assert t.answer_pull(head=group("m", priority=4))[0] == "abort 1"
    t = full(slo_band=5)
    t.step(ControlMessage(message=Message.HEAD_CHANGED))
    assert t.answer_pull(head=group("m", priority=6)) == []


def test_a_first_token_in_time_needs_no_whole_answer() -> None:
    t = full()
    t.step(ControlMessage(message=Message.HEAD_CHANGED))
    assert t.answer_pull(head=group("m", due=3.0, first_token=True)) == []  # a place is free in 2 s, its prefill takes 10 ms
    assert t.step(ControlMessage(message=Message.HEAD_CHANGED)) == ["pull nothing"]
    assert t.answer_pull(head=group("m", due=1.5, first_token=True))[0] == "abort 1"


def test_evicting_can_be_switched_off() -> None:
    assert urgent(full(evict=False), due=3.0) == []


def test_no_run_is_evicted_while_the_head_is_uncertain() -> None:
    t = full()
    t.step(ControlMessage(message=Message.HEAD_CHANGED))
    t.step(ControlMessage(message=Message.HEAD_CHANGED))
    assert t.answer_pull(head=group("m", name="urgent", due=3.0)) == ["pull nothing"]  # it may be older than the last message
    assert t.answer_pull(head=group("m", name="batch", due=3_600.0)) == []


# Another model --------------------------------------------------------------------------------------------------------------


def other_model(t: Transcript, due: float) -> list[str]:
    assert t.step(ControlMessage(message=Message.HEAD_CHANGED)) == ["pull nothing"]
    return t.answer_pull(head=group("n", name="urgent", due=due))


def test_for_an_urgent_head_of_another_model_the_whole_batch_goes_back() -> None:
    t = full()
    assert other_model(t, due=6.0) == ["abort 1 2", "load n active", "give back 1 2 evicted"]
    assert t.loaded("n", warm=("m",)) == ["pull n x2"]
    assert t.answer_pull(pulled("u", model="n", due=6.0), head=group("m", name="batch")) == ["start u", "pull nothing"][:1]


def test_a_head_of_another_model_that_has_time_waits_for_the_batch() -> None:
    t = full()
    assert other_model(t, due=60.0) == ["load n warm"]
    assert t.machine.operations.evictions == 0


def test_those_more_urgent_than_the_head_finish_before_the_swap() -> None:
    t = Transcript(hardware=HARDWARE, batch_max=2)
    t.serve()
    t.answer_pull(pulled("late", due=3_600.0), pulled("soon", due=2.0), head=group("n", name="urgent", due=6.0))
    t.at(0.1).produce(("late", 1), ("soon", 1))
    t.answer_items("emit", DONE, DONE)
    assert t.loaded("n", Tier.WARM, active="m", warm=("n",)) == []
    assert t.at(0.5).produce(("late", 1), ("soon", 1)) == []
    assert t.machine.operations.evictions == 0
    assert t.at(1.0).end(ended("soon", 1)) == ["abort late", "load n active", "complete soon[1:3]=STOP", "emit late[1:2]"]


def test_nothing_is_pulled_for_the_old_model_meanwhile() -> None:
    t = full()
    other_model(t, due=60.0)
    assert not any(line.startswith("pull m") for line in t.end(ended("1", 5)))
