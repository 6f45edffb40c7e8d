"""Requests beyond the batch wait in the engine, and return to the queue for a more urgent head (`unpull`)."""

from __future__ import annotations

from qlm_agent.decisions.events import ControlMessage, Message, Outcome

from .transcript import HARDWARE, Transcript, group, pulled

DONE = Outcome.DONE


def looking_ahead() -> Transcript:
    """A batch of two, each with a token, and two more that wait in the engine."""
    t = Transcript(hardware=HARDWARE, batch_max=2, lookahead_requests=2)
    assert t.serve() == ["pull m x4"]
    batch = [pulled(name, due=3_600.0) for name in "1234"]
    assert t.answer_pull(*batch, head=group("m", name="batch", waiting=50, due=3_600.0)) == [f"start {name}" for name in "1234"]
    t.at(0.1).produce(("1", 1), ("2", 1))
    t.answer_items("emit", DONE, DONE)
    return t


def head(t: Transcript, model: str, due: float, name: str = "urgent") -> list[str]:
    assert t.step(ControlMessage(message=Message.HEAD_CHANGED)) == ["pull nothing"]
    return t.answer_pull(head=group(model, name=name, due=due))


def test_a_head_that_is_more_urgent_goes_before_what_waits_in_the_engine() -> None:
    t = looking_ahead()
    # In time without a seat of its own: only the lookahead makes way, and behind the head.
    assert head(t, "m", due=60.0) == ["abort 4 3", "pull m x2", "give back 4 3 displaced"]
    assert t.answer_pull(pulled("u", due=60.0), head=group("m", name="batch", due=3_600.0)) == ["start u", "pull m x1"]
    assert t.machine.operations.evictions == 0


def test_a_head_that_would_be_late_gets_a_seat_too() -> None:
    t = looking_ahead()
    assert head(t, "m", due=3.0) == ["abort 4 3", "abort 1", "pull m x3", "give back 4 3 displaced"]
    assert t.answer_items("give back", DONE, DONE) == ["forget 4 given_back", "forget 3 given_back", "give back 1 evicted"]


def test_a_head_of_another_model_that_is_more_urgent() -> None:
    t = looking_ahead()
    assert head(t, "n", due=60.0) == ["abort 4 3", "load n warm", "give back 4 3 displaced"]


def test_the_plans_order_is_kept_for_what_was_pulled_by_it() -> None:
    """The group that stood behind the lookahead all along is no reason to give it back, however urgent."""
    t = Transcript(hardware=HARDWARE, batch_max=2, lookahead_requests=2)
    t.serve()
    batch = [pulled(name, due=3_600.0) for name in "1234"]
    t.answer_pull(*batch, head=group("n", name="next", due=60.0))
    t.at(0.1).produce(("1", 1), ("2", 1))
    t.answer_items("emit", DONE, DONE)
    assert head(t, "n", due=60.0, name="next") == []


def test_heads_that_are_not_more_urgent_wait_behind_the_lookahead() -> None:
    t = looking_ahead()
    assert head(t, "m", due=7_200.0) == []
    assert head(t, "m", due=3_600.0) == []


def test_who_stands_in_the_engine_behind_one_without_room_waits_too() -> None:
    t = Transcript(hardware=HARDWARE, batch_max=4, lookahead_requests=2)
    t.serve()
    batch = [pulled(name, prompt=prompt, due=3_600.0) for name, prompt in (("1", 4_000), ("2", 4_000), ("3", 4_000), ("4", 100))]
    t.answer_pull(*batch, head=group("m", name="batch", waiting=50, due=3_600.0))
    t.at(0.1).produce(("1", 1), ("2", 1))
    t.answer_items("emit", DONE, DONE)
    assert (
        t.answer_pull(head=group("m", name="urgent", due=60.0))[0] == "abort 4 3"
    )  # there is KV for 4, and the engine takes them in order


def test_the_head_is_looked_at_before_more_lookahead_is_taken() -> None:
    t = Transcript(hardware=HARDWARE, batch_max=2, lookahead_requests=2)
    t.serve()
    t.answer_pull(*(pulled(name, due=3_600.0) for name in "12"))
    t.at(0.1).produce(("1", 1), ("2", 1))
    t.answer_items("emit", DONE, DONE)
    assert t.step(ControlMessage(message=Message.WAKE)) == ["pull nothing"]
    # It gets a seat, not a place in the engine's line.
    assert t.answer_pull(head=group("m", name="urgent", due=3.0)) == ["abort 1", "pull m x3", "give back 1 evicted"]


def test_what_has_a_seat_and_kv_is_about_to_start() -> None:
    t = Transcript(hardware=HARDWARE, batch_max=2, lookahead_requests=2)
    t.serve()
    t.answer_pull(*(pulled(name, due=3_600.0) for name in "123"), head=group("m", name="batch", waiting=50, due=3_600.0))
    t.at(0.1).produce(("1", 1))
    t.answer_pull(pulled("4", due=3_600.0), head=group("m", name="batch", waiting=50, due=3_600.0))
    t.answer_items("emit", DONE)
    assert head(t, "m", due=60.0)[0] == "abort 4 3"
